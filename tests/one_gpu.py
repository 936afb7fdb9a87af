"""A worker of `dflash train` that shares GPU 0 with the other ranks, for changed_worker.py.

NCCL wants a GPU for each rank; gloo adds tensors of one GPU up as well, over the host, so that a machine with one GPU
can show that ranks which compute on a GPU train what one does. How fast they are it cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from stage2_train import train as training
from stage2_train.distributed import Ranks


def work(run_dir: Path, rank: int, world_size: int) -> None:
    """One rank."""
    training.pick_device = lambda _: torch.device("cuda", 0)
    training.process_group = _group
    training.main(run_dir, rank, world_size)


@contextmanager
def _group(rank: int, world_size: int, device: torch.device) -> Iterator[Ranks]:
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    yield Ranks(rank, world_size, device)
    dist.destroy_process_group()
