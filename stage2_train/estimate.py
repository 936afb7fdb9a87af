"""The held-out acceptance estimate: the training forward on documents that are never trained on.

Called by train.py at step 0, every eval_every steps and at the end. Real decoding (`dflash eval`) is the judge; this
is the cheap curve beside it. The definition is in loss.read_counts.
"""

from __future__ import annotations

import torch

from stage2_train.data import BatchBuilder, Share
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.loss import read_counts
from stage2_train.objective import Engine, block_states, counts_only, move
from stage2_train.packing import batches_in, pack, rank_rows

# Anchors of the estimate are drawn as for an epoch that training never reaches: fixed for a seed, and never trained on.
ESTIMATE_EPOCH = 2**31


def estimate(drafter: Drafter, builder: BatchBuilder, share: Share, engine: Engine, ranks: Ranks) -> dict[str, float]:
    """Acceptance numbers over the builder's documents, the same in every process; {} when nothing is supervised.

    Shapes are those of training. Gradients stay enabled though nothing is differentiated: a compiled layer has one
    graph for grad mode, and no_grad would make a second.
    """
    size = drafter.config.block_size
    sums = torch.zeros(3 * (size - 1) + 3, dtype=torch.float64, device=engine.device)
    rows = pack(builder.lengths(), range(len(builder.documents)), builder.shapes.max_length)
    with torch.set_grad_enabled(engine.attention == "flex"):
        for number in range(batches_in(rows, share.batch_rows)):
            mine = rank_rows(rows, number, share.batch_rows, share.rank, share.world_size)
            for first in range(0, len(mine), share.rows_per_pass):
                part = mine[first : first + share.rows_per_pass]
                if not any(part):
                    continue
                batch = move(builder.build(part, ESTIMATE_EPOCH), drafter.config.mask_token_id, engine)
                sums += counts_only(block_states(drafter, batch, engine), batch, engine)
    return read_counts(ranks.sum(sums).cpu(), size)
