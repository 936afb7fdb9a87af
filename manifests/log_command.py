"""`dflash logs`: what the workers and the supervisor of a run printed, and with -f what they print from now on.

Leaving is quiet: a closed pipe and Ctrl-C end it without a word, and never touch the run. Called by cli_runs.py;
the reading is log_view.py.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manifests.log_view import Follower, LogFile, logs_of, tail
from shared.errors import DataMissing
from shared.progress import output_fault, say

LOOK_EVERY_S = 0.2
# Whether the run still goes on is asked less often: it reads the folder's records.
ASK_EVERY_S = 1.0
WHOLE = 1 << 30
"""Lines of a file of stacks: all that `tail` reads."""


class ReaderLeft(Exception):
    """Nobody reads the output any more."""


def show(run_dir: Path, logs: Sequence[LogFile], lines: int) -> None:
    """Print the last lines of each log, under headers when there are several. Raises ReaderLeft."""
    _show(run_dir, logs, lambda path: tail(path, lines))


def _show(run_dir: Path, logs: Sequence[LogFile], last_lines: Callable[[Path], list[str]]) -> None:
    for number, log in enumerate(logs):
        if len(logs) > 1:
            _print([*([""] if number else []), header(log.path, run_dir)])
        try:
            _print(last_lines(log.path))
        except PermissionError as error:
            say(f"{log.path} cannot be read: {error.strerror}")


def header(path: Path, run_dir: Path) -> str:
    """What stands above a log's lines when several are shown."""
    return f"==> {path.relative_to(run_dir)} <=="


def follow(run_dir: Path, rank: str | None, lines: int) -> None:
    """Print the tails, then what is added, until the run has ended; also across restarts and cut files.

    Raises ReaderLeft.
    """
    logs = logs_of(run_dir, rank)
    follower = Follower()
    _show(run_dir, logs, lambda path: follower.begin(path, lines))
    shown: Path | None = logs[-1].path
    asked = 0.0
    while True:
        ended = False
        if time.monotonic() - asked >= ASK_EVERY_S:
            ended, asked = not _goes_on(run_dir), time.monotonic()
            follower.add([log.path for log in _logs_now(run_dir, rank)])
        for path, added in follower.new_lines(ended=ended):
            several = len(follower.paths) > 1 and path != shown
            _print([*(["", header(path, run_dir)] if several else []), *added])
            shown = path
        if ended:
            return
        _wait_for_reader(LOOK_EVERY_S)


def _logs_now(run_dir: Path, rank: str | None) -> list[LogFile]:
    try:
        return logs_of(run_dir, rank)
    except DataMissing:  # taken away under our eyes: what was open is all there was
        return []


def _goes_on(run_dir: Path) -> bool:
    from manifests.status import LIVING, status_of

    return status_of(run_dir, holdings=False).state in LIVING


def _print(lines: Sequence[str]) -> None:
    """Raises ReaderLeft, and DiskFull when stdout is a file and its disk is full."""
    if not lines:
        return
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except OSError as error:  # it has no file name: `fault_of` once told of the working folder's disk, with 68 GB free
        raise output_fault(error) or ReaderLeft from error


def _wait_for_reader(seconds: float) -> None:
    """Sleep, but not beyond the moment when the reader of our pipe leaves (`| head`, a closed pager)."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always told
    except (OSError, ValueError):
        time.sleep(seconds)
        return
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(seconds * 1000)):
        raise ReaderLeft


def leave_quietly() -> None:
    """Point stdout elsewhere: the interpreter's own flush at the end would complain about what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
