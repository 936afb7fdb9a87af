"""Worker functions that end in every way a worker can, for tests of the launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from shared.errors import DiskFull, Interrupted, MaskTokenInUse
from shared.progress import Reporter, summary
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


def steps(run_dir: Path, rank: int, world_size: int) -> None:
    """Steps of 20 ms with a checkpoint every five, which a later attempt resumes; what to do wrong comes by TOY.

    TOY is "what@step/rank/attempts": kill@7/1/2 kills rank 1 at step 7 in its first two attempts; step "always" is the
    second of each attempt after the first checkpoint.
    """
    what, _, where = os.environ.get("TOY", "nothing@-1/0/0").partition("@")
    bad_step, bad_rank, bad_attempts = where.split("/")
    attempt = int(os.environ["DFLASH_ATTEMPT"])
    reporter = Reporter(run_dir, "train", rank)
    checkpoint = run_dir / f"checkpoint-{rank}"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    reporter.saved(step)
    (run_dir / f"pid-{rank}-{attempt}").write_text(str(os.getpid()))
    (run_dir / f"port-{os.environ['MASTER_PORT']}").touch()
    bad = step + 6 if bad_step == "always" else int(bad_step)
    while step < int(os.environ.get("TOY_STEPS", "12")):
        reporter.update("step", step, 12, "steps")
        if (step, rank) == (bad, int(bad_rank)) and attempt <= int(bad_attempts):
            FAULTS[what]()
        if stop_requested():
            if str(rank) == os.environ.get("TOY_BAD_SAVE"):
                raise DiskFull(f"no room for the checkpoint of step {step}")
            checkpoint.write_text(str(step))
            raise Interrupted(f"stopped at step {step}, saved; the same command continues")
        time.sleep(0.02)
        step += 1
        if step % 5 == 0:
            checkpoint.write_text(str(step))
            reporter.saved(step)


def _hang_busy() -> None:
    while True:
        pass


def _raise(error: BaseException) -> None:
    raise error


def _leave_a_child_and_die() -> None:
    child = subprocess.Popen(["sleep", "300"])
    Path(os.environ["TOY_CHILD"]).write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: _raise(ValueError(f"bad value {time.monotonic_ns()}")),
    "refuse": lambda: _raise(MaskTokenInUse("mask token 7 occurs 3 times")),
    "sleep": lambda: time.sleep(600),
    "busy": _hang_busy,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "child": _leave_a_child_and_die,
    "nothing": lambda: None,
}


def finish(run_dir: Path) -> None:
    summary("made", [("by", "toys")])


def finish_badly(run_dir: Path) -> None:
    raise MaskTokenInUse("nothing was made")
