"""Batches to the place where the step runs: copied to the GPU while the step before them computes.

Called by train.py, between the thread that reads (data.py) and the step (step.py). It also counts the time in which
the loop, or the GPU, had to wait for data. Next: step.py.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage2_train.batch import Batch
from stage2_train.data import Prefetcher, StepRows

# One micro-batch computes, the next one is copied: a third would only take memory.
_BUFFERS = 2


def make_feed(steps: Prefetcher[StepRows], device: torch.device) -> Feed:
    """The feed of a run on `device`; closing it closes `steps`."""
    return DeviceFeed(steps, device) if device.type == "cuda" else Feed(steps)


class Feed:
    """This rank's steps in order, as the loop takes them; nothing is copied."""

    def __init__(self, steps: Prefetcher[StepRows]) -> None:
        self._steps = steps
        self._waited = 0.0

    def __next__(self) -> StepRows:
        started = time.perf_counter()
        rows = next(self._steps)
        self._waited += time.perf_counter() - started
        return rows

    def waited(self) -> float:
        """Seconds of the loop that went by in waiting for data, since the last call of this."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """Stop reading; no thread is left when this returns."""
        self._steps.close()


class _Buffers:
    """Device memory for one micro-batch, used again and again: what it takes is the same at every step.

    `copied` is recorded on the copying stream behind the copy, `released` on the computing stream behind the last
    kernel that reads the copy.
    """

    def __init__(self, kind: Any) -> None:
        self._memory: dict[str, Tensor] = {}
        self.copied, self.released = kind.Event(), kind.Event()

    def like(self, name: str, source: Tensor, device: torch.device) -> Tensor:
        """Memory for `source`, the same as last time; only the table of channel scales ever changes its shape."""
        held = self._memory.get(name)
        if held is None or held.shape != source.shape:
            held = self._memory[name] = torch.empty(source.shape, dtype=source.dtype, device=device)
        return held


class _Placed(NamedTuple):
    rows: StepRows
    batch: Batch
    buffers: _Buffers


@dataclasses.dataclass(frozen=True)
class _FedRows(StepRows):
    feed: DeviceFeed

    def placed(self) -> Iterator[Batch]:
        return self.feed.hand_out(len(self.parts))


class DeviceFeed(Feed):
    """One thread copies micro-batches in order, at most one ahead of the one that computes, across steps too.

    Why no byte is read or written at the wrong time, though the CPU runs far ahead of the GPU:
    - The copy waits (on its own stream) for `released` of the buffers it overwrites, the step waits (on its stream)
      for `copied`. A wait binds what was recorded when it was called: buffers pass from hand to hand through queues,
      so each is called after the record it means.
    - Buffers are allocated on the copying stream and never freed while a run lasts, except a table of channel scales
      of another shape: the copying stream has waited for its last reader by then, and to that stream's pool its
      memory returns. So no tensor needs record_stream, which would free memory at a moment that depends on timing.
    - The page-locked source lives as long as the Batch's numpy arrays; torch gives it away again only after the copy,
      since it has noted the stream that reads it.
    What a step keeps of a placed batch is void once it asks for the next one: backward must have been called by then.

    On a CPU (tests) streams and events do nothing, and copies have ended when the call returns.
    """

    def __init__(self, steps: Prefetcher[StepRows], device: torch.device) -> None:
        super().__init__(steps)
        self._device = device
        self._cuda = device.type == "cuda"
        self._kind: Any = torch.cuda if self._cuda else torch.cpu
        self._stream = torch.cuda.Stream(device) if self._cuda else torch.cpu.Stream()
        self._free: queue.SimpleQueue[_Buffers | None] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(_Buffers(self._kind))
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._first: _Placed | None = None
        self._batches: Prefetcher[_Placed] = Prefetcher(self._place(), ahead=1)

    def _place(self) -> Iterator[_Placed]:
        """In the copying thread: every micro-batch of every step, on the device."""
        while True:
            rows = next(self._steps)
            for batch in rows.parts:
                buffers = self._free.get()
                if buffers is None:  # closed
                    return
                with self._on_stream():
                    buffers.released.wait(self._stream)
                    tensors = {name: buffers.like(name, source, self._device) for name, source in batch.tensors.items()}
                    for name, source in batch.tensors.items():
                        tensors[name].copy_(source, non_blocking=True)
                    buffers.copied.record(self._stream)
                yield _Placed(rows, dataclasses.replace(batch, tensors=tensors), buffers)

    def _on_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._kind.stream(self._stream)
        return context

    def __next__(self) -> StepRows:
        self._first = self._take()
        rows = self._first.rows
        return _FedRows(rows.epoch, rows.batch, rows.parts, self)

    def _take(self) -> _Placed:
        started = time.perf_counter()
        placed = next(self._batches)
        self._waited += time.perf_counter() - started
        return placed

    def hand_out(self, count: int) -> Iterator[Batch]:
        """The step's `count` placed micro-batches; the computing stream waits for each copy, the CPU does not."""
        for _ in range(count):
            placed, self._first = self._first or self._take(), None
            stream = self._kind.current_stream(self._device)
            self._wait_for_copy(placed.buffers, stream)
            yield placed.batch
            placed.buffers.released.record(stream)
            self._free.put(placed.buffers)

    def _wait_for_copy(self, buffers: _Buffers, stream: Any) -> None:
        if not self._cuda:
            return
        arrived, ready = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        arrived.record(stream)
        buffers.copied.wait(stream)
        ready.record(stream)
        self._stalls.append((arrived, ready))

    def waited(self) -> float:
        """Seconds in which the loop waited for a batch, or the GPU for its copy, since the last call; never blocks.

        The GPU's are added once it has passed them: those of a step are there at the latest after the next step.
        """
        waited = super().waited()
        while self._stalls and self._stalls[0][1].query():
            arrived, ready = self._stalls.popleft()
            waited += arrived.elapsed_time(ready) / 1e3
        return waited

    def close(self) -> None:
        """Stop reading and copying; no thread is left when this returns."""
        self._free.put(None)
        self._steps.close()
        self._batches.close()
        if self._cuda:
            # The buffers' memory goes back to the copying stream's pool: whatever uses it next comes after the step.
            # A device that has failed says so again here; the step that met it first must be the one that is heard.
            with suppress(torch.AcceleratorError):
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
