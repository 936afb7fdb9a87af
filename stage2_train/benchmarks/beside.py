"""What sending gradients beside backward costs a step, on one GPU: kernels that do there what NCCL's do.

    python -m stage2_train.benchmarks.beside --shape 27b --store /fast/disk/bench.zarr

The real step, buckets and hooks as among two ranks; in the place of every all-reduce a kernel of as many thread blocks
reads the bucket and a buffer and writes the sum to that buffer, on a stream of its own. The link is left out (`alone`
says how fast it would have been); with two GPUs, parallel.py has all of it. Read sending.py for what is decided by it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shared.benchmarks.measure import table
from shared.config import knob, options_of
from shared.progress import say, tell

if TYPE_CHECKING:
    from torch import Tensor

    from stage2_train.training_parts import Parts

WIDE = 24
"""Thread blocks of what is sent when backward is over."""
Send = Callable[["Tensor", int], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideConfig:
    """Settings of the benchmark."""

    store: Path = knob(help="Store to read; made when it is not there.")
    shape: str = knob("27b", help="27b, 8b or toy.")
    blocks: tuple[int, ...] = knob((2, 4, 8, 16, 24), help="Thread blocks that send.")
    steps: int = knob(5, help="Measured steps of each, every round.")
    rounds: int = knob(3, help="Rounds over all of them.")
    rows: int = knob(3, help="Rows of the store.")


@click.command()
@options_of(BesideConfig)
def main(config: BesideConfig) -> None:
    """Print the milliseconds that each number of thread blocks adds to a step, and how long it sends for."""
    import torch

    from stage2_train.benchmarks.made_store import fitting, make_store

    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA GPU: there is nothing to measure here")
    shape = fitting(config.shape, None, None)
    make_store(config.store, shape, config.rows, shape.max_length)
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        fields = {"steps": 10**6, "compile_cache": Path(folder) / "cache", "device": "cuda"}
        found, alone = _measure(shape.train_config(config.store, Path(folder) / "run", **fields), config)
    base = statistics.median(found[0])
    rows = []
    for blocks, seconds in found.items():
        # Of each step, what it took more than the steps without sending of the same round.
        rounds = zip(_cut(seconds, config.steps), _cut(found[0], config.steps), strict=True)
        added = [statistics.median(these) - statistics.median(those) for these, those in rounds]
        rows.append(
            {
                "blocks": blocks or "none",
                "step ms": 1e3 * statistics.median(seconds),
                "added ms": 1e3 * statistics.median(added),
                "from": f"{1e3 * min(added):.1f}",
                "to": f"{1e3 * max(added):.1f}",
                "alone ms": 1e3 * alone[blocks] if blocks else 0.0,
                "two / one": f"{2 * base / (base + statistics.median(added)):.3f}",
            }
        )
    tell(table(f"{torch.cuda.get_device_name()}, {config.shape}, what is sent last on {WIDE} blocks", rows))


def _cut(values: list[float], size: int) -> list[list[float]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def _measure(train: Any, config: BesideConfig) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Seconds of every measured step by thread blocks (0: nothing is sent), and of sending all with nothing beside."""
    import torch

    from stage2_train import launch_train
    from stage2_train.compile_warm_up import compiled_regions
    from stage2_train.data import Prefetcher, stream
    from stage2_train.device_feed import make_feed
    from stage2_train.distributed import Ranks
    from stage2_train.gradient import FlatGradient
    from stage2_train.train import fresh_state
    from stage2_train.training_parts import set_up

    train.run_dir().mkdir(parents=True)
    run = launch_train.check(train)
    launch_train.open_run(train.run_dir(), run, train)
    device = torch.device("cuda", 0)
    parts = set_up(train.run_dir(), run, Ranks(0, 1, device), "beside")
    gradient = parts.stepper.gradient
    assert isinstance(gradient, FlatGradient)
    parts.stepper.gradient = two = FlatGradient(parts.drafter, Ranks(0, 2, device))
    parts.optimizer.gradient = two
    del gradient
    send, state = _sender(two.buffer), fresh_state(parts.engine.objective.drafts)
    found: dict[int, list[float]] = defaultdict(list)
    with compiled_regions(parts):
        feed = make_feed(Prefetcher(stream(parts.builder, parts.share, 0, 0), train.prefetch), device)
        try:
            for blocks in (0, *config.blocks):  # not measured: kernels are compiled, clocks settle
                _step(parts, state, feed, two, blocks, send)
            for number in range(config.rounds):
                for blocks in (0, *config.blocks):
                    _step(parts, state, feed, two, blocks, send)
                    found[blocks] += [_step(parts, state, feed, two, blocks, send) for _ in range(config.steps)]
                medians = {blocks: round(1e3 * statistics.median(seconds)) for blocks, seconds in found.items()}
                say(f"round {number + 1} of {config.rounds}: ms a step by blocks {medians}")
        finally:
            feed.close()
    alone = {}
    for blocks in config.blocks:
        torch.cuda.synchronize()
        started = time.perf_counter()
        send(two.buffer, blocks)
        torch.cuda.synchronize()
        alone[blocks] = time.perf_counter() - started
    return found, alone


def _step(parts: Parts, state: dict[str, Any], feed: Any, gradient: Any, blocks: int, send: Send) -> float:
    """Seconds of one step in which `blocks` thread blocks send (0: none)."""
    import torch

    from stage2_train.distributed import Ranks

    gradient.ranks = Ranks(0, 2 if blocks else 1, parts.ranks.device)
    gradient.beside = "beside" if blocks not in (0, WIDE) else None
    with _sending(blocks, send):
        rows = next(feed)
        torch.cuda.synchronize()
        started = time.perf_counter()
        parts.stepper.step(state, rows, 10**6)
        torch.cuda.synchronize()
    return time.perf_counter() - started


@contextmanager
def _sending(blocks: int, send: Send) -> Iterator[None]:
    """All-reduces are our kernel's: of `blocks` blocks when they go by the group beside, else of WIDE."""
    import torch.distributed as dist

    real = dist.all_reduce

    def all_reduce(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return send(tensor, blocks if group is not None else WIDE)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce = real


def _sender(buffer: Tensor) -> Send:
    """Start the kernel on a stream of its own; what it returns can be waited for as NCCL's work can."""
    import torch
    import triton
    import triton.language as tl

    stream, target = torch.cuda.Stream(), torch.zeros_like(buffer)

    # 1,024 threads with their registers leave no room for a product's block on the same multiprocessor, like NCCL's.
    size = tl.constexpr(2**14)

    @triton.jit
    def add(source, into, count):  # type: ignore[no-untyped-def] # Triton reads annotations
        first = tl.program_id(0).to(tl.int64) * size
        while first < count:
            places = first + tl.arange(0, size)
            inside = places < count
            total = tl.load(source + places, mask=inside) + tl.load(into + places, mask=inside)
            tl.store(into + places, total, mask=inside)
            first += tl.num_programs(0).to(tl.int64) * size

    class Work:
        def __init__(self) -> None:
            self.done = stream.record_event()

        def wait(self) -> None:
            torch.cuda.current_stream().wait_event(self.done)

    def send(tensor: Tensor, blocks: int) -> Work:
        stream.wait_stream(torch.cuda.current_stream())
        first = tensor.storage_offset() - buffer.storage_offset()
        with torch.cuda.stream(stream):
            add[(blocks,)](tensor, target[first : first + tensor.numel()], tensor.numel(), num_warps=32)
        return Work()

    return send


if __name__ == "__main__":
    main()
