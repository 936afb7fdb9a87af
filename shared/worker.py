"""The first code of every worker process: `python -m shared.worker MODULE:FUNCTION RUN_DIR ROLE`.

It takes the stop signals (shared/stop_signals.py), opens the heartbeat (shared/reporter.py), keeps Python stacks of
hard crashes, and writes how the worker ended (shared/ending.py), so that whoever asks can say it in one line. Started
by the supervisor; under torchrun stage2_train/train.py begins in the same way.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shared import ending, phases
from shared.atomic import disk_faults, write_json
from shared.ending import ending_path
from shared.errors import DflashError, Interrupted, SupervisorGone, WorkerFailed, error_classes
from shared.kernel import own_start_ticks, session_members
from shared.orphan import OrphanWatch
from shared.reporter import Reporter, Where
from shared.stop_signals import block_stop_signals, parent_gone, stop_note, stop_requested, take_stop_signals

__all__ = ["Worker", "ending_path", "main", "stop_requested"]

FAULT_FILE_VARIABLE = "DFLASH_FAULT_FILE"
_OOM_SCORE = 500
# After a helper thread is lost: enough to write a page, not enough to lose more work.
_LAST_S = 0.8
# For the ending of a worker that ends itself, on a disk that may not answer.
_ENDING_S = 5.0
_WATCH_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Worker:
    """This process as one rank of a run: its heartbeat, and its ending, which is written once."""

    def __init__(self, run_dir: Path, role: str, rank: int) -> None:
        self.run_dir, self.role, self.rank = run_dir, role, rank
        self.reporter: Reporter | None = None
        self._started = time.time()
        self._lock = threading.Lock()
        self._code: int | None = None

    def take_signals(self, look: Callable[[], dict[str, Any] | None] | None = None) -> None:
        """Before any other thread starts: requests to stop become a question; `look` finds one that is no signal."""
        parent = int(os.environ.get("DFLASH_PARENT_PID", "0"))
        take_stop_signals(parent_pid=parent, look=look, then=self.leave_early)
        if parent:
            threading.Thread(target=self._watch_parent, name="orphan-watch", daemon=True).start()

    @contextmanager
    def attended(self) -> Iterator[Reporter]:
        """Heartbeat, stacks and ending around work that another launcher (torchrun, Slurm) started; re-raises all."""
        with disk_faults(self.run_dir):
            for folder in ("logs", "workers", "progress"):
                (self.run_dir / folder).mkdir(parents=True, exist_ok=True)
        keep_stacks(self.run_dir / "logs" / f"{self.role}-{self.rank}.fault")
        try:
            yield self.begin()
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def begin(self) -> Reporter:
        """Open the heartbeat, and let no helper thread die unseen. Raises DiskFull or PathNotWritable."""
        path = ending_path(self.run_dir, self.role, self.rank)
        with disk_faults(path):
            path.unlink(missing_ok=True)
        self.reporter = Reporter(self.run_dir, self.role, self.rank)
        self.reporter.adopt()
        self.reporter.update(phases.IMPORT, 0, None, "modules")
        threading.excepthook = self._on_lost_thread
        return self.reporter

    def end(self, error: BaseException | None, thread: str | None = None) -> int:
        """Write how it ended, unless that was done already; returns the code to exit with.

        A full disk takes no ending: the exit code alone carries the class, and work without its ending is not done.
        """
        with self._lock:
            if self._code is None:
                said = self._ending(error, thread)
                if error is not None:
                    _print(said)
                self._code = self._write(said)
            return self._code

    def leave_early(self) -> None:
        """After a request to stop: end the process when its main thread does not come to a boundary by itself."""
        deadline = time.monotonic() + phases.LEAVE_S
        while time.monotonic() < deadline:
            if self.reporter is not None and self.reporter.where.phase not in phases.NOTHING_TO_SAVE:
                return
            time.sleep(0.05)
        if self.reporter is None:  # under torchrun, before the run folder is ours
            os._exit(Interrupted.exit_code)
        phase = self.reporter.where.phase
        error = Interrupted(
            f"{self.role} stopped in phase {phase}, nothing to save; run the same command again to go on"
        )
        os._exit(self.end(error))

    def _watch_parent(self) -> None:
        """Not to live for ever once the supervisor is gone: end the process when it comes to no boundary by itself."""
        watch = OrphanWatch(float(os.environ.get(phases.SCALE_VARIABLE) or 1.0))
        while True:
            time.sleep(_WATCH_EVERY_S)
            reporter = self.reporter
            where, reported = (Where(phases.IMPORT), 0.0) if reporter is None else (reporter.where, reporter.reported)
            silent = watch.overdue(time.monotonic(), parent_gone(), where.phase, reported)
            if silent is not None:
                self._end_alone(where, silent)

    def _end_alone(self, where: Where, silent_s: float) -> None:
        _exit_within(_ENDING_S, SupervisorGone.exit_code)
        code = self.end(
            SupervisorGone(
                f"its supervisor is gone, and {self.role} worker {self.rank} came to no boundary by itself: "
                f"{silent_s:.0f} s without a sign in phase {where.phase} at {where.done:,.0f} {where.unit}; it ended "
                "itself and saved nothing more; run the same command again to go on from what is saved"
            )
        )
        for pid, _ in session_members(os.getpid()):  # nobody is left to sweep what it started
            if pid != os.getpid():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(code)

    def _ending(self, error: BaseException | None, thread: str | None) -> dict[str, Any]:
        if isinstance(error, Interrupted) and stop_note() is None and parent_gone():
            error = SupervisorGone(f"its supervisor is gone: {error}")
        said = ending.describe(error)
        if thread is not None and said["error"] not in error_classes():
            said["code"] = WorkerFailed.exit_code
        where = Where() if self.reporter is None else self.reporter.where
        return {
            "pid": os.getpid(),
            "start_ticks": own_start_ticks(),
            "attempt": int(os.environ.get("DFLASH_ATTEMPT", "0")),
            "rank": self.rank,
            "started": self._started,
            "ended": time.time(),
            **said,
            "thread": thread,
            **where._asdict(),
            "signal": stop_note(),
            **ending.memory_used(),
        }

    def _write(self, said: dict[str, Any]) -> int:
        path = ending_path(self.run_dir, self.role, self.rank)
        code = int(said["code"])
        try:
            path.parent.mkdir(exist_ok=True)  # no parents: a run folder that was deleted stays so
            write_json(path, said)
        except (DflashError, OSError) as error:
            code = code or (error.exit_code if isinstance(error, DflashError) else 1)
        return code

    def _on_lost_thread(self, lost: threading.ExceptHookArgs) -> None:
        """A helper thread ended by an exception that nobody took: its work is not done, so the worker's is not."""
        name = ending.bounded(lost.thread.name if lost.thread is not None else "a thread", 200)
        if self._code is not None or lost.exc_value is None:  # we are leaving already
            logger.warning("thread %s ended by %s", name, lost.exc_type.__name__)
            return
        _exit_within(_LAST_S, WorkerFailed.exit_code)
        os._exit(self.end(lost.exc_value, thread=name))


def _exit_within(seconds: float, code: int) -> None:
    def leave() -> None:
        time.sleep(seconds)
        os._exit(code)

    # Writing the ending may wait for a disk that does not answer.
    threading.Thread(target=leave, name="last-second", daemon=True).start()


def _print(said: dict[str, Any]) -> None:
    """Into the log: one line for a fault of the user's, the traceback too for a bug."""
    with suppress(Exception):
        where = f"thread {said['thread']} " if said["thread"] else ""
        trace = "" if said["error"] in error_classes() else said["traceback"]
        sys.stderr.write(f"{trace}{where}ended by {said['error']}: {said['message']}\n")
        sys.stderr.flush()


def keep_stacks(path: Path | None) -> None:
    """Python stacks of all threads go to `path` (appended to), else to stderr: in a crash, and at every SIGUSR1."""
    file: Any = sys.stderr
    if path is not None:
        with suppress(OSError):
            file = path.open("a")
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _prefer_for_oom() -> None:
    """Have the kernel take a worker before the small processes that can say what happened."""
    with suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        if int(path.read_text()) < _OOM_SCORE:
            path.write_text(str(_OOM_SCORE))


def main() -> int:
    """Run one worker function and record its ending; the exit code is the error's own."""
    entry, run_dir, role = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = Worker(run_dir, role, rank)
    worker.take_signals()
    given = os.environ.get(FAULT_FILE_VARIABLE)
    keep_stacks(Path(given) if given else None)
    _prefer_for_oom()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role}-{rank} %(levelname)s %(name)s: %(message)s")
    caught: BaseException | None = None
    try:
        reporter = worker.begin()
        module, name = entry.split(":")
        function = getattr(importlib.import_module(module), name)
        block_stop_signals()
        if stop_requested():
            raise Interrupted(f"{role} stopped before its work began; run the same command again to go on")
        function(run_dir, rank, world_size)
        if reporter.where.phase != phases.DONE:
            reporter.update(*reporter.where._replace(phase=phases.DONE))
    except BaseException as error:
        caught = error
    code = worker.end(caught)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    # The module runs as __main__, but loops import `shared.worker`: hand over to that one copy of the state.
    exit_code = importlib.import_module("shared.worker").main()
    if exit_code:
        # Its ending is written. The interpreter's own end may wait for ever, for a thread or for a peer that is gone:
        # the failure would then be called a hang.
        os._exit(exit_code)
    sys.exit(exit_code)
