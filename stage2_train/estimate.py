"""The held-out acceptance estimate: decoding played back on the text of documents that are never trained on.

Called by train.py at step 0, every eval_every steps and at the end. Real decoding (`dflash eval`) is the judge; this
is the cheap curve beside it. Next: acceptance.py (what an accepted length is).

acceptance_length_estimate is acceptance.acceptance_length of the cycles that decoding would make if the target wrote
the stored text again: a cycle starts at the first supervised token, adds the leading drafts that agree with the text
and the token after them, and the next one starts there. To follow that, every position of the text is an anchor; a row
is run as often as that takes. The mean over blocks that start anywhere (tokens_per_block of loss.read_counts) is no
estimate of it: a stretch that drafts well holds many positions and few cycles, one that drafts badly few positions and
many cycles. What still differs from decoding: the stored text may not be the target's own greedy one, and an
evaluation has other prompts and lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shared.errors import NonFinite
from shared.worker import stop_requested
from stage2_train.acceptance import Cycle
from stage2_train.batch import Batch
from stage2_train.blame import blame_estimate
from stage2_train.data import BatchBuilder, Share
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.loss import count_size, read_counts
from stage2_train.objective import Engine, block_states, counts_only, move
from stage2_train.packing import Row, batches_in, pack, rank_rows

Array = np.ndarray[Any, Any]


class StopAsked(Exception):
    """Ends an estimate that nobody waits for any more."""


def estimate(
    drafter: Drafter,
    builder: BatchBuilder,
    share: Share,
    engine: Engine,
    ranks: Ranks,
    told: Callable[[int], None] = lambda documents: None,
    *,
    step: int = 0,
    to_the_end: bool = True,
) -> dict[str, float]:
    """Acceptance numbers over the builder's documents, the same in every process; {} when nothing is supervised.

    `told` hears after every pass how many documents all processes have done together. Raises NonFinite in every
    process, naming `step` and the cause: a document, or the weights; StopAsked, unless `to_the_end`, in a process that
    is alone and asked to stop.
    Shapes are those of training. Gradients stay enabled though nothing is differentiated: a compiled layer has one
    graph for grad mode, and no_grad would make a second.
    """

    def look() -> None:
        if not to_the_end and ranks.world_size == 1 and stop_requested():
            raise StopAsked

    counts = torch.zeros(count_size(engine.objective.drafts), dtype=torch.float64, device=engine.device)
    done: list[tuple[Sequence[Row], torch.Tensor]] = []
    cycles: list[Cycle] = []
    documents = 0
    rows = pack(builder.lengths(), range(len(builder.documents)), builder.shapes.max_length)
    with torch.set_grad_enabled(engine.attention == "flex"):
        for number in range(batches_in(rows, share.batch_rows)):
            theirs = [rank_rows(rows, number, share.batch_rows, r, share.world_size) for r in range(share.world_size)]
            for first in range(0, len(theirs[0]), share.rows_per_pass):
                parts = [mine[first : first + share.rows_per_pass] for mine in theirs]
                # A rank without rows runs on empty ones: layers that are sharded are gathered by all ranks or none.
                if not any(any(part) for part in parts):
                    continue
                mine = parts[share.rank]
                done.append((mine, _follow(drafter, builder, mine, passes(builder, parts), engine, cycles, look)))
                counts += done[-1][1]
                documents += sum(len(row) for part in parts for row in part)
                told(documents)
    played = [len(cycles), sum(cycle.kept for cycle in cycles)]
    sums = torch.cat([counts, torch.tensor(played, dtype=torch.float64, device=engine.device)])
    sums = ranks.sum(sums).cpu()
    if not torch.isfinite(sums).all():  # of all ranks together, so that none goes on alone
        raise NonFinite(blame_estimate(_suspects(builder, done), drafter, ranks, step))
    numbers = read_counts(sums[:-2])
    if sums[-2] > 0:
        numbers["acceptance_length_estimate"] = float(sums[-1] / sums[-2])
    return numbers


def _suspects(builder: BatchBuilder, done: Sequence[tuple[Sequence[Row], torch.Tensor]]) -> Iterator[Batch]:
    """The passes of this rank whose counts are not finite, read once more."""
    for rows, counts in done:
        if not torch.isfinite(counts).all():
            yield from builder.follow(rows, 1)


def passes(builder: BatchBuilder, parts: Sequence[Sequence[Row]]) -> int:
    """Batches in which every anchor of these rows finds a slot; from lengths alone, so all ranks know it for all rows.

    An answer of n supervised tokens has n - 1 anchors: the last token predicts nothing.
    """
    supervised = builder.documents.n_supervised
    row_anchors = [
        sum(max(0, min(int(supervised[piece.document]), piece.length) - 1) for piece in row)
        for part in parts
        for row in part
    ]
    return max(1, -(-max(row_anchors, default=0) // builder.shapes.anchors))


def _follow(
    drafter: Drafter,
    builder: BatchBuilder,
    rows: Sequence[Row],
    batches: int,
    engine: Engine,
    cycles: list[Cycle],
    look: Callable[[], None],
) -> torch.Tensor:
    """loss.count's vector of all positions of these rows; their documents' cycles are added to `cycles`."""
    counts = torch.zeros(count_size(engine.objective.drafts), dtype=torch.float64, device=engine.device)
    seen: list[tuple[Array, Array, Array, Array]] = []
    for batch in builder.follow(rows, batches):
        look()
        placed = move(batch, drafter.config.mask_token_id, engine)
        found, right = counts_only(block_states(drafter, placed, engine), placed, engine)
        counts += found
        facts = (batch.start, batch.anchor_positions, batch.remaining)
        seen.append((*facts, right.view(batch.start.shape).cpu().numpy()))
    starts, anchors, remaining, agreeing = (np.concatenate(parts, axis=1) for parts in zip(*seen, strict=True))
    for row in range(len(rows)):
        used = np.flatnonzero(remaining[row])
        for part in np.split(used, np.flatnonzero(np.diff(starts[row, used])) + 1) if len(used) else ():
            cycles += walk(anchors[row, part], agreeing[row, part], remaining[row, part])
    return counts


def walk(anchors: Array, right: Array, remaining: Array) -> list[Cycle]:
    """Follow decoding over the anchors of one document: all of it, ascending.

    right: leading right drafts of each anchor's block; remaining: supervised tokens after it in its answer, which end
    a cycle as an end-of-sequence token does. Past the end of an answer the walk goes on at the next one.
    """
    cycles, at = [], 0
    while at < len(anchors):
        kept = min(int(right[at]) + 1, int(remaining[at]))
        cycles.append(Cycle(int(right[at]), kept))
        at = int(np.searchsorted(anchors, anchors[at] + kept))
    return cycles
