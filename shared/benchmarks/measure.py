"""Interleaved timing: A, B, C, A, B, C in one process, so that a noisy machine is noisy for all of them alike.

Used by every benchmark of the project. Only ratios within one round mean something on a shared machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def nothing() -> None:
    """No preparation."""


@dataclass(frozen=True)
class Case:
    """Something to time: `run` returns the bytes it moved; `before` and `after` are not timed."""

    name: str
    run: Callable[[], int]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing
    rounds: int | None = None
    """At most this many rounds, for what is slow."""


@dataclass(frozen=True)
class Sample:
    """One timed run: wall seconds, processor seconds of this process, bytes moved."""

    seconds: float
    cpu: float
    size: int

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.size / self.seconds / 1e9


Samples = dict[str, list[Sample]]


def interleaved(cases: Sequence[Case], rounds: int) -> Samples:
    """Time all cases `rounds` times, each round starting with another one."""
    samples: Samples = {case.name: [] for case in cases}
    for number in range(rounds):
        turn = number % len(cases)
        for case in [*cases[turn:], *cases[:turn]]:
            if case.rounds is not None and number >= case.rounds:
                continue
            case.before()
            wall, cpu = time.perf_counter(), time.process_time()
            size = case.run()
            samples[case.name].append(Sample(time.perf_counter() - wall, time.process_time() - cpu, size))
            case.after()
    return samples


def ratio(samples: Samples, name: str, base: str) -> float:
    """Median over rounds of the rate of one case relative to another's in the same round."""
    return statistics.median(a.rate / b.rate for a, b in zip(samples[name], samples[base], strict=False))


def rows_of(samples: Samples, bases: Sequence[str]) -> list[dict[str, Any]]:
    """One row per case: median GB/s, ratio to each base, processor seconds per GB."""
    return [
        {
            "case": name,
            "GB/s": statistics.median(sample.rate for sample in found),
            **{f"/ {base}": ratio(samples, name, base) for base in bases},
            "cpu s/GB": statistics.median(sample.cpu / sample.size * 1e9 for sample in found),
        }
        for name, found in samples.items()
        if found
    ]


def table(title: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of one table as aligned text."""
    rows = [{key: _text(value) for key, value in row.items()} for row in rows]
    keys = list(rows[0])
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in keys}
    lines = ["  ".join(key.ljust(widths[key]) for key in keys)]
    lines += ["  ".join(row[key].ljust(widths[key]) for key in keys) for row in rows]
    return "\n".join([f"\n{title}", *(f"  {line.rstrip()}" for line in lines)])


def _text(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, (int, float))
        else str(value)
    )


def drop_cache(folder: Path) -> None:
    """Put all files below `folder` out of the page cache; what is dirty or mapped stays."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float:
    """Part of the bytes below `folder` that lies in the page cache, by mincore(2).

    A probing read would not do: even one that may not wait (RWF_NOWAIT) starts readahead, and the probes after it find
    what that brought in (0.375 of a file that had just been dropped was seen).

    Raises OSError where the kernel refuses the question.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    found = asked = 0
    for path in folder.rglob("*"):
        if not path.is_file() or not (size := path.stat().st_size):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, np.uint8)
            resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            address = ctypes.c_void_p(data.ctypes.data)
            failed = libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(resident.ctypes.data))
            del data  # a mapping that is looked at cannot be closed
            if failed:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
        found += round(size * float((resident & 1).mean()))
        asked += size
    return found / asked if asked else 0.0
