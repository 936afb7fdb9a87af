"""Every way in which a worker can end, hang or be refused by its disk: what it does to itself at its moment.

Called by fault_toys.py with the toy at work. What somebody outside does to a worker is in fault_acts.py.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from shared.atomic import disk_faults


class Victim(Protocol):
    """What an injection needs of a toy."""

    run_dir: Path
    rank: int
    slower: float
    """A factor on the time of all that follows."""
    skipped: int
    """Collectives that it left out (fault_gloo.py)."""


FOREVER = 3600.0


def exception(_: Victim) -> None:
    raise ValueError("the loss of document 17 went missing")


def exception_of_50_mb(_: Victim) -> None:
    raise ValueError("x" * (50 << 20))


def exception_that_is_no_text(_: Victim) -> None:
    raise ValueError("\udcff\udcfe\x00\x1b[31m caf\udce9")


def exception_about_itself(_: Victim) -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    first.args = (first.args, [first.args])
    raise first


def endless_recursion(victim: Victim) -> None:
    endless_recursion(victim)


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


def exception_without_text(_: Victim) -> None:
    raise Unprintable


def exception_in_a_thread(_: Victim) -> None:
    """The main thread goes on: a process of this kind used to end with exit 0."""

    def fail() -> None:
        raise LookupError("the writer lost its block")

    threading.Thread(target=fail, name="writer").start()


def exception_in_a_thread_while_main_waits(victim: Victim) -> None:
    exception_in_a_thread(victim)
    threading.Event().wait(FOREVER)


def system_exit_3(_: Victim) -> None:
    raise SystemExit(3)


def system_exit_0(_: Victim) -> None:
    sys.exit(0)


def keyboard_interrupt(_: Victim) -> None:
    raise KeyboardInterrupt


def os_exit_0(_: Victim) -> None:
    os._exit(0)


def os_exit_3(_: Victim) -> None:
    os._exit(3)


def segv(_: Victim) -> None:
    ctypes.string_at(1)


def abort(_: Victim) -> None:
    os.abort()


def bus(victim: Victim) -> None:
    """A mapped file that is cut short under the one who reads it."""
    path = victim.run_dir / "toy" / f"mapped-{victim.rank}"
    path.write_bytes(b"\0" * 8192)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
        os.truncate(path, 0)
        os.write(1, mapped[4096:4097])


def fpe(_: Victim) -> None:
    os.kill(os.getpid(), signal.SIGFPE)


def kill_itself(_: Victim) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lock_twice(library: ctypes.CDLL) -> None:
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def hold_the_gil(_: Victim) -> None:
    """In native code, for ever."""
    _lock_twice(ctypes.PyDLL(None))


def hold_the_gil_3_s(_: Victim) -> None:
    ctypes.PyDLL(None).usleep(ctypes.c_uint(3_300_000))


def wait_in_native_code(_: Victim) -> None:
    """With the GIL free."""
    _lock_twice(ctypes.CDLL(None))


def wait_in_python(_: Victim) -> None:
    threading.Event().wait(FOREVER)


def spin(_: Victim) -> None:
    while True:
        pass


def wait_in_the_kernel(victim: Victim) -> None:
    """State D: posix_spawn waits, not to be woken, for a child that opens a pipe with no writer before it executes."""
    pipe = victim.run_dir / "toy" / f"pipe-{victim.rank}"
    os.mkfifo(pipe)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)])


def never_begin(_: Victim) -> None:
    time.sleep(FOREVER)


def out_of_address_space(_: Victim) -> None:
    """RLIMIT_AS: MemoryError, no kill."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(256 << 20)


def eat_memory(_: Victim) -> None:
    """Until the kernel ends it: only inside a memory cgroup of its own."""
    kept = []
    for _number in range(4096):
        kept.append(bytearray(os.urandom(1 << 20)) * 4)
    raise AssertionError("16 GiB and nobody minded")


def write_a_lot(victim: Victim) -> None:
    """Into RUN/toy/data, where the scenario has put a small disk."""
    path = victim.run_dir / "toy" / "data" / f"block-{victim.rank}"
    with disk_faults(path):
        path.write_bytes(b"x" * (8 << 20))


def write_many_files(victim: Victim) -> None:
    """Empty ones, until there is no inode left."""
    for number in range(100):
        path = victim.run_dir / "toy" / "data" / f"file-{victim.rank}-{number}"
        with disk_faults(path):
            path.touch()


def write_past_its_limit(victim: Victim) -> None:
    """RLIMIT_FSIZE: EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    path = victim.run_dir / "toy" / f"block-{victim.rank}"
    with disk_faults(path):
        path.write_bytes(b"x" * (1 << 20))


def write_without_care(victim: Victim) -> None:
    """As a library does that knows nothing of our errors: into RUN/toy/data."""
    (victim.run_dir / "toy" / "data" / f"part-{victim.rank}").write_bytes(b"x" * (8 << 20))


def print_a_lot(_: Victim) -> None:
    """Into its own log, whose disk is full."""
    for _number in range(64):
        sys.stdout.write("x" * (1 << 16))
        sys.stdout.flush()


def leave_a_child_and_die(_: Victim) -> None:
    """What a worker started must not outlive it."""
    subprocess.Popen(["sleep", "600"])
    raise ValueError("left a child behind")


def fail_beside_a_thread(_: Victim) -> None:
    """The interpreter waits at its end for threads that are no daemons."""
    threading.Thread(target=threading.Event().wait, args=(FOREVER,), name="writer").start()
    raise ValueError("failed beside a thread")


def fail_and_never_leave(_: Victim) -> None:
    """A library whose clean-up waits for peers that are gone."""
    atexit.register(time.sleep, FOREVER)
    raise ValueError("failed before a clean-up that hangs")


def compile_with_children(_: Victim) -> None:
    """Healthy: silent for two seconds, with children at work."""
    child = subprocess.Popen([sys.executable, "-c", "import time; e = time.time() + 2\nwhile time.time() < e: pass"])
    child.wait()


def pause_silently(_: Victim) -> None:
    """Healthy, but as long as the step phase's limit nearly allows."""
    time.sleep(0.9)


def slow_down_20_times(victim: Victim) -> None:
    """Healthy: a slow disk, a busy host."""
    victim.slower = 20.0


def skip_a_collective(victim: Victim) -> None:
    """It goes on, its peers wait for it."""
    victim.skipped += 1


def another_collective(_: Victim) -> None:
    """It waits in a barrier, the others in an all_reduce."""
    import torch.distributed

    torch.distributed.barrier()


def sleep_outside(_: Victim) -> None:
    """As a data loader that lost its disk; the others wait in their collective."""
    time.sleep(FOREVER)
