"""NCCL on few of a GPU's multiprocessors while backward computes, where backward lasts long enough for that.

NCCL takes 16 to 32 of them, and the matrix products beside it lose more time than it saves. Measured on an H200 with
the 27B drafter's step and kernels in NCCL's place (benchmarks/beside.py): on 24 blocks what is sent in 7.7 ms costs the
step 10 ms, so nothing is hidden; on 16 11 ms cost 10, on 8 22 ms cost 4, and on 4 44 ms cost 11: then the last layer's
is still on its way when backward is over. Called by train.py before its loop. Next: gradient.py.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from stage2_train.gradient import FlatGradient
from stage2_train.training_parts import Parts

BLOCKS = 8
# What one of NCCL's thread blocks moves at least: 16 of them for the 190 GB/s of eight network cards, say its authors
# (github.com/NVIDIA/nccl/issues/689); more on NVLink.
BLOCK_BYTES_S = 12e9
# Of backward, for a rate that is an estimate, and because gradients come in bursts.
SHARE = 0.7


def fits_beside(gradient_bytes: int, world_size: int, backward_s: float) -> bool:
    """Whether BLOCKS thread blocks send a gradient within SHARE of backward.

    A ring of W sends and receives 2 (W - 1) / W of the bytes on every rank.
    """
    sent = 2 * (world_size - 1) / world_size * gradient_bytes
    return sent <= SHARE * backward_s * BLOCKS * BLOCK_BYTES_S


def send_beside(parts: Parts, backward_s: float) -> None:
    """Give a replicated gradient on GPUs its own communicator of few blocks, if `backward_s` (seconds of the last
    micro-batch's backward; rank 0's counts) is enough; recorded. Left as it is where NCCL_MAX_CTAS says how many.
    """
    ranks, gradient = parts.ranks, parts.stepper.gradient
    if ranks.world_size == 1 or not isinstance(gradient, FlatGradient) or dist.get_backend() != "nccl":
        return
    backward_s = ranks.gather([backward_s])[0][0]
    size = gradient.buffer.nbytes
    told = ranks.any("NCCL_MAX_CTAS" in os.environ)  # nodes may differ; whether to make a group they may not
    few = not told and fits_beside(size, ranks.world_size, backward_s)
    if few:
        gradient.beside = narrow_group(ranks.device)
    parts.event(
        "sending",
        f"{size / 1e9:.3g} GB of gradients beside {backward_s:.3g} s of backward, on "
        + (f"{BLOCKS} multiprocessors" if few else "as many multiprocessors as NCCL takes"),
        gradient_bytes=size,
        backward_seconds=backward_s,
        blocks=BLOCKS if few else None,
    )


def narrow_group(device: torch.device) -> dist.ProcessGroup:
    """All ranks once more, over a communicator of BLOCKS thread blocks; a collective, connected when it returns."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = options.config.min_ctas = BLOCKS
    group = dist.new_group(pg_options=options)  # waits NCCL's 10 minutes: ranks that send are in the same step
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects: else within the first step
    torch.cuda.synchronize(device)
    return group
