"""How a supervisor hears that it shall stop: by SIGTERM or SIGINT, with the sender, or by the run's stop file.

The first request means save and leave, the next one (or one that says `now`) means kill. The signals are blocked and
taken while the loop waits, together with SIGCHLD, so that a worker's death wakes it at once. Used by
manifests/supervise.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from shared.kernel import command_line
from shared.stop_file import read_stop, stop_path

_TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LOOK_EVERY_S = 0.25
_LATE_S = 0.05
# systemd, Slurm and logind send one SIGTERM to every process of a job: the supervisor gets it, and the command that
# looks on passes its own on. Who meant one request must not be taken to have made two: the second kills.
ECHO_S = 2.0
# The console script (the interpreter, then the script's path) or `python -m shared`, as /proc shows them. A shell whose
# own line merely names the command is not meant: the sender is the process that called kill.
_STOP_COMMAND = re.compile(
    r"(?:\S*/)?(?:dflash|python[\d.]*(?: -[A-Za-z]\S*)*? (?:-m shared|(?:\S*/)?dflash)) stop(?: |$)"
)


class Requests:
    """Requests to stop, from when this context is entered on; main thread only."""

    def __init__(self, run_dir: Path | None) -> None:
        self.by: list[dict[str, Any]] = []
        """Who asked and how, in order: the stop file's content, or {signal, sender_pid, sender_uid, sender_command}."""
        self._run_dir = run_dir
        self._heard = 0.0
        self._seen: tuple[int, int] | None = None
        self._looked = 0.0
        self._previous: dict[int, Any] = {}
        self._mask: set[Any] = set()

    @property
    def asked(self) -> bool:
        """Whether anybody asked."""
        return bool(self.by)

    @property
    def now(self) -> bool:
        """Whether workers shall be killed, not asked."""
        return len(self.by) > 1 or any(request.get("now") for request in self.by)

    def __enter__(self) -> Self:
        # Handlers as well: other threads (a library's, in the foreground command) may take the signal instead of us.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        # Whoever started us may have ignored it: then the kernel reaps our workers, and how they ended is lost.
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait(0.0)  # one that is still pending is ours, not that of the handlers before
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Sleep; a request or the death of a child ends it early."""
        deadline = time.monotonic() + seconds
        while (info := signal.sigtimedwait(_TAKEN, max(0.0, deadline - time.monotonic()))) is not None:
            if self._is_no_signal(info, deadline):
                break
            if info.si_signo == signal.SIGCHLD:
                return
            self._note(info.si_signo, info.si_pid, info.si_uid)
            deadline = time.monotonic()  # another one may be pending, but the answer to this one is due
        self._look_at_file()

    def _is_no_signal(self, info: signal.struct_siginfo, deadline: float) -> bool:
        """CPython answers with what lay in its memory, not None, when the time is over after SIGSTOP and SIGCONT.

        That may be the last request once more; a true one is then lost, and whoever sent it can repeat it.
        """
        last = self.by[-1] if self.by else {}
        again = info.si_pid == last.get("sender_pid") and time.monotonic() > deadline + _LATE_S
        return info.si_signo not in _TAKEN or (again and info.si_signo != signal.SIGCHLD)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._note(number, None, None)

    def _note(self, number: int, pid: int | None, uid: int | None) -> None:
        name = signal.Signals(number).name
        sender = {"sender_pid": pid, "sender_uid": uid, "sender_command": command_line(pid) if pid else ""}
        self._add({"signal": name, "time": time.time(), "now": False, **sender})

    def _add(self, request: dict[str, Any]) -> None:
        """Take in a request, unless it is one that was already heard, by another way."""
        now = time.monotonic()
        echo = bool(self.by) and _asker(request) != _asker(self.by[-1]) and now - self._heard < ECHO_S
        if echo and not request.get("now"):
            return
        self.by.append(request)
        self._heard = now

    def _look_at_file(self) -> None:
        if self._run_dir is None or time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        with suppress(OSError):
            stat = os.stat(stop_path(self._run_dir))  # noqa: PTH116 - four times a second
            if self._seen != (stat.st_ino, stat.st_mtime_ns) and (request := read_stop(self._run_dir)) is not None:
                self._seen = (stat.st_ino, stat.st_mtime_ns)
                self._add(request)


def _asker(request: dict[str, Any]) -> tuple[str, Any]:
    """By which way a request came: the stop file, or a signal of this sender."""
    return ("signal", request.get("sender_pid")) if "signal" in request else ("file", None)


def told(request: dict[str, Any]) -> str:
    """A request as words: who asked, and how."""
    if "signal" in request:
        sender = request.get("sender_pid")
        who = f" from process {sender} ({request['sender_command'] or 'unknown'})" if sender else ""
        return f"{request['signal']}{who}"
    where = f" on {request['tty']}" if request.get("tty") else ""
    return f"{request.get('via', 'request')} by {request.get('user')}@{request.get('host')}{where}"


def is_stop_command(command: str) -> bool:
    """Whether the sender of a signal was `dflash stop`: it sends one where the folder takes no request as a file."""
    return _STOP_COMMAND.match(command) is not None


def code_of(request: dict[str, Any]) -> str:
    """The verdict's code of a run that stopped for it."""
    if is_stop_command(str(request.get("sender_command") or "")):
        return "user.stop"
    codes = {"SIGTERM": "sig.term.external", "SIGINT": "sig.int.external"}
    return codes.get(str(request.get("signal")), "user.stop")
