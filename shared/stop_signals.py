"""Turn SIGTERM and SIGINT into a question that a worker's loop asks, and remember who sent them.

Both are blocked in every thread and taken by one thread that waits for them (sigwaitinfo): a handler would run only
once the main thread comes back from C, and would never learn the sender. Called by shared/worker.py, before any other
thread starts, because threads inherit what is blocked. Next: shared/worker.py.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from shared.kernel import command_line

TAKEN = frozenset({signal.SIGTERM, signal.SIGINT})
# How often `stop_requested` looks for a request that is not a signal: it may be asked a thousand times a second.
_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class _Requests:
    """What this process was asked so far."""

    def __init__(self) -> None:
        self.asked = False
        self.note: dict[str, Any] | None = None
        self.parent_pid = 0
        self.look: Callable[[], dict[str, Any] | None] | None = None
        self.next_look = 0.0


_requests = _Requests()


def stop_requested() -> bool:
    """True once the run was asked to stop, or once the process that started us is gone (nobody would reap us)."""
    if not _requests.asked and _requests.look is not None and time.monotonic() >= _requests.next_look:
        _requests.next_look = time.monotonic() + _LOOK_EVERY_S
        if request := _requests.look():
            logger.warning("asked to stop: %s by %s on %s", *(request.get(k) for k in ("via", "user", "host")))
            _requests.asked = True
    return _requests.asked or parent_gone()


def parent_gone() -> bool:
    """Whether the process that started this worker has ended."""
    return _requests.parent_pid != 0 and os.getppid() != _requests.parent_pid


def stop_note() -> dict[str, Any] | None:
    """The first signal that was taken: number, name, sender_pid, sender_uid, sender_command, time; None without."""
    return _requests.note


def take_stop_signals(
    *,
    parent_pid: int = 0,
    look: Callable[[], dict[str, Any] | None] | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Block SIGTERM and SIGINT in this thread and all that it starts, and wait for them in a thread; ignore SIGHUP.

    parent_pid: the process without which this one stops, 0 for none. look: where else a request may lie, called once a
    second by `stop_requested`. then: called in a thread of its own after the first signal.
    """
    _requests.parent_pid, _requests.look = parent_pid, look
    # Only for a thread that was there before us, or one that unblocks: then at least the question is answered.
    for number in TAKEN:
        signal.signal(number, _on_signal)
    block_stop_signals()
    _let_children_be_stopped()
    threading.Thread(target=_take, args=(then,), name="stop-signals", daemon=True).start()


def block_stop_signals() -> None:
    """Again after imports: libraries set handlers and masks of their own."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    _note(number, None, None)


def _take(then: Callable[[], None]) -> None:
    follower: threading.Thread | None = None
    while True:
        info = signal.sigwaitinfo(TAKEN)
        _note(info.si_signo, info.si_pid, info.si_uid)
        if follower is None:
            follower = threading.Thread(target=then, name="after-stop", daemon=True)
            follower.start()


def _note(number: int, pid: int | None, uid: int | None) -> None:
    """Remember the first signal, say every one of them. The log is written past Python's own files, whose locks the
    main thread may hold for ever.
    """
    command = command_line(pid) if pid else ""
    note = {
        "number": number,
        "name": signal.Signals(number).name,
        "sender_pid": pid or None,  # 0: the kernel, for a key pressed at a terminal
        "sender_uid": uid,
        "sender_command": command or None,
        "time": time.time(),
    }
    if _requests.note is None:
        _requests.note = note
    _requests.asked = True
    sender = f"process {pid} of user {uid} ({command or 'gone already'})" if pid else "a sender unknown"
    with suppress(OSError):  # a full disk
        os.write(2, f"asked to stop: {note['name']} from {sender}\n".encode(errors="replace"))


def _let_children_be_stopped() -> None:
    """Start children with the two signals unblocked: the mask survives fork and exec, and a child that never heard of
    it (a compiler, torch's pool of them) could not be stopped but by SIGKILL.

    subprocess has no argument for the mask, and no hook that runs in its children without making them fork (an audit
    hook runs in the parent, os.register_at_fork only for os.fork); so its one function that starts them is wrapped. A
    signal that comes in that millisecond meets the handler above. Not covered: multiprocessing's spawn.
    """
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    if getattr(execute, "unblocks", False):
        return

    def unblocked(process: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
        try:
            execute(process, *arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    unblocked.unblocks = True  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = unblocked  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """A forked child (multiprocessing's) is no worker: it ends as any process does."""
    for number in TAKEN:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
