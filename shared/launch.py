"""Start one process per device, watch all of them, and repeat the first fault in one line.

The parent imports no torch, so what kills a worker does not kill the watcher. Called by `extract` and
`train`; the workers begin in shared/worker.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shared.atomic import disk_faults, free_bytes, held_locks, remove_partials
from shared.errors import DiskFull, Interrupted, PathNotWritable, WorkerFailed, error_classes
from shared.json_file import read_if_whole
from shared.progress import Display, combine, progress_path
from shared.worker import ending_path

POLL_S = 0.1
GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to start: `entry` is "module:function", called as function(run_dir, rank, world_size) in each process."""

    run_dir: Path
    role: str
    entry: str
    num_workers: int
    summed_progress: bool = False
    """True for independent workers whose counts add up; False for ranks in step."""
    environment: dict[str, str] = field(default_factory=dict)


def run_workers(spec: LaunchSpec) -> None:
    """Run all workers to their end.

    Raises the worker's own DflashError class when it recorded one, WorkerFailed for anything else that is not a
    clean ending (a signal, a bug, exit 0 without having finished), Interrupted after a requested stop.
    """
    with disk_faults(spec.run_dir):
        for folder in ("logs", "workers", "progress"):
            (spec.run_dir / folder).mkdir(parents=True, exist_ok=True)
            remove_partials(spec.run_dir / folder)
    for rank in range(spec.num_workers):
        ending_path(spec.run_dir, spec.role, rank).unlink(missing_ok=True)
        progress_path(spec.run_dir, spec.role, rank).unlink(missing_ok=True)
    environment = _environment(spec)
    workers: list[subprocess.Popen[bytes]] = []
    display = Display(spec.role)
    try:
        with _stop_on_signals(workers) as stop:
            for rank in range(spec.num_workers):
                workers.append(_spawn(spec, rank, environment))
            if stop["asked"]:  # a signal that came while a worker was being started has not reached it
                for worker in workers:
                    worker.terminate()
            failed = _watch(spec, workers, display, stop)
    finally:
        display.close()
        _end(workers, GRACE_S if sys.exc_info()[0] is None else 1.0)
    if failed is not None and not stop["asked"]:
        raise _fault(spec, failed, workers[failed].returncode)
    if stop["asked"]:
        _raise_unless_interrupted(spec, workers)


def _environment(spec: LaunchSpec) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // spec.num_workers)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # OpenMP threads that spin while waiting made two busy workers on two cores 4x slower: wait passively.
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    fixed = {"WORLD_SIZE": str(spec.num_workers), "PYTHONUNBUFFERED": "1", "DFLASH_PARENT_PID": str(os.getpid())}
    return {**defaults, **os.environ, "MASTER_PORT": str(port), **fixed, **spec.environment}


def _spawn(spec: LaunchSpec, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # The log is inherited as a file, never a pipe: it outlives this process and needs nobody to drain it.
    with log_path(spec.run_dir, spec.role, rank).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shared.worker", spec.entry, str(spec.run_dir), spec.role],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=held_locks(),
        )


def log_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where a worker's stdout and stderr go."""
    return run_dir / "logs" / f"{role}-{rank}.log"


def _watch(
    spec: LaunchSpec, workers: list[subprocess.Popen[bytes]], display: Display, stop: dict[str, bool]
) -> int | None:
    """The rank that failed first, or None when all ended well."""
    while True:
        codes = [worker.poll() for worker in workers]
        _draw(spec, display)
        for rank, code in enumerate(codes):
            if code is not None and not _finished(spec, rank, code) and not stop["asked"]:
                return rank
        if all(code is not None for code in codes):
            return None
        time.sleep(POLL_S)


def _draw(spec: LaunchSpec, display: Display) -> None:
    states = [
        state
        for rank in range(spec.num_workers)
        if (state := read_if_whole(progress_path(spec.run_dir, spec.role, rank)))
    ]
    shot = combine(states, spec.summed_progress)
    if shot is not None:
        display.show(shot)


def _finished(spec: LaunchSpec, rank: int, code: int) -> bool:
    # Exit 0 alone proves nothing (os._exit, a library calling exit): the worker must have recorded its ending.
    ending = read_if_whole(ending_path(spec.run_dir, spec.role, rank))
    return code == 0 and ending is not None and ending["code"] == 0


def _fault(spec: LaunchSpec, rank: int, code: int) -> Exception:
    ending = read_if_whole(ending_path(spec.run_dir, spec.role, rank)) or {}
    known = error_classes().get(str(ending.get("error")))
    if known is not None:
        return known(ending["message"])
    if not ending:
        for kind in (DiskFull, PathNotWritable):
            if code == kind.exit_code:  # it had no place to write its sentence
                return kind(
                    f"{spec.role} worker {rank} could not write in {spec.run_dir} ({free_bytes(spec.run_dir):,} bytes "
                    "free); make room or change its permissions, then run the same command again"
                )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    state = read_if_whole(progress_path(spec.run_dir, spec.role, rank))
    where = (
        f" in phase {state['phase']} at {state['done']:,.0f} {state['unit']}" if state else " before its first report"
    )
    message = str(ending.get("message", "")).strip()
    return WorkerFailed(
        f"{spec.role} worker {rank} of {spec.num_workers} ended by {how}{where}"
        f"{': ' + message if message else ''}; its log: {log_path(spec.run_dir, spec.role, rank)}; "
        "run the same command again to continue from what is finished"
    )


def _raise_unless_interrupted(spec: LaunchSpec, workers: list[subprocess.Popen[bytes]]) -> None:
    endings = [read_if_whole(ending_path(spec.run_dir, spec.role, rank)) or {} for rank in range(len(workers))]
    if endings and all(ending.get("code") == 0 for ending in endings):
        return  # the work was already done when the request came
    said = next((ending["message"] for ending in endings if ending.get("error") == "Interrupted"), "")
    raise Interrupted(said or f"{spec.role} stopped on request; run the same command again to go on")


@contextmanager
def _stop_on_signals(workers: list[subprocess.Popen[bytes]]) -> Iterator[dict[str, bool]]:
    """SIGINT or SIGTERM asks the workers to stop at a boundary, a second one kills; SIGHUP is ignored."""
    stop = {"asked": False}

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        number = signal.SIGKILL if stop["asked"] else signal.SIGTERM
        stop["asked"] = True
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(workers: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    """No worker outlives the command: ask, wait, then kill."""
    living = [worker for worker in workers if worker.poll() is None]
    for worker in living:
        worker.terminate()
    deadline = time.monotonic() + grace_s
    for worker in living:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
