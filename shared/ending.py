"""How a worker ended, as a few bounded values: whatever was raised, writing it down must not fail or fill a disk.

An exception may carry 50 MB of text, raise when it is turned into text, hold characters that no encoding takes, or
refer to itself. Called by shared/worker.py; read by the supervisor and the verdict.
"""

from __future__ import annotations

import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.atomic import fault_of
from shared.errors import DflashError, DiskFull, Interrupted, WorkerFailed

MOST_MESSAGE = 4000
MOST_TRACEBACK = 16000
_MOST_NAME = 200
_FRAMES = 60
KEYBOARD_CODE = 130


def ending_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where a worker's ending is written."""
    return run_dir / "workers" / f"{role}-{rank}.json"


def describe(error: BaseException | None) -> dict[str, Any]:
    """code, error, message, traceback and needed_bytes of what ended a worker; None: its function returned.

    A fault that the user can act on keeps its class, code and sentence. SystemExit keeps its code, except 0: work that
    left early is not done, whatever it said.
    """
    if error is None:
        return {"code": 0, "error": None, "message": "", "traceback": "", "needed_bytes": None}
    fault = _fault(error)
    return {
        "code": _code(fault),
        "error": bounded(type(fault).__name__, _MOST_NAME),
        "message": bounded(_sentence(fault), MOST_MESSAGE),
        "traceback": "" if isinstance(fault, Interrupted) else trace(error, error.__traceback__),
        "needed_bytes": fault.needed_bytes if isinstance(fault, DiskFull) else None,
    }


def _fault(error: BaseException) -> BaseException:
    """The user's fault behind an error of the system, where there is one."""
    if isinstance(error, OSError):
        with suppress(Exception):  # asking the disk how much is free may fail on the disk that failed
            return fault_of(error) or error
    return error


def _code(fault: BaseException) -> int:
    if isinstance(fault, DflashError):
        return fault.exit_code
    if isinstance(fault, KeyboardInterrupt):
        return KEYBOARD_CODE
    if isinstance(fault, SystemExit):
        code = fault.code
        if isinstance(code, int) and code & 0xFF:
            return code & 0xFF
        return WorkerFailed.exit_code if code is None or isinstance(code, int) else 1
    return 1


def _sentence(fault: BaseException) -> str:
    if isinstance(fault, DflashError):
        return text_of(fault)
    if isinstance(fault, SystemExit) and (fault.code is None or isinstance(fault.code, int)):
        return f"SystemExit({fault.code or 0}) before the work was done"
    name, text = bounded(type(fault).__name__, _MOST_NAME), text_of(fault)
    return f"{name}: {text}" if text else name


def text_of(error: BaseException) -> str:
    """str(error), or that there is none."""
    return _or_say(lambda: str(error), "its text cannot be made")


def trace(error: BaseException, where: TracebackType | None) -> str:
    """The traceback with those of its causes, bounded: the outermost and the innermost lines are kept."""

    def made() -> str:
        found = traceback.TracebackException(type(error), error, where, limit=-_FRAMES, max_group_width=5)
        return "".join(found.format())

    return bounded(_or_say(made, "its traceback cannot be made"), MOST_TRACEBACK)


def _or_say(make: Callable[[], str], otherwise: str) -> str:
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 - a text that raises is what this is about
        return f"({otherwise}: {type(error).__name__})"


def bounded(text: str, most: int) -> str:
    """At most `most` characters, with a word on what was left out of the middle; what UTF-8 cannot say, escaped."""
    if len(text) > most:
        note = f" ... [{len(text):,} characters] ... "
        tail = (most - len(note)) * 3 // 4
        text = text[: most - len(note) - tail] + note + text[-tail:]
    safe = text.encode("utf-8", "backslashreplace").decode()
    return safe if len(safe) <= most else safe[:most]


def memory_used() -> dict[str, int | None]:
    """peak_memory: the most bytes this process ever had; gpu_peak: the most that torch ever had on its GPU."""
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "gpu_peak": _gpu_peak()}


def _gpu_peak() -> int | None:
    # Only if the work itself has loaded torch and used its GPU; numbers of the allocator, no call to a broken device.
    torch = sys.modules.get("torch")
    with suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.max_memory_allocated())
    return None
