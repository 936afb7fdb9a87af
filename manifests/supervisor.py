"""The process that outlives the shell: `python -m manifests.supervisor RUN_DIR`, under every extract and train.

Started by manifests/launch.py in a session of its own, with the folder's lock and RUN/supervision/spec.json. It imports
no torch (30 MB), so that what kills workers does not kill it; it ignores SIGHUP, and SIGTERM means stop. The loop is
manifests/supervise.py's; here is what happens before the first worker and after the last.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.doctor_machine import warnings
from manifests.event_log import EventLog, print_line
from manifests.finish import run_finish
from manifests.judgement import Outcome
from manifests.launch_spec import LaunchSpec, spec_path
from manifests.lost_folder import folder_lost, is_lost, moved_to
from manifests.records import RunRecord
from manifests.runs import ledger_of
from manifests.stop_requests import Requests
from manifests.supervise import Supervision, bug
from shared.atomic import adopt_locks, write_bytes
from shared.errors import DflashError
from shared.json_file import read_if_whole
from shared.kernel import Kernel, host_identity, own_start_ticks

LOCKS_VARIABLE = "DFLASH_LOCKS"
POSTMORTEM = "postmortem.md"


def main(run_dir: Path) -> int:
    """Supervise the run that spec.json describes; returns its exit code."""
    adopt_locks(int(number) for number in os.environ.pop(LOCKS_VARIABLE, "").split(",") if number)
    with Requests(run_dir) as requests:
        spec = LaunchSpec.read(run_dir)
        kernel = Kernel()
        log = EventLog(run_dir, spec.run_id, kernel.boot_id())
        log.write("supervisor started", **_who(spec, kernel))
        for sentence in warnings(kernel, run_dir):
            log.write("weak promise", f"not sure on this machine: {sentence}")
        outcome = _supervised(spec, log, requests)
        if outcome.state == "finished" and spec.finish:
            outcome = run_finish(spec, requests)
        if is_lost(run_dir):
            outcome = _write_lost(spec, log)
        else:
            _write_ending(spec, log, outcome)
    return outcome.exit_code


def _supervised(spec: LaunchSpec, log: EventLog, requests: Requests) -> Outcome:
    """Run the loop; what cannot even begin (no thread, no descriptor left) is an ending, too."""
    try:
        supervision = Supervision(spec, log, requests)
    except Exception as error:  # noqa: BLE001 - recorded as the run's end
        return bug(log, "could not begin", error)
    return supervision.run()


def _who(spec: LaunchSpec, kernel: Kernel) -> dict[str, Any]:
    started = read_if_whole(spec_path(spec.run_dir)) or {}
    return {
        "pid": os.getpid(),
        "start_ticks": own_start_ticks(),
        "host": socket.gethostname(),
        **host_identity(kernel),
        "cgroup": kernel.cgroup(),
        "argv": started.get("argv"),
        "cwd": started.get("cwd"),
        "role": spec.role,
        "num_workers": spec.num_workers,
        "independent": spec.independent,
        "spec": spec.as_dict(),
        "readable": kernel.readable(),
    }


def _write_ending(spec: LaunchSpec, log: EventLog, outcome: Outcome) -> None:
    """The run's last record, its last event, and the page that says why; a full disk takes what it takes."""
    _record_ending(spec, spec.run_dir, outcome)
    _log_ending(log, outcome)
    page = spec.run_dir / POSTMORTEM
    if outcome.state == "finished":
        with suppress(OSError):
            page.unlink(missing_ok=True)
    else:
        _write_page(spec.run_dir, page, outcome)


def _write_lost(spec: LaunchSpec, log: EventLog) -> Outcome:
    """The end of a run whose folder is not there any more: on record where it was moved to, nowhere else."""
    moved = moved_to()
    error = folder_lost(spec, moved)
    outcome = Outcome("failed", error.exit_code, type(error).__name__, str(error))
    log.leave_folder()
    if moved is not None:
        _record_ending(spec, moved, outcome)
    _log_ending(log, outcome)
    return outcome


def _record_ending(spec: LaunchSpec, folder: Path, outcome: Outcome) -> None:
    well = outcome.state == "finished"
    named = outcome.state == "interrupted" or well or not outcome.error
    message = outcome.message if named else f"{outcome.error}: {outcome.message}"
    record = RunRecord(
        run_id=spec.run_id,
        command=spec.command,
        state=outcome.state,
        exit_code=outcome.exit_code,
        message=message,
        detail={"code": outcome.code} if outcome.code else {},
    )
    try:
        ledger_of(folder, spec.command, spec.run_id).append(record)
    except (DflashError, OSError) as error:
        print_line(f"the ending cannot be recorded: {error}")


def _log_ending(log: EventLog, outcome: Outcome) -> None:
    log.write(
        "supervisor ended",
        outcome.message,
        state=outcome.state,
        exit_code=outcome.exit_code,
        code=outcome.code,
        error=outcome.error,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _write_page(run_dir: Path, page: Path, outcome: Outcome) -> None:
    try:
        from manifests.evidence import collect
        from manifests.postmortem import page as page_of
        from manifests.verdict import Verdict, verdict

        evidence = collect(run_dir)
        found = verdict(evidence) if outcome.verdict is None else Verdict.from_dict(outcome.verdict)
        write_bytes(page, page_of(evidence, found).encode())
    except Exception as error:  # noqa: BLE001 - the run has ended and is recorded; `dflash why` can make the page later
        print_line(f"no {page.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without the interpreter's own end: a thread may wait for a disk that never answers (shared/samples.py).
    os._exit(code)
