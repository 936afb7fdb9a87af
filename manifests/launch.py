"""Start a run: hand it to a supervisor of its own (extract, train), or run its workers under this very process.

`start_supervisor` is called inside `recording` (manifests/runs.py) by stage1_extract/extract.py and
stage2_train/launch_train.py, which then look on through manifests/viewer.py. `run_workers` serves what needs no
supervisor: `prepare --regenerate`, benchmarks. Next: manifests/supervise.py, the loop of both.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from manifests.event_log import EventLog
from manifests.launch_spec import LaunchSpec as LaunchSpec
from manifests.launch_spec import hang_scale, log_path, spec_path
from manifests.runs import Recording
from manifests.spawn import spawn
from manifests.stop_requests import Requests
from manifests.supervise import Supervision
from manifests.supervisor import LOCKS_VARIABLE
from manifests.viewer import ProgressView, Started, ViewerSignals
from shared.atomic import disk_faults, held_locks, remove_partials, write_json
from shared.ending import ending_path
from shared.reporter import progress_path
from shared.stop_file import forget_stop

FOLDERS = ("logs", "workers", "progress")


def start_supervisor(run: Recording, spec: LaunchSpec) -> Started:
    """Hand `run` over to a supervisor, a process in a session of its own that holds the folder from now on.

    Raises DiskFull or PathNotWritable when its first files cannot be written; the run is then still the caller's.
    """
    spec = replace(spec, run_id=run.run_id, command=run.command, hang_limit_scale=hang_scale(spec.hang_limit_scale))
    make_ready(spec, *FOLDERS, spec_path(spec.run_dir).parent.name)
    with disk_faults(spec.run_dir):
        forget_stop(spec.run_dir)
    write_json(spec_path(spec.run_dir), spec.as_dict() | {"argv": sys.argv[1:], "cwd": str(Path.cwd())})
    signals = ViewerSignals()
    signals.install()  # before there is somebody to pass a request on to: none may end this process half-way
    try:
        pid = _start(spec)
    except BaseException:
        signals.restore()
        raise
    run.handed_over = True
    return Started(spec, pid, signals)


def _start(spec: LaunchSpec) -> int:
    log = log_path(spec.run_dir, spec.role, "supervisor")
    environment = {**os.environ, LOCKS_VARIABLE: ",".join(map(str, held_locks())), "PYTHONUNBUFFERED": "1"}
    with disk_faults(log):
        return spawn([sys.executable, "-m", "manifests.supervisor", str(spec.run_dir)], environment, log)


def make_ready(spec: LaunchSpec, *folders: str) -> None:
    """The folders of a run's own files, without what killed writers and earlier ranks left there."""
    with disk_faults(spec.run_dir):
        for name in folders:
            (spec.run_dir / name).mkdir(parents=True, exist_ok=True)
            remove_partials(spec.run_dir / name)
        for path in (ending_path(spec.run_dir, spec.role, 0), progress_path(spec.run_dir, spec.role, 0)):
            for left in path.parent.glob(f"{spec.role}-*{path.suffix}"):
                left.unlink(missing_ok=True)


def run_workers(spec: LaunchSpec) -> None:
    """Run all workers to their end under this process, without restarts; nothing but their logs is kept.

    Raises the worker's own DflashError class when it recorded one, WorkerFailed, WorkerKilled or another class of its
    exit code for anything else that is not a clean ending, Interrupted after a requested stop.
    """
    spec = replace(spec, restarts=0, on_disk_full="stop", hang_limit_scale=hang_scale(spec.hang_limit_scale))
    make_ready(spec, *FOLDERS)
    display = ProgressView(spec)
    try:
        with Requests(None) as requests:
            outcome = Supervision(spec, EventLog(None, "", None), requests, recorded=False, draw=display.draw).run()
    finally:
        display.close()
    if outcome.state != "finished":
        raise outcome.exception()
