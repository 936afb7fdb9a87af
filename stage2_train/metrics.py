"""What a run says about itself while it trains: learning, speed and memory, into the manifest and TensorBoard.

Called by train.py's loop; rank 0 writes. The speed is that of training alone: estimates, saving and whatever else the
loop does `outside` is taken out of the clock. Next: flops.py (what counts as work), tensorboard.py.
"""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from manifests.records import MetricRecord
from stage2_train.batch import Batch
from stage2_train.device_feed import Feed
from stage2_train.flops import backward_flops, step_flops, unused
from stage2_train.step import Window
from stage2_train.tensorboard import EventFile
from stage2_train.training_parts import Parts

logger = logging.getLogger(__name__)

_GROUPS = 5
_PACE = "s/step at least"
_SLOW_S = 10.0


class Metrics:
    """The numbers of one run from its first or resumed step on, and the clock between its log lines."""

    def __init__(self, parts: Parts, state: Mapping[str, Any]) -> None:
        """Measure the ceiling and open the event file. Raises DiskFull or PathNotWritable."""
        self._parts = parts
        self._ceiling = 0.0
        self._events: EventFile | None = None
        if parts.ranks.rank == 0:
            dtype = parts.engine.dtype
            self._ceiling = ceiling(parts.ranks.device, dtype)
            parts.event("ceiling", f"{self._ceiling:.4g} TFLOP/s in {dtype} products", tflops=self._ceiling)
            if parts.config.tensorboard:
                step = state["global_step"]
                self._events = EventFile(parts.run_dir, parts.run_id, step + 1 if step else 0)
        self._restart(state)

    def start(self, state: Mapping[str, Any], feed: Feed) -> None:
        """Start the clock, when all that comes before the first step is done."""
        feed.waited()
        self._restart(state)

    def _restart(self, state: Mapping[str, Any]) -> None:
        self._started, self._outside, self._flops = time.perf_counter(), 0.0, 0.0
        self._first_step, self._first_token = state["global_step"], state["tokens"]

    def pace(self) -> dict[str, float]:
        """What to show until there are numbers, where a step takes long: the seconds of its products at the ceiling.

        SmolLM2's drafter at the default sizes takes two CPU cores minutes a step; with nothing shown that is a hang.
        """
        if not self._ceiling:
            return {}
        parts, config = self._parts, self._parts.config
        rows = unused(parts.share.batch_rows // parts.share.world_size, config.max_length, config.anchors)
        slots = len(parts.engine.objective.distances)
        work = step_flops(parts.drafter.config, rows, slots) + parts.optimizer.flops()
        seconds = work / (self._ceiling * 1e12)
        return {_PACE: seconds} if seconds >= _SLOW_S else {}

    def backward_seconds(self) -> float:
        """Of the products of one pass's backward at the ceiling, so at least; 0 where it was not measured."""
        if not self._ceiling:
            return 0.0
        parts, config = self._parts, self._parts.config
        rows = unused(parts.share.rows_per_pass, config.max_length, config.anchors)
        return backward_flops(parts.drafter.config, rows) / (self._ceiling * 1e12)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is done in here is not training: its seconds do not count against the speed."""
        synchronize(self._parts.ranks.device)  # the last step's update still belongs to the training before
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self._parts.ranks.device)
            self._outside += time.perf_counter() - started

    def add(self, parts: Iterable[Batch]) -> None:
        """Count the work of one step from this rank's micro-batches."""
        if self._parts.ranks.rank == 0:
            slots = len(self._parts.engine.objective.distances)
            self._flops += sum(step_flops(self._parts.drafter.config, batch, slots) for batch in parts)

    def log(self, state: dict[str, Any], feed: Feed) -> dict[str, float]:
        """Record the window since the last log line and begin the next; returns what to show beside the progress."""
        learnt = Window.read(state["window"])
        state["window"] = Window.empty(self._parts.engine.objective.drafts)
        speed = self._speed(state, feed.waited())
        self._restart(state)
        self.record(state, {"train": learnt, "speed": speed, "memory": memory(self._parts.ranks.device)})
        logger.info("step %d: %s", state["global_step"], headline(learnt | speed))
        names = {"loss": "loss", "tokens_per_block": "tokens/block", "tokens_per_second": "tokens/s"}
        return {short: value for name, short in names.items() if (value := (learnt | speed).get(name)) is not None}

    def _speed(self, state: Mapping[str, Any], waited: float) -> dict[str, float]:
        """The window in seconds of training.

        tokens_per_second: context tokens of all ranks; padding does not count. tflops: the model's arithmetic
        (flops.py) on rank 0's device; share_of_ceiling: of one large matrix product there. data_wait: share of the
        seconds in which rank 0's loop waited for a batch, or its GPU for a copy.
        """
        seconds = max(time.perf_counter() - self._started - self._outside, 1e-9)
        steps = state["global_step"] - self._first_step
        tflops = self._flops / seconds / 1e12
        return {
            "step_seconds": seconds / max(steps, 1),
            "tokens_per_second": (state["tokens"] - self._first_token) / seconds,
            "tflops": tflops,
            "share_of_ceiling": tflops / self._ceiling if self._ceiling else 0.0,
            "data_wait": min(waited / seconds, 1.0),
        }

    def record(self, state: Mapping[str, Any], groups: Mapping[str, Mapping[str, float]]) -> None:
        """Write numbers of this step down, once: by split and name, and as `split/name` for TensorBoard."""
        parts, step = self._parts, state["global_step"]
        found = [(split, name, float(value)) for split, group in groups.items() for name, value in group.items()]
        if parts.ranks.rank > 0 or not found:
            return
        parts.ledger.append(
            *(
                MetricRecord(run_id=parts.run_id, global_step=step, split=split, name=name, value=value)
                for split, name, value in found
            )
        )
        if self._events is not None:
            self._events.scalars(step, {f"{split}/{name}": value for split, name, value in found})

    def close(self) -> None:
        """Close the event file; the manifest needs no closing."""
        if self._events is not None:
            self._events.close()


def headline(numbers: Mapping[str, float]) -> str:
    """The numbers that fit into a log line."""
    return "  ".join(f"{name} {value:.5g}" for name, value in numbers.items() if "_slot_" not in name)


def ceiling(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """TFLOP/s of one large square matrix product on random data, the median of five groups: what a step can hope for.

    8192 (bfloat16 unless told) on CUDA, 512 (float32) on a CPU; about 0.3 and 0.05 seconds. Zeros would run faster
    than any real matrix (they take less power), so the data are random, and not of the run's own generator.
    """
    cuda = device.type == "cuda"
    size, seconds = (8192, 0.3) if cuda else (512, 0.05)
    dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    first, second = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(first)

    def run(count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(first, second, out=out)
        synchronize(device)
        return (time.perf_counter() - started) / count

    run(3)
    count = max(1, int(seconds / _GROUPS / run(3)))
    return 2 * size**3 / statistics.median(run(count) for _ in range(_GROUPS)) / 1e12


def peak_bytes(device: torch.device) -> float:
    """Peak memory of this process so far: of tensors on its GPU, or resident when it computes on a CPU."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else host_peak_bytes()


def host_peak_bytes() -> float:
    """Peak of what this process had resident in main memory, page-locked batches included."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def memory(device: torch.device) -> dict[str, float]:
    """The peaks, on a GPU with what torch reserved there and what the host took."""
    if device.type != "cuda":
        return {"peak_bytes": peak_bytes(device)}
    reserved = float(torch.cuda.max_memory_reserved(device))
    return {"peak_bytes": peak_bytes(device), "peak_reserved_bytes": reserved, "host_peak_bytes": host_peak_bytes()}


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
