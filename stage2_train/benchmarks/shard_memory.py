"""What FSDP2 takes of a GPU at N processes, measured on one: a process among N - 1 that are not there.

    python -m stage2_train.benchmarks.shard_memory --shape 27b --nproc 2 --store S

The process group is torch's fake one: it has N ranks and sends nothing, so every buffer is as large as among real
ranks and every number that would come from another rank is arbitrary. Only bytes are read from it, never losses. With
as many GPUs, `parallel --runs fsdp,fits` measures the same for real. Read sharding.py for what is kept in shares.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shared.benchmarks.measure import table
from shared.config import knob, options_of
from shared.progress import say, tell
from stage2_train.benchmarks.parallel import STATE_BYTES, row_of
from stage2_train.benchmarks.step_report import GIB

if TYPE_CHECKING:
    from stage2_train.config import TrainConfig
    from stage2_train.data import StepRows
    from stage2_train.training_parts import Parts

_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMemoryConfig:
    """Settings of the benchmark."""

    store: Path = knob(help="Store to read; made when it is not there.")
    shape: str = knob("27b", help="27b, 8b or toy.")
    nproc: int = knob(2, help="Processes that share the state.")
    fits: tuple[str, ...] = knob(
        ("16384x2048c", "8192x1024c", "4096x512c"), help="Rows as TOKENSxANCHORS, c: checkpointed layers."
    )
    train: str | None = knob(None, help="Further options as NAME=VALUE of TrainConfig, separated by spaces.")


@click.command()
@options_of(ShardMemoryConfig)
def main(config: ShardMemoryConfig) -> None:
    """Print the peak memory of one process among --nproc."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from stage2_train.benchmarks.made_store import fitting, make_store, train_options
    from stage2_train.distributed import Ranks

    shape = fitting(config.shape, None, None)
    make_store(config.store, shape, 2 * config.nproc, shape.max_length)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("fake", rank=0, world_size=config.nproc, store=FakeStore())
    rows = []
    with tempfile.TemporaryDirectory(prefix="shard-memory-") as folder:
        for text in config.fits:
            fields = {
                "steps": _STEPS, "batch_rows": config.nproc, "parallel": "fsdp", "device": device.type,
                "compile_cache": Path(folder) / "cache", **row_of(text), **train_options(config.train or ""),
            }  # fmt: skip
            train = shape.train_config(config.store, Path(folder) / text, **fields)
            rows.append({"row": text, **_measure(train, Ranks(0, config.nproc, device))})
            say(", ".join(f"{name} {value}" for name, value in rows[-1].items()))  # the next one takes minutes
            gc.collect()
            torch._dynamo.reset()  # the contract wants each run's regions compiled, also where a graph would serve two
    tell(table(f"GiB of one process of {config.nproc}, fsdp", rows))
    dist.destroy_process_group()


def _measure(config: TrainConfig, ranks: Any) -> dict[str, str]:
    """Peak over some updates after the first, and its known parts."""
    import torch

    from stage2_train import launch_train
    from stage2_train.benchmarks.timed_run import frozen_bytes
    from stage2_train.compile_warm_up import compiled_regions
    from stage2_train.data import Prefetcher, stream
    from stage2_train.device_feed import make_feed
    from stage2_train.training_parts import set_up

    config.run_dir().mkdir(parents=True)
    run = launch_train.check(config)
    launch_train.open_run(config.run_dir(), run, config)
    parts = set_up(config.run_dir(), run, ranks, "memory")
    cuda = ranks.device.type == "cuda"
    with compiled_regions(parts):
        feed = make_feed(Prefetcher(stream(parts.builder, parts.share, 0, 0), config.prefetch), ranks.device)
        try:
            for step in range(_STEPS):
                if step == 1 and cuda:
                    torch.cuda.reset_peak_memory_stats(ranks.device)
                _update(parts, next(feed))
        finally:
            feed.close()
    most = torch.cuda.max_memory_allocated(ranks.device) if cuda else 0
    held = torch.cuda.max_memory_reserved(ranks.device) if cuda else 0
    parameters = sum(parameter.numel() for parameter in parts.drafter.parameters())
    state, tables = STATE_BYTES * parameters / ranks.world_size, frozen_bytes(parts.engine)
    return {
        "peak": f"{most / GIB:.2f}" if cuda else "no GPU",
        "held by the allocator": f"{held / GIB:.2f}",
        "fp32 state": f"{state / GIB:.2f}",
        "target's tables": f"{tables / GIB:.2f}",
        "the rest": f"{(most - state - tables) / GIB:.2f}",
    }


def _update(parts: Parts, rows: StepRows) -> None:
    """What Stepper.step does, without a look at the numbers: they are arbitrary here."""
    gradient = parts.stepper.gradient
    gradient.zero()
    for batch in rows.placed():
        with gradient.summing(last=True):
            parts.stepper._forward_backward(batch, 1.0)
    gradient.finish()
    gradient.squares()
    parts.optimizer.step(1e-4)


if __name__ == "__main__":
    main()
