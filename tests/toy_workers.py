"""Worker functions that end in every way a worker can, for tests of the launcher."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from shared.errors import Interrupted, MaskTokenInUse
from shared.progress import Reporter
from shared.worker import stop_requested


def well(run_dir: Path, rank: int, world_size: int) -> None:
    reporter = Reporter(run_dir, "toy", rank)
    for step in range(3):
        reporter.update("step", step, 3, "steps")
    (run_dir / f"done-{rank}-of-{world_size}").write_text(os.environ["MASTER_PORT"])


def user_fault_on_one(run_dir: Path, rank: int, world_size: int) -> None:
    if rank == 1:
        raise MaskTokenInUse("mask token 7 occurs 3 times")
    time.sleep(60)


def bug(run_dir: Path, rank: int, world_size: int) -> None:
    raise ZeroDivisionError("sum of nothing")


def exit_zero_early(run_dir: Path, rank: int, world_size: int) -> None:
    os._exit(0)


def killed(run_dir: Path, rank: int, world_size: int) -> None:
    Reporter(run_dir, "toy", rank).update("step", 41, 100, "steps")
    os.kill(os.getpid(), signal.SIGKILL)


def until_stopped(run_dir: Path, rank: int, world_size: int) -> None:
    (run_dir / f"alive-{rank}").write_text(str(os.getpid()))
    while not stop_requested():
        time.sleep(0.02)
    (run_dir / f"saved-{rank}").write_text("checkpoint")
    raise Interrupted("stopped at step 7; run the same command again to go on")


def disk_too_full_for_an_ending(run_dir: Path, rank: int, world_size: int) -> None:
    shutil.rmtree(run_dir / "workers")
    (run_dir / "workers").write_text("a file where the folder was: nothing can be written below it")
    raise OSError(28, "No space left on device", str(run_dir / "block"))
