"""What a loop says of itself: phase, counts, progress inside the phase, what is durable. Kept in its heartbeat.

A loop makes a `Reporter`; the process's own one is made before the loop is even imported (shared/worker.py), and all
that name the same file share it. Read by shared/progress.py (drawn) and the supervisor (hangs). Next: shared/beat.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shared.beat import Beat, members
from shared.kernel import own_start_ticks

ALIVE_EVERY_S = 1.0


def progress_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where a worker's heartbeat lies."""
    return run_dir / "progress" / f"{role}-{rank}.beat"


class Where(NamedTuple):
    """The place a worker has come to."""

    phase: str = ""
    done: float = 0.0
    total: float | None = None
    unit: str = ""


class Report(Protocol):
    """Reporter.update, as what a function takes that only says how far it is."""

    def __call__(
        self, phase: str, done: float, total: float | None, unit: str, inner: float | None = None, **numbers: Any
    ) -> None: ...


def unreported(
    phase: str, done: float, total: float | None, unit: str, inner: float | None = None, **numbers: Any
) -> None:
    """A Report where nobody looks."""


class Ticks:
    """Tells how often it was called, at most once a second: the progress of work that has no count of its own."""

    every_s = 1.0

    def __init__(self, tell: Callable[[float], None]) -> None:
        """`tell` is Reporter.inner, or something that adds to it."""
        self._tell, self._count, self._told = tell, 0, time.monotonic()

    def __call__(self) -> None:
        """Something has been done."""
        self._count += 1
        if (now := time.monotonic()) - self._told >= self.every_s:
            self._told = now
            self._tell(self._count)


class _Shared:
    """The one writer behind all reporters of a file: loops, their helper threads and the liveness thread use it."""

    def __init__(self, path: Path) -> None:
        self.beat = Beat.create(path)
        self.lock = threading.Lock()
        attempt = int(os.environ.get("DFLASH_ATTEMPT", "0"))
        self.seldom: dict[str, Any] = {"pid": os.getpid(), "start_ticks": own_start_ticks(), "attempt": attempt}
        self.seldom |= {"phase": "", "unit": "", "spent": {}, "phase_since": time.monotonic(), "started": time.time()}
        self.often: dict[str, Any] = {"done": 0.0, "total": None, "inner": None, "saved": None, "numbers": {}}
        self._fixed = members(self.seldom)

    def enter(self, phase: str, unit: str, done: float, now: float, wall: float) -> None:
        """Begin a phase: what stays the same until the next one becomes JSON once, which halves a report's cost."""
        seldom = self.seldom
        if (before := seldom["phase"]) and before != phase:
            spent = seldom["spent"]
            spent[before] = round(spent.get(before, 0.0) + now - seldom["phase_since"], 3)
        seldom.update(phase=phase, unit=unit, first=done, phase_since=now, started=wall)
        self._fixed = members(seldom)

    def report(self, **changes: Any) -> None:
        """Write the state with these changes."""
        self.often.update(changes)
        self.beat.report(self.often, fixed=self._fixed)


_own: _Shared | None = None


class Reporter:
    """Writes a worker's progress to `<run_dir>/progress/<role>-<rank>.beat`; 10 us a report, from any thread.

    A view for the living and evidence of where the dead were, never of finished work. Raises DiskFull or
    PathNotWritable when the file cannot be made; later reports need nothing of the disk.
    """

    def __init__(self, run_dir: Path, role: str, rank: int) -> None:
        path = progress_path(run_dir, role, rank)
        self._shared = _own if _own is not None and _own.beat.path == path else _Shared(path)

    def update(
        self, phase: str, done: float, total: float | None, unit: str, inner: float | None = None, **numbers: Any
    ) -> None:
        """Report `done` of `total` `unit`s in `phase` (shared/phases.py); numbers are shown as they are.

        inner: what moves while `done` does not (documents of an estimate): each new value renews the phase's limit.
        """
        shared = self._shared
        often, seldom = shared.often, shared.seldom
        with shared.lock:
            now, wall = time.monotonic(), time.time()
            entered = phase != seldom["phase"]
            if entered or unit != seldom["unit"]:
                shared.enter(phase, unit, done, now, wall)
            if entered or done != often["done"] or inner != often["inner"]:
                often["reported"] = now
            shared.report(done=done, total=total, inner=inner, numbers=numbers, time=wall)

    def inner(self, value: float) -> None:
        """Report progress inside the phase; for callbacks that know nothing else."""
        shared = self._shared
        with shared.lock:
            if value != shared.often["inner"]:
                shared.report(inner=value, reported=time.monotonic(), time=time.time())

    def saved(self, value: float) -> None:
        """Report what a restart would keep: the step of the newest complete checkpoint, or the blocks committed."""
        shared = self._shared
        with shared.lock:
            if value != shared.often["saved"]:
                shared.report(saved=value, time=time.time())

    @property
    def where(self) -> Where:
        """What was reported last."""
        seldom, often = self._shared.seldom, self._shared.often
        total = often["total"]
        return Where(seldom["phase"], float(often["done"]), None if total is None else float(total), seldom["unit"])

    @property
    def reported(self) -> float:
        """When a report last changed something, CLOCK_MONOTONIC seconds."""
        return float(self._shared.often.get("reported", 0.0))

    def adopt(self) -> None:
        """Make this the process's own: a reporter of the same file that is made later goes on with it.

        Starts the thread that says once a second that Python runs, whatever the loop does.
        """
        global _own
        _own = self._shared
        threading.Thread(target=_stay_alive, args=(self._shared.beat,), name="liveness", daemon=True).start()


def _stay_alive(beat: Beat) -> None:
    while True:
        beat.alive()
        time.sleep(ALIVE_EVERY_S)
