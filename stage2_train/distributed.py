"""Which process this is, and sums over all of them. The reader of RANK and friends in stage 2.

gloo on CPUs, NCCL on GPUs; one process needs no group. Called by train.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import ConfigRefused


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size`; `device` is its own."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process; all processes get the same answer."""
        if self.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every process's numbers, by rank; all processes get the same table."""
        table = torch.zeros(self.world_size, len(values), dtype=torch.float64, device=self.device)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        found: list[list[float]] = self.sum(table).tolist()
        return found

    def barrier(self) -> None:
        """Wait for all processes."""
        self.any(False)  # reads the answer: on a GPU the sum alone would make the device wait, not this process


def environment_ranks() -> tuple[int, int]:
    """(rank, world size) as torchrun gives them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def run_id() -> str:
    """The id that the parent gave this run's records; "local" when there is no parent."""
    return os.environ.get("DFLASH_RUN_ID", "local")


def pick_device(asked: str) -> torch.device:
    """`asked` is auto, cpu or cuda; a GPU is picked by LOCAL_RANK, not RANK (each node starts again at 0).

    Raises ConfigRefused when cuda is asked and there is none, or fewer GPUs than local processes.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local, found = local_rank(), torch.cuda.device_count()
    if local >= found:
        raise ConfigRefused(
            f"process {local} of this machine asks for a GPU, {found} are visible; lower --nproc or use --device cpu"
        )
    return torch.device("cuda", local)


@contextmanager
def process_group(rank: int, world_size: int, device: torch.device) -> Iterator[Ranks]:
    """Join the other processes (MASTER_ADDR and MASTER_PORT name the meeting point) and leave in the end."""
    ranks = Ranks(rank, world_size, device)
    if world_size == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", rank=rank, world_size=world_size, device_id=device, timeout=timedelta(minutes=20)
        )
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=20))
    yield ranks
    # Not after an error: NCCL may wait for ever for a peer that is gone or a device that is broken, and how this
    # process ends would never be written.
    dist.destroy_process_group()
