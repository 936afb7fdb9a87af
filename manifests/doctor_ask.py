"""Ask something in a process of its own with a deadline: a crash or a hang in there is an answer, not an end.

Used by manifests/doctor_probes.py (torch) and manifests/doctor_machine.py (a disk). The process is doctor_child.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from manifests.doctor_child import MARK
from shared.stop import shielded

# After SIGKILL a process that the kernel cannot end (a driver call, a dead disk) is left alone.
_GONE_S = 5.0
# Enough of a library's complaint to search for it.
_TAIL = 200_000
_POLL_S = 0.02
_NEVER = threading.Event()


@dataclass(frozen=True)
class Question:
    """`entry` is "module:function", called with `arguments`; the environment is added to this process's."""

    entry: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a question came to. `value` is the function's; without one `ending` says how it ended instead."""

    seconds: float
    value: Any = None
    ending: Literal["answered", "raised", "killed", "late", "silent"] = "answered"
    name: str = ""
    """The exception's class, the signal's name, or the exit code."""
    message: str = ""
    where: str = ""
    """The innermost place of the crash, or of the main thread when time was up."""
    immortal: bool = False
    """It still existed seconds after SIGKILL: stuck inside the kernel."""

    def sentence(self) -> str:
        """Why there is no value, in one sentence."""
        at = f" in {self.where}" if self.where else ""
        if self.ending == "raised":
            return f"{self.name}: {self.message}" if self.message else f"{self.name}{at}"
        if self.ending == "killed":
            return f"killed by {self.name}{at}" + (f": {self.message}" if self.message else "")
        if self.ending == "late":
            stuck = ", and could not be killed: it hangs inside the kernel or a driver" if self.immortal else ""
            return f"no answer after {self.seconds:.0f} s{at}{stuck}"
        return f"ended with exit code {self.name} and no answer" + (f": {self.message}" if self.message else "")


def ask(question: Question, deadline_s: float, stop: threading.Event | None = None) -> Answer:
    """Run the question to its answer, its end, the deadline or `stop`; never raises for what happens in there."""
    line = [sys.executable, "-u", "-m", "manifests.doctor_child", question.entry, str(deadline_s), *question.arguments]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-doctor-") as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        child = None
        ended, gone = False, True
        try:
            # A stop that came between the process and its name would leave it behind.
            with shielded(), out.open("wb") as stdout, errors.open("wb") as stderr:
                child = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
                    env={**os.environ, **question.environment},
                )  # fmt: skip
            while not (ended := _has_ended(child.pid)) and time.monotonic() - started < deadline_s:
                if (stop or _NEVER).wait(_POLL_S):
                    break
        finally:
            gone = child is None or _end(child)
        seconds = time.monotonic() - started
        return read_answer(_tail(out), _tail(errors), child.returncode, seconds, late=not ended, immortal=not gone)


def read_answer(
    out: str, errors: str, code: int | None, seconds: float, *, late: bool = False, immortal: bool = False
) -> Answer:
    """What the child's output and exit code mean; pure. `code` is negative for a signal, None when it still exists."""
    told = _told(out)
    if late and told is None:
        return Answer(seconds, ending="late", where=place(errors), immortal=immortal)
    if told is not None and "value" in told:
        return Answer(seconds, value=told["value"])
    if told is not None:
        return Answer(seconds, ending="raised", name=told["error"], message=told["message"], where=place(errors))
    if code is not None and code < 0:
        return Answer(seconds, ending="killed", name=_signal_name(-code), message=_last(errors), where=place(errors))
    return Answer(seconds, ending="silent", name=str(code), message=_last(errors))


def place(errors: str) -> str:
    """The innermost frame of the thread that matters, as "torch/cuda/__init__.py:312 in _lazy_init"; "" without one.

    faulthandler marks the thread that crashed; when time is up it marks none, and the main thread comes last.
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", errors, flags=re.MULTILINE)[1:]
    if not threads:
        return ""
    crashed = [thread for thread in threads if thread.startswith("Current")]
    frame = re.search(r'^  File "([^"]+)", line (\d+) in (\S+)', (crashed or threads)[-1], re.MULTILINE)
    return f"{'/'.join(frame[1].split('/')[-3:])}:{frame[2]} in {frame[3]}" if frame else ""


def _told(out: str) -> dict[str, Any] | None:
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
    return None


def _last(errors: str) -> str:
    """The last line that a library wrote, not faulthandler's."""
    lines = [line.strip() for line in errors.splitlines()]
    ours = (
        "File ",
        "Thread ",
        "Current thread ",
        "Fatal Python error",
        "Extension modules",
        "<no Python frame>",
        "Timeout",
    )
    return next((line[:200] for line in reversed(lines) if line and not line.startswith(ours)), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _has_ended(pid: int) -> bool:
    """Whether it ended, without collecting it: until then its number is nobody else's, so its group can be killed."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Kill the child's whole session (compilers and ranks are its children) and collect it; whether it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().decode(errors="replace")
