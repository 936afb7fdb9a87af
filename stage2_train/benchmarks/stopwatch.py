"""A Stepper that takes the time of every step, and what a benchmark wants to know between steps.

Made by timed_run.py. Next: kernel_times.py (the profile), shared/benchmarks/measure.py (the page cache).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shared.benchmarks.measure import drop_cache
from stage2_train.benchmarks.kernel_times import kernel_times
from stage2_train.benchmarks.timed_run import SETTLED, Enough, Timing
from stage2_train.flops import flops_by_part
from stage2_train.metrics import ceiling, peak_bytes, synchronize
from stage2_train.step import Stepper

# Files are dropped from the page cache this often while a run reads them, each after it was read.
_DROP_EVERY_S = 2.0


class Stopwatch(Stepper):
    """The given stepper, timed; raises Enough when all steps that were asked for are done.

    Times are of the CPU from one step's begin to the next one's, pauses of the benchmark taken out: a step waits for
    its own numbers, so CPU and GPU cannot drift apart by more than one.
    """

    def __init__(self, stepper: Stepper, timing: Timing) -> None:
        self.__dict__ = stepper.__dict__  # one state under both names, whoever else holds the stepper
        self.timing = timing
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.paused = [0.0]
        self.flops: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self.memory: dict[int, float] = {}
        self.ceilings: list[float] = []
        self.rehearsed = time.perf_counter()
        self.kernels: dict[str, Any] | None = None
        self._profiler: Any = None

    def rehearse(self, *arguments: Any, **named: Any) -> Any:
        """The compiling one, whose time train() takes itself."""
        found = super().rehearse(*arguments, **named)
        self.rehearsed = time.perf_counter()
        return found

    def step(self, *arguments: Any, **named: Any) -> Any:
        """One real step, and before it whatever is due."""
        done = len(self.ends)
        started = time.perf_counter()
        self._between(done)
        self.paused.append(self.paused[-1] + time.perf_counter() - started)
        self.begins.append(time.perf_counter() - self.paused[-1])
        found = super().step(*arguments, **named)
        self.ends.append(time.perf_counter() - self.paused[-1])
        rows = next(value for value in (*arguments, *named.values()) if hasattr(value, "parts"))
        self.tokens.append(sum(part.tokens for part in rows.parts))
        head_slots = len(self.engine.objective.distances)
        parts = [flops_by_part(self.drafter.config, part, head_slots) for part in rows.parts]
        self.flops.append({name: sum(part[name] for part in parts) for name in parts[0]})
        self.memory[done + 1] = peak_bytes(self.engine.device)
        return found

    def _between(self, done: int) -> None:
        timing, device = self.timing, self.engine.device
        if timing.ceiling and done in (0, timing.steps // 2, timing.steps):
            self.ceilings.append(ceiling(device))
        if done == timing.steps and timing.profiled:
            self._profiler = torch.profiler.profile(record_shapes=True, acc_events=True)
            self._profiler.__enter__()
        if done == timing.steps + timing.profiled:
            if self._profiler is not None:
                synchronize(device)
                self._profiler.__exit__(None, None, None)
                self.kernels = kernel_times(self._profiler, self.drafter.config, timing.profiled, device.type)
            raise Enough

    def result(self) -> dict[str, Any]:
        """What was measured, of the steps between SETTLED and the last."""
        steps = self.timing.steps
        first = min(SETTLED, steps - 1)
        intervals = [b - a for a, b in zip(self.begins, [*self.begins[1:], self.ends[-1]], strict=True)][first:steps]
        inside = [b - a for a, b in zip(self.begins, self.ends, strict=True)][first:steps]
        parts = {name: statistics.mean(step[name] for step in self.flops[first:steps]) for name in self.flops[0]}
        mean = statistics.mean(intervals)
        return {
            "steps": steps,
            "step_ms": 1e3 * mean,
            "step_ms_median": 1e3 * statistics.median(intervals),
            "step_ms_worst": 1e3 * max(intervals),
            "between_steps_share": 1 - sum(inside) / sum(intervals),
            "tokens_per_second": statistics.mean(self.tokens[first:steps]) / mean,
            "flops": parts,
            "tflops": sum(parts.values()) / mean / 1e12,
            "ceilings": self.ceilings,
            "memory_settled": self.memory[first + 1],
            "memory_last": self.memory[steps],
            "kernels": self.kernels,
        }


@contextmanager
def kept_cold(store: Path | None) -> Iterator[None]:
    """While this lasts, a thread puts the store's files out of the page cache, so that what is read comes from disk."""
    if store is None:
        yield
        return
    drop_cache(store)
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(_DROP_EVERY_S):
            drop_cache(store / "blocks")

    thread = threading.Thread(target=drop, name="drop cache")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
