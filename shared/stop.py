"""Ask a command to stop: SIGTERM and a closed terminal end it as Ctrl-C does, through its own clean-up.

`install_stop` is called once by shared/cli.py, so that `manifests.runs.recorded` sees every request as an exception
and writes "interrupted". While workers run, manifests/viewer.py has its own handlers: it asks the run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_shielded = False
_waiting: list[int] = []


class StopRequest(BaseException):
    """Raised in the main thread by a signal; `str()` is the signal's name. No handler of a library takes it."""


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _shielded:
        _waiting.append(number)
        return
    raise StopRequest(signal.Signals(number).name)


def install_stop() -> None:
    """Turn SIGINT, SIGTERM and SIGHUP into StopRequest; one that is ignored (nohup, a shell's `&`) stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def ignore_stop() -> None:
    """Nothing is left to stop: a second Ctrl-C must not turn the one line and its exit code into a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def shielded() -> Iterator[None]:
    """Let a few lines finish (the record of an ending); a signal that comes meanwhile is raised after them."""
    global _shielded
    _shielded = True
    try:
        yield
    finally:
        _shielded = False
    if _waiting:
        raise StopRequest(signal.Signals(_waiting.pop()).name)
