"""Worker functions that end, or do not end, in every way that shared/worker.py must write down."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import shared.worker
from shared.errors import DiskFull, Interrupted, MaskTokenInUse
from shared.reporter import Reporter
from shared.worker import stop_requested

# The disk of these tests is busy with other tests' files: it may take more than a moment to write an ending.
shared.worker._LAST_S = 30.0


def say(run_dir: Path, name: str, text: object = "") -> None:
    """Leave a file that the test waits for; whole when it is there."""
    (run_dir / f".{name}").write_text(str(text))
    (run_dir / f".{name}").rename(run_dir / name)


def at_step(run_dir: Path, rank: int) -> Reporter:
    reporter = Reporter(run_dir, "toy", rank)
    reporter.update("step", 41, 100, "steps")
    return reporter


def returns(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank).update("drain", 100, 100, "steps")


def bug(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    raise ZeroDivisionError("sum of nothing")


def huge(run_dir: Path, rank: int, world_size: int) -> None:
    raise ValueError("first words " + "x" * 50_000_000 + " last words")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def unprintable(run_dir: Path, rank: int, world_size: int) -> None:
    raise Unprintable


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


def endless(run_dir: Path, rank: int, world_size: int) -> None:
    raise Endless


def not_utf8(run_dir: Path, rank: int, world_size: int) -> None:
    raise ValueError("half a pair \ud800 and a file " + os.fsdecode(b"\xff\xfe"))


def circular(run_dir: Path, rank: int, world_size: int) -> None:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


def too_deep(run_dir: Path, rank: int, world_size: int) -> None:
    too_deep(run_dir, rank, world_size + 1)


def exits_0(run_dir: Path, rank: int, world_size: int) -> None:
    sys.exit(0)


def exits_3(run_dir: Path, rank: int, world_size: int) -> None:
    sys.exit(3)


def exits_with_a_sentence(run_dir: Path, rank: int, world_size: int) -> None:
    sys.exit("the data are gone")


def keyboard(run_dir: Path, rank: int, world_size: int) -> None:
    raise KeyboardInterrupt


def users_fault(run_dir: Path, rank: int, world_size: int) -> None:
    raise MaskTokenInUse("mask token 7 occurs 3 times")


def disk_full(run_dir: Path, rank: int, world_size: int) -> None:
    error = DiskFull("no room for block 3")
    error.needed_bytes = 12345
    raise error


def thread_bug(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    threading.Thread(target=lambda: [][0], name="writer").start()
    time.sleep(60)


def thread_bug_while_stuck_in_c(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    threading.Thread(target=lambda: [][0], name="writer").start()
    ctypes.CDLL(None).sleep(60)


def thread_bug_then_return(run_dir: Path, rank: int, world_size: int) -> None:
    thread = threading.Thread(target=lambda: [][0], name="writer")
    thread.start()
    thread.join()


def thread_disk_full(run_dir: Path, rank: int, world_size: int) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device", str(run_dir / "block"))

    threading.Thread(target=write, name="writer").start()
    time.sleep(60)


def until_stopped(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    say(run_dir, "ready", os.getpid())
    while not stop_requested():
        time.sleep(0.02)
    raise Interrupted("stopped at step 41, checkpoint saved")


def stuck_in_c(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    say(run_dir, "ready", os.getpid())
    ctypes.CDLL(None).sleep(60)


def stuck_with_a_child(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    say(run_dir, "ready", subprocess.Popen(["sleep", "60"]).pid)
    ctypes.CDLL(None).sleep(60)


def loading_in_c(run_dir: Path, rank: int, world_size: int) -> None:
    Reporter(run_dir, "toy", rank).update("load", 5, 9, "bytes")
    say(run_dir, "ready", os.getpid())
    ctypes.CDLL(None).sleep(60)


def holds_the_gil(run_dir: Path, rank: int, world_size: int) -> None:
    at_step(run_dir, rank)
    say(run_dir, "ready", os.getpid())
    library = ctypes.PyDLL(None)  # which keeps the GIL; a lock, because a sleep ends at the first signal
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def segfault(run_dir: Path, rank: int, world_size: int) -> None:
    ctypes.string_at(1)


def children(run_dir: Path, rank: int, world_size: int) -> None:
    """Start one child by subprocess and one by fork, and see how each ends."""
    started = subprocess.Popen(["sleep", "60"])
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    say(run_dir, "ready", f"{started.pid} {forked.pid}")
    started.wait()
    forked.join()
    say(run_dir, "ended", f"{started.returncode} {forked.exitcode}")
    assert not stop_requested()


def asked_while_starting_children(run_dir: Path, rank: int, world_size: int) -> None:
    """Start short children until told to stop: a request may come while the signals are open to one of them."""
    at_step(run_dir, rank)
    say(run_dir, "ready", os.getpid())
    while not stop_requested():
        subprocess.run(["true"], check=True)
    raise Interrupted("stopped")


def no_room_for_an_ending(run_dir: Path, rank: int, world_size: int) -> None:
    (run_dir / "workers").write_text("a file where the folder was")
    raise OSError(28, "No space left on device", str(run_dir / "block"))


def score(run_dir: Path, rank: int, world_size: int) -> None:
    say(run_dir, "score", Path("/proc/self/oom_score_adj").read_text().strip())
