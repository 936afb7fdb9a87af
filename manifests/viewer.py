"""The foreground of a supervised run: draws its progress, repeats what its supervisor says, ends as the run ends.

Looking on is all it does. Closing its terminal, its pipe or killing it changes nothing for the run; Ctrl-C and SIGTERM
ask the run to stop, once more to stop at once. Called by stage1_extract/extract.py and stage2_train/launch_train.py
with what manifests/launch.py started.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from manifests.commit import read
from manifests.judgement import Outcome
from manifests.launch_spec import LaunchSpec, log_path, summary_path
from manifests.lost_folder import folder_lost
from shared.beat import read_beat
from shared.errors import DflashError, FolderLost, WorkerFailed, WorkerKilled
from shared.progress import Display, combine, say, tell
from shared.reporter import progress_path
from shared.ring import read_ring
from shared.samples import events_path
from shared.stop_file import write_stop

HANGUP_CODE = 129
_POLL_S = 0.1
_DRAW_EVERY_S = 0.25
_STARTED_WITHIN_S = 10.0
_ECHO_S = 2.0
# What a person who looks on wants to read while the run goes on; the last line says how it ended.
_SHOWN = (
    "weak promise",
    "hang",
    "stop asked",
    "paused",
    "continued",
    "restart",
    "log degraded",
    "supervisor failed",
)


class ViewerSignals:
    """Requests of whoever looks on. A closed terminal ends this process and nothing else."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._last = 0.0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Note SIGINT and SIGTERM from now on; what is ignored (nohup, a shell's `&`) stays ignored.

        But for SIGCHLD: ignored, nobody would learn how the supervisor ended.
        """
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Put back what was there."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            os._exit(HANGUP_CODE)
        via, now = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, time.monotonic()
        # Ctrl-C reaches every process of a terminal; a script there that passes it on by SIGTERM asks no second time.
        echo = self.asked and via != self.asked[-1] and now - self._last < _ECHO_S
        if not echo:
            self.asked.append(via)
            self._last = now


@dataclass(frozen=True)
class Started:
    """A run that a supervisor has: what looks on needs to know."""

    spec: LaunchSpec
    pid: int
    """The supervisor's; it is our child."""
    signals: ViewerSignals


class ProgressView:
    """The progress of a run's workers, drawn at most four times a second."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._due = spec, 0.0
        self._display = Display(spec.role)

    def draw(self) -> None:
        """Look and draw, when it is time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _DRAW_EVERY_S
        spec = self._spec
        paths = (progress_path(spec.run_dir, spec.role, rank) for rank in range(spec.num_workers))
        shot = combine([beat for path in paths if (beat := read_beat(path)) is not None], spec.summed_progress)
        if shot is not None:
            self._display.show(shot)

    def say(self, text: str) -> None:
        """A line that stays, above what is drawn."""
        self._display.close()
        say(text)
        self._display = Display(self._spec.role)

    def close(self) -> None:
        """Leave the terminal clean."""
        self._display.close()


def view(started: Started | None) -> None:
    """Look on until the run has ended, then print what it made; None: there was nothing to do.

    Raises what ended the run, as a class of shared/errors.py with the run's exit code.
    """
    if started is None:
        return
    try:
        outcome = _follow(started)
    finally:
        started.signals.restore()
    if outcome.state != "finished":
        raise outcome.exception()
    with suppress(OSError):
        if text := summary_path(started.spec.run_dir, started.spec.role).read_text().rstrip("\n"):
            tell(text)


def detach(started: Started | None) -> None:
    """Leave the run to its supervisor, once that has taken it over, and say where it is.

    Who asks it to stop before that (Ctrl-C) is heard: the request is passed on, and the end is waited for as by `view`.
    Raises what ended the run, should it have ended by then.
    """
    if started is None:
        return
    events = _Events(started.spec)
    deadline = time.monotonic() + _STARTED_WITHIN_S
    code = None
    while code is None and not events.has_any() and time.monotonic() < deadline:
        time.sleep(_POLL_S / 2)
        code = _ended(started.pid)
    if code is None and started.signals.asked:
        view(started)
        return
    started.signals.restore()
    if code is not None and (outcome := events.outcome(code)).state != "finished":
        raise outcome.exception()
    run_dir = started.spec.run_dir
    tell(
        f"{started.spec.role} runs in {run_dir} (supervisor {started.pid})\n"
        f"  dflash status {run_dir}\n  dflash logs {run_dir} -f\n  dflash stop {run_dir}"
    )


def _follow(started: Started) -> Outcome:
    events, display = _Events(started.spec), ProgressView(started.spec)
    passed_on = 0
    try:
        while (code := _ended(started.pid)) is None:
            for said in events.new():
                display.say(said)
            for via in started.signals.asked[passed_on:]:
                passed_on += 1
                _ask_to_stop(started, via, now=passed_on > 1)
            display.draw()
            time.sleep(_POLL_S)
        for said in events.new():
            display.say(said)
    finally:
        display.close()
    return events.outcome(code)


def _ask_to_stop(started: Started, via: str, *, now: bool) -> None:
    try:
        write_stop(started.spec.run_dir, now, via)
    except (DflashError, OSError):  # a full disk takes no request; the supervisor is our child
        os.kill(started.pid, signal.SIGTERM)


def _ended(pid: int) -> int | None:
    """The exit code of our child, None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


class _Events:
    """What the supervisor of one run writes down, from the ring: the ledger may be on a full disk."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._path = events_path(spec.run_dir)
        self._changed = 0
        self._newest = 0

    def has_any(self) -> bool:
        """Whether the supervisor is there."""
        return bool(self._records())

    def new(self) -> list[str]:
        """Sentences for a person since the last look."""
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            return []
        if changed == self._changed:
            return []
        self._changed = changed
        found = [record for record in self._records() if record["detail"].get("n", 0) > self._newest]
        self._newest = max((record["detail"]["n"] for record in found), default=self._newest)
        return [record["message"] for record in found if record["event"] in _SHOWN and record["message"]]

    def outcome(self, code: int) -> Outcome:
        """How the run ended; `code` is the supervisor's own exit code."""
        ledger = [record for record in read(self._spec.run_dir, "events") if record["run_id"] == self._spec.run_id]
        for record in reversed([*self._records(), *ledger]):  # the ledger's is never cut
            if record["event"] == "supervisor ended":
                detail = record["detail"]
                return Outcome(
                    state=detail["state"],
                    exit_code=detail["exit_code"],
                    error=detail["error"],
                    message=record["message"],
                    code=detail["code"],
                )
        spec = self._spec
        if code == FolderLost.exit_code:  # it took its records along
            return Outcome("failed", code, FolderLost.__name__, str(folder_lost(spec)))
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        kind = WorkerKilled if code < 0 else WorkerFailed
        message = (
            f"the supervisor of {spec.run_dir} ended by {how}; its workers save and leave by themselves; its log: "
            f"{log_path(spec.run_dir, spec.role, 'supervisor')}; run the same command again to go on"
        )
        return Outcome("failed", kind.exit_code, kind.__name__, message, "sup.killed")

    def _records(self) -> list[dict[str, Any]]:
        return [record for record in read_ring(self._path) if record.get("run_id") == self._spec.run_id]
