"""The last process of a run that ended well: `python -m manifests.finish MODULE:FUNCTION RUN_DIR ROLE`.

The function checks that nothing is missing and prints what was made, into RUN/logs/<role>-summary.txt. A process of its
own, so that the supervisor stays small and survives it. Started by manifests/supervisor.py.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manifests.judgement import Outcome
from manifests.launch_spec import LaunchSpec, log_path, summary_path
from manifests.spawn import spawn
from manifests.stop_requests import Requests, code_of, told
from shared.atomic import fault_of, write_json
from shared.ending import bounded
from shared.errors import DflashError, Interrupted, WorkerFailed, WorkerKilled, error_classes
from shared.json_file import read_if_whole

_MOST_MESSAGE = 4000


def said_path(run_dir: Path, role: str) -> Path:
    """What the finishing process says about its own failure."""
    return run_dir / "workers" / f"{role}-finish.json"


def run_finish(spec: LaunchSpec, requests: Requests) -> Outcome:
    """Run the finish function of a run whose workers ended well; its failure is the run's."""
    said = said_path(spec.run_dir, spec.role)
    try:
        said.unlink(missing_ok=True)
        pid = _start(spec)
    except OSError as error:
        fault = fault_of(error) or WorkerFailed(f"the summary of {spec.run_dir} cannot be written: {error}")
        return Outcome("failed", fault.exit_code, type(fault).__name__, str(fault))
    asked = len(requests.by)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        requests.wait(0.1)
        if len(requests.by) > asked:  # nothing is lost: the same command finds the work done and sums it up
            os.kill(pid, signal.SIGKILL)
            asked = len(requests.by)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 0:
        return Outcome("finished")
    if requests.asked and code == -signal.SIGKILL:
        message = f"stopped on request ({told(requests.by[-1])}) after the work was done; the same command sums it up"
        return Outcome("interrupted", Interrupted.exit_code, Interrupted.__name__, message, code_of(requests.by[-1]))
    found = read_if_whole(said) or {}
    if found.get("error") in error_classes():
        return Outcome("failed", int(found["code"]), str(found["error"]), str(found["message"]))
    kind = WorkerKilled if code < 0 else WorkerFailed
    how = found.get("message") or (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
    log = log_path(spec.run_dir, spec.role, "supervisor")
    message = f"the check at the end of {spec.run_dir} failed ({how}); its log: {log}; run the same command again"
    return Outcome("failed", kind.exit_code, kind.__name__, message)


def _start(spec: LaunchSpec) -> int:
    command = [sys.executable, "-m", "manifests.finish", spec.finish, str(spec.run_dir), spec.role]
    log = log_path(spec.run_dir, spec.role, "supervisor")
    return spawn(command, os.environ, summary_path(spec.run_dir, spec.role), append=False, errors=log)


def finish(entry: str, run_dir: Path, role: str) -> int:
    """Call the function; the exit code is its error's, which is written down for the supervisor."""
    try:
        module, function = entry.split(":")
        call: Callable[[Path], None] = getattr(importlib.import_module(module), function)
        call(run_dir)
        sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is how the run ended
        fault = (fault_of(error) or error) if isinstance(error, OSError) else error
        if not isinstance(fault, DflashError):
            traceback.print_exc()
        code = fault.exit_code if isinstance(fault, DflashError) else 1
        message = bounded(str(fault), _MOST_MESSAGE)
        with suppress(DflashError, OSError):
            write_json(said_path(run_dir, role), {"code": code, "error": type(fault).__name__, "message": message})
        return code
    return 0


if __name__ == "__main__":
    sys.exit(finish(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
