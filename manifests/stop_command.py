"""`dflash stop`: leave a request where the run finds it, and watch until the run has ended.

The request is a file, so that it works from any shell and any host that shares the disk; on a disk that takes no file
it is a signal to the supervisor, which only works on its own host. Called by cli_runs.py.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.evidence import JUDGED, Evidence, collect
from manifests.runs import is_owned, owner_of
from manifests.status import LIVING, FolderStatus, status_of
from shared.atomic import disk_faults
from shared.errors import DiskFull, PathNotWritable, RunNotRunning
from shared.kernel import is_same, session_members
from shared.progress import say, tell
from shared.stop_file import stop_path, write_stop

LOOK_EVERY_S = 0.25
# A supervisor looks four times a second, workers under torchrun once; files of a shared disk come half a minute late.
ANSWER_S = 10.0
SAY_EVERY_S = 5.0


def ask(run_dir: Path, *, now: bool) -> dict[str, Any]:
    """Leave the request and say so; returns it. Raises RunNotRunning, or why the folder takes no request."""
    status = status_of(run_dir, holdings=False)
    _require_running(run_dir, status)
    orphans = orphans_of(collect(run_dir))
    try:
        with disk_faults(run_dir):  # torchrun's workers have no such folder, but look for the file
            stop_path(run_dir).parent.mkdir(exist_ok=True)
        request = write_stop(run_dir, now, "dflash stop")
    except (DiskFull, PathNotWritable):
        if not orphans and not _signal_supervisor(run_dir, now):
            raise
        request = {"time": time.time(), "now": now}
    if orphans:
        if now:
            _kill(orphans)
        say(told_of_orphans(run_dir, orphans, killed=now))
        return request
    how = "its workers are killed" if now else "it saves and stops at the next boundary"
    say(f"asked {run_dir} to stop: {how}")
    return request


def _require_running(run_dir: Path, status: FolderStatus) -> None:
    if status.command not in JUDGED and status.state in LIVING:
        owner = owner_of(run_dir) or "an unknown process"
        raise RunNotRunning(
            f"{run_dir}: `dflash {status.command}` is at work there ({owner}) and takes no requests: Ctrl-C where it "
            "runs, or `kill -TERM` its process"
        )
    if status.state not in LIVING:
        told = f"the last command, {status.command}, is {status.state}" if status.command else "nothing ever ran there"
        if status.state == "unknown":
            told = status.message
        raise RunNotRunning(f"nothing runs in {run_dir}: {told}; `dflash status` shows what does")


@dataclass(frozen=True)
class Orphan:
    """A worker of this host whose supervisor is gone: nobody restarts it, wakes it or passes a request on."""

    rank: int
    pid: int
    start_ticks: int
    state: str
    supervisor: int


def orphans_of(evidence: Evidence) -> list[Orphan]:
    """The living workers of a run whose supervisor is known to be dead; none where only another host could know."""
    if evidence.now.supervisor_alive is not False:
        return []
    supervisor = int((evidence.supervisor or {}).get("pid", 0))
    who = {rank: (beat.pid, beat.start_ticks) for rank, beat in evidence.beats.items()}
    for detail in (event["detail"] for event in evidence.named("worker spawned")):
        who[detail.get("rank")] = (detail.get("pid"), detail.get("start_ticks"))
    states = evidence.now.rank_states
    return [Orphan(rank, *who[rank], states[rank], supervisor) for rank in evidence.now.alive_ranks if rank in who]


def _kill(orphans: list[Orphan]) -> None:
    """As their supervisor would: SIGKILL to each and all that it started; who took such a pid since is let be."""
    for orphan in orphans:
        for pid, start_ticks in session_members(orphan.pid):
            if pid != orphan.pid and is_same(orphan.pid, orphan.start_ticks) and is_same(pid, start_ticks):
                _send(pid)
        if is_same(orphan.pid, orphan.start_ticks):
            _send(orphan.pid)


def _send(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise PathNotWritable(
            f"process {pid} is another user's and cannot be killed from here; ask its owner"
        ) from error


def told_of_orphans(run_dir: Path, orphans: list[Orphan], *, killed: bool) -> str:
    """What a person must know of them: who they are, that nobody watches them, what happens to them now."""
    pids = " ".join(str(orphan.pid) for orphan in orphans)
    who = ", ".join(f"worker {orphan.rank} (process {orphan.pid})" for orphan in orphans)
    said = f"{run_dir}: its supervisor (process {orphans[0].supervisor}) is gone"
    if killed:
        return f"{said}; killed {who} from here"
    said += f"; {who} saves and leaves by itself at its next boundary"
    if stopped := " ".join(str(orphan.pid) for orphan in orphans if orphan.state in ("T", "t")):
        said += f", but {stopped} is stopped by a signal and hears nothing: `kill -CONT {stopped}` wakes it"
    return f"{said}; `dflash stop {run_dir} --now` kills {pids}"


def _signal_supervisor(run_dir: Path, now: bool) -> bool:
    """SIGTERM, or two for `now`; False when there is no supervisor that a signal from here could reach."""
    evidence = collect(run_dir)
    if not evidence.now.supervisor_alive or evidence.supervisor is None:
        return False
    try:
        for _ in range(2 if now else 1):
            os.kill(int(evidence.supervisor["pid"]), signal.SIGTERM)
            time.sleep(LOOK_EVERY_S)
    except OSError:
        return False
    return True


def wait(run_dir: Path, request: dict[str, Any]) -> None:
    """Return when the run has ended and its folder is free for the next one; says how far it is, and how it ended."""
    asked, said, shown, warned = time.monotonic(), 0.0, "", False
    first = status_of(run_dir, holdings=False).run
    while True:
        status = status_of(run_dir, holdings=False)
        if first and status.run and status.run.run_id != first.run_id:
            tell(f"{run_dir}: the run that was asked has ended, another one has begun since")
            return
        if status.state not in LIVING and not _in_use(run_dir):
            tell(f"{run_dir}: {status.command} {status.state}{': ' + status.message if status.message else ''}")
            return
        passed = time.monotonic() - asked
        phase = status.run.phase if status.run else ""
        if phase != shown or passed - said >= SAY_EVERY_S:
            shown, said = phase, passed
            say(f"{passed:.0f} s: {status.message}")
        if passed > ANSWER_S and not warned:
            warned = True
            _warn_unheard(run_dir, request)
        time.sleep(LOOK_EVERY_S)


def _in_use(run_dir: Path) -> bool:
    """Whether a process holds the folder; where its lock is not ours to read (another user's umask 027), the
    supervisor's life must do.
    """
    try:
        return is_owned(run_dir)
    except OSError:
        return bool(collect(run_dir).now.supervisor_alive)


def _warn_unheard(run_dir: Path, request: dict[str, Any]) -> None:
    """Say why nobody has taken the request, if so: a stopped supervisor would leave us waiting without a word."""
    evidence = collect(run_dir)
    if orphans := orphans_of(evidence):  # the supervisor may have gone meanwhile
        now = bool(request.get("now"))
        if now:
            _kill(orphans)
        say(told_of_orphans(run_dir, orphans, killed=now))
        return
    if any(event["time"] >= request["time"] for event in evidence.named("stop asked")):
        return
    pid = (evidence.supervisor or {}).get("pid")
    if evidence.now.supervisor_state in ("T", "t"):
        say(f"its supervisor (process {pid}) is stopped by a signal and hears nothing: `kill -CONT {pid}` wakes it")
    elif evidence.now.supervisor_state == "D":
        say(
            f"its supervisor (process {pid}) waits inside the kernel, as a rule for a disk, and hears nothing meanwhile"
        )
