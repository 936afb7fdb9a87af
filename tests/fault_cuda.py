"""Toy ranks that hold memory of a GPU and work on it, and what can become of them there.

Used by the scenarios of tests/fault_scenarios_cuda.py, whose entry is "fault_cuda:work"; all else about the ranks is as
in fault_toys.py. Ranks share a GPU where there are more ranks than GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fault_toys import Plan, Toy

from shared import phases

HELD_BYTES = 1 << 30
# Two minutes at 1.7 GHz, should nobody end it: no kernel may be left on the GPU for ever.
ASLEEP_CYCLES = 200_000_000_000
FAR_AWAY = 1 << 42


def work(run_dir: Path, rank: int, world_size: int) -> None:
    """Steps and checkpoints with a matrix product before each moment."""
    toy = CudaToy(Plan.read(run_dir), run_dir, rank, world_size)
    toy.begin()
    toy.peers.join()
    toy.loop()


class CudaToy(Toy):
    """One rank's walk, on a GPU."""

    held: Any
    square: Any

    def begin(self) -> None:
        """Take memory of this rank's GPU. Each thing that takes seconds is a step of its own: limits are short here."""
        self.reporter.update(phases.LOAD, 0, None, "parts")
        import torch

        self.reporter.update(phases.LOAD, 1, None, "parts")
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.held = torch.ones(HELD_BYTES // 4, device="cuda")
        self.reporter.update(phases.LOAD, 2, None, "parts")
        self.square = torch.ones(512, 512, device="cuda")
        self.multiply()
        self.reporter.update(phases.LOAD, 3, None, "parts")

    def multiply(self) -> None:
        """Work on the GPU, and wait for it."""
        assert float((self.square @ self.square).mean()) == 512.0

    def tick(
        self, phase: str, number: int, done: float = 0.0, total: float | None = None, unit: str = "modules"
    ) -> None:
        """One moment, after some work."""
        self.multiply()
        super().tick(phase, number, done, total, unit)


def device_assert(_: Toy) -> None:
    """A row that is not there."""
    import torch

    torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    torch.cuda.synchronize()


def illegal_address(toy: CudaToy) -> None:
    """A kernel writes 4 TiB past a tensor, into a storage that is not there: no compiler is needed for that."""
    import torch

    nowhere = torch._C._construct_storage_from_data_pointer(
        toy.square.data_ptr() + FAR_AWAY, toy.square.device, toy.square.nbytes
    )
    torch.empty(0, device="cuda").set_(nowhere).fill_(1.0)
    torch.cuda.synchronize()


def out_of_memory(_: Toy) -> None:
    """Take all that is left of the GPU."""
    import torch

    kept = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(1024)]
    raise AssertionError(f"{len(kept)} GiB and nobody minded")


def sleep_on_the_gpu(_: Toy) -> None:
    """A kernel that does not end: the CPU waits for it."""
    import torch

    torch.cuda._sleep(ASLEEP_CYCLES)
    torch.cuda.synchronize()
