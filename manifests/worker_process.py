"""One rank's process: start it in a session of its own, see how it ended, end it with all that it started.

Used by manifests/supervise.py. The log and the fault file are inherited as files, never pipes: they outlive everybody
and need nobody to drain them. What runs in the process begins in shared/worker.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.evidence_files import without_frames
from manifests.launch_spec import LaunchSpec, fault_path, log_path
from manifests.spawn import spawn
from shared.atomic import disk_faults
from shared.beat import BeatState, read_beat
from shared.ending import ending_path
from shared.json_file import read_if_whole
from shared.kernel import Process, is_same, process, session_members
from shared.reporter import progress_path

_LAST_LINES, _FAULT_LINES, _LINE_CHARS, _TAIL_BYTES = 30, 60, 500, 1 << 16


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a worker process ended."""

    rank: int
    attempt: int
    pid: int
    code: int | None
    """None when a signal ended it."""
    signal: int | None
    mono: float
    ending: dict[str, Any] | None
    """What it wrote about itself (shared/worker.py)."""
    beat: BeatState | None
    peak_memory: int
    """Bytes."""
    asked: bool
    """We had told it to leave, or killed it."""

    @property
    def well(self) -> bool:
        """Exit 0 alone proves nothing (os._exit, a library calling exit): it must have recorded that it was done."""
        return self.code == 0 and self.ending is not None and self.ending.get("code") == 0

    @property
    def error(self) -> str:
        """The class of the error that it recorded, or ""."""
        return str((self.ending or {}).get("error") or "")

    @property
    def message(self) -> str:
        """What it recorded, or ""."""
        return str((self.ending or {}).get("message") or "").strip()

    def how(self) -> str:
        """In words: "signal SIGKILL in phase step at 41 steps"."""
        how = f"exit code {self.code}" if self.signal is None else f"signal {_signal_name(self.signal)}"
        if self.beat is None or not self.beat.phase:
            return f"{how} before its first report"
        return f"{how} in phase {self.beat.phase} at {self.beat.done:,.0f} {self.beat.unit}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Seat:
    """One rank: the process that runs for it now, if any, and how the last one ended."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self.attempt = 0
        self.pid = 0
        self.start_ticks = 0
        self.started = 0.0
        self.exit: Exit | None = None
        self.asked = False
        self._leftovers: list[tuple[int, int]] = []
        self._log_from = self._fault_from = 0

    @property
    def running(self) -> bool:
        """Whether a process is there that has not ended."""
        return self.pid != 0 and self.exit is None

    def start(self, attempt: int, environment: Mapping[str, str]) -> None:
        """Start the process. Raises DiskFull or PathNotWritable when it cannot have its log."""
        spec = self.spec
        ending = ending_path(spec.run_dir, spec.role, self.rank)
        log, fault = log_path(spec.run_dir, spec.role, self.rank), fault_path(spec.run_dir, spec.role, self.rank)
        with disk_faults(ending):
            ending.unlink(missing_ok=True)
        self._log_from, self._fault_from = _size(log), _size(fault)
        self.attempt, self.pid, self.exit, self.asked = attempt, 0, None, False
        own = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "DFLASH_ATTEMPT": str(attempt),
            "DFLASH_FAULT_FILE": str(fault.absolute()),
        }
        with disk_faults(log):
            self.pid = _spawn(spec, {**environment, **own}, log)
        self.started = time.monotonic()
        found = process(self.pid)
        self.start_ticks = found.start_ticks if found else 0
        with suppress(OSError), log.open("ab", buffering=0) as file:
            file.write(f"--- attempt {attempt}, pid {self.pid}, {time.strftime('%Y-%m-%d %H:%M:%S %z')} ---\n".encode())

    def forget(self) -> None:
        """How an ended process ended is no longer how this rank ended."""
        if not self.running:
            self.pid, self.exit, self._leftovers = 0, None, []

    def poll(self) -> Exit | None:
        """How the process ended, once, when it has just ended."""
        if not self.running:
            return None
        found, status, used = os.wait4(self.pid, os.WNOHANG)
        if not found:
            return None
        # Now, while nobody else can have been given this number.
        self._leftovers = session_members(self.pid)
        code = os.waitstatus_to_exitcode(status)
        ending = read_if_whole(ending_path(self.spec.run_dir, self.spec.role, self.rank))
        self.exit = Exit(
            rank=self.rank,
            attempt=self.attempt,
            pid=self.pid,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            mono=time.monotonic(),
            ending=ending if ending is not None and ending.get("pid", self.pid) == self.pid else None,
            beat=self.beat(),
            peak_memory=used.ru_maxrss * 1024,
            asked=self.asked,
        )
        return self.exit

    def beat(self) -> BeatState | None:
        """The process's own newest report; one that an earlier process left is none."""
        found = read_beat(progress_path(self.spec.run_dir, self.spec.role, self.rank))
        return found if found is not None and found.pid == self.pid else None

    def process(self) -> Process | None:
        """The process as the kernel shows it."""
        return process(self.pid) if self.running else None

    def ask_to_leave(self) -> None:
        """SIGTERM, and SIGCONT for one that somebody stopped: it could not hear."""
        if self.running:
            self.asked = True
            _send(self.pid, signal.SIGTERM)
            _send(self.pid, signal.SIGCONT)

    def send(self, number: int) -> None:
        """A signal to the process while it runs."""
        if self.running:
            _send(self.pid, number)

    def let_go_on(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the process and all that it started.

        A stopped one dies of it as it is. Continued first, it ran on for a moment, and saved into another run's folder.
        """
        if self.running:
            self.asked = True
            for pid in (self.pid, *(pid for pid, _ in session_members(self.pid) if pid != self.pid)):
                _send(pid, signal.SIGKILL)

    def sweep(self) -> bool:
        """SIGKILL to what an ended process has left in its session; True once nothing is left. Call until then."""
        if self.running or not self._leftovers:
            return True
        for pid, start_ticks in self._leftovers:
            if is_same(pid, start_ticks):
                _send(pid, signal.SIGKILL)
        self._leftovers = session_members(self.pid)
        return not self._leftovers

    def last_lines(self) -> list[str]:
        """The end of what this attempt wrote into its log."""
        return _tail(log_path(self.spec.run_dir, self.spec.role, self.rank), self._log_from, _LAST_LINES)

    def fault_lines(self) -> list[str]:
        """What the fault file gained in this attempt, its beginning: the thread that crashed comes first."""
        path = fault_path(self.spec.run_dir, self.spec.role, self.rank)
        return _tail(path, self._fault_from, _FAULT_LINES, first=True)

    def fault_since(self, start: int, most: int) -> str:
        """What the fault file holds from `start` on, at most `most` bytes."""
        with suppress(OSError), fault_path(self.spec.run_dir, self.spec.role, self.rank).open("rb") as file:
            file.seek(start)
            return file.read(most).decode(errors="replace").strip()
        return ""

    def fault_size(self) -> int:
        """Bytes in the fault file."""
        return _size(fault_path(self.spec.run_dir, self.spec.role, self.rank))


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _spawn(spec: LaunchSpec, environment: Mapping[str, str], log: Path) -> int:
    """Start a worker's process; returns its pid. An earlier attempt's log goes on."""
    command = [sys.executable, "-u", "-m", "shared.worker", spec.entry, str(spec.run_dir), spec.role]
    return spawn(command, environment, log)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, start: int, lines: int, *, first: bool = False) -> list[str]:
    """The last (or first) lines of what a file holds from `start` on, each cut to a length that a record can take.

    The last ones leave out the frames of native backtraces, which push the sentence that names the fault away.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(start if first else max(start, end - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    found = [line[:_LINE_CHARS] for line in text.splitlines()]
    if first:
        return found[:lines]
    return list(without_frames(found))[-lines:]
