"""A request to stop a run, as a file in its folder: any shell that may write there can ask, and says who asked.

Written by the viewer (Ctrl-C) and by `dflash stop`; read by the supervisor four times a second and by workers under
torchrun once a second; taken away when the next run of the folder starts.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.atomic import write_json
from shared.json_file import read_if_whole
from shared.provenance import user_name


def stop_path(run_dir: Path) -> Path:
    """Where the request lies."""
    return run_dir / "supervision" / "stop.json"


def write_stop(run_dir: Path, now: bool, via: str) -> dict[str, Any]:
    """Ask the run in `run_dir` to stop: to save and leave, or with `now` to be killed. Returns what was written.

    `via` is what a person did: "Ctrl-C", "dflash stop". A second request is another file content with another time.
    Raises DiskFull or PathNotWritable.
    """
    request = {
        "time": time.time(),
        "user": user_name(),
        "uid": os.getuid(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "tty": _terminal(),
        "now": now,
        "via": via,
    }
    write_json(stop_path(run_dir), request)
    return request


def read_stop(run_dir: Path) -> dict[str, Any] | None:
    """The newest request, or None while there is none that can be read."""
    return read_if_whole(stop_path(run_dir))


def forget_stop(run_dir: Path) -> None:
    """Take an earlier run's request away. Call only while owning the folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        stop_path(run_dir).unlink()


def _terminal() -> str | None:
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            return os.ttyname(descriptor)
    return None
