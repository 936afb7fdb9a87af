"""Questions that end in every way, for tests of the process that `dflash doctor` asks in (not collected by pytest)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def answer(word: str) -> dict[str, str]:
    """Talks before it answers."""
    sys.stdout.write("a library says hello")
    return {"word": word}


def fail() -> None:
    raise KeyError("the message\nin two lines")


def leave() -> None:
    sys.stderr.write("the library gave up\n")
    sys.stderr.flush()
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_c() -> None:
    """Where no Python code runs until it ends."""
    ctypes.CDLL(None).sleep(120)


def hang_with_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "120"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(120)
