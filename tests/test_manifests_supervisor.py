"""A run outlives its shell, restarts what died, stops when asked, and leaves a record, whoever is killed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import supervised
from doctor_host import PLAIN, make_host
from supervised import HASTY, alive, ending, events, least_of_three, ring_events, start, until

from manifests.commit import read
from manifests.evidence import collect
from manifests.verdict import verdict
from shared.errors import (
    DiskFull,
    FolderLost,
    Interrupted,
    MaskTokenInUse,
    NoProgress,
    PathNotWritable,
    RunBusy,
    WorkerFailed,
    WorkerHung,
    WorkerKilled,
)
from shared.kernel import ROOT_VARIABLE
from shared.stop_file import write_stop

pytestmark = pytest.mark.crash
LONG = "100000"


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path) -> Iterator[None]:
    yield
    pids = [int(path.read_text() or 0) for path in list(tmp_path.rglob("pid-*"))]
    pids += [e["detail"]["pid"] for e in read(tmp_path / "run", "events") if e["event"] == "supervisor started"]
    until(lambda: not any(alive(pid) for pid in pids if pid))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOY_CHILD", str(tmp_path / "child"))
    return tmp_path / "run"


def running(folder: Path, workers: int = 2, attempt: int = 1) -> list[int]:
    """The pids of a run's workers, once all of them step."""
    paths = [folder / f"pid-{rank}-{attempt}" for rank in range(workers)]
    until(lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def supervisor_of(folder: Path) -> int:
    return int(until(lambda: events(folder, "supervisor started"))[0]["detail"]["pid"])


def test_a_quiet_run_leaves_its_events_and_ends_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HANG_SCALE", "0.2")  # wins over --hang-limit-scale
    code, out, said = supervised.run(folder, "steps", finish="toy_workers:finish")
    assert json.loads((folder / "supervision" / "spec.json").read_text())["hang_limit_scale"] == 0.2
    assert (code, out) == (0, "made\n  by  toys\n"), said
    names = [event["event"] for event in events(folder) if event["event"] != "weak promise"]  # by the machine
    spawned, ended = ["worker spawned"] * 2, ["worker ended"] * 2
    assert names == ["supervisor started", "attempt started", *spawned, *ended, "supervisor ended"]
    assert ring_events(folder)[-1]["event"] == "supervisor ended"
    assert [event["event"] for event in ring_events(folder)] == [event["event"] for event in events(folder)]
    assert ending(folder) == ("finished", 0, "")
    assert not (folder / "postmortem.md").exists()
    facts = events(folder, "worker ended")[0]["detail"]
    assert (facts["exit_code"], facts["signal"], facts["saved"], facts["asked"]) == (0, None, 10, False)
    assert facts["peak_memory"] > 1 << 20


def test_what_this_machine_cannot_promise_is_said_at_the_start(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = PLAIN["proc/self/mountinfo"]
    assert mounts is not None
    host = make_host(tmp_path / "host", {"proc/self/mountinfo": mounts.replace("ext4", "overlay")})
    monkeypatch.setenv(ROOT_VARIABLE, str(host.root))
    code, _, said = supervised.run(folder, "steps")
    assert code == 0, said
    (weak,) = (event["message"] for event in events(folder, "weak promise"))
    assert "goes with the container" in weak
    assert weak in " ".join(said.split())


def test_a_finish_that_fails_is_a_failed_run(folder: Path) -> None:
    code, _, said = supervised.run(folder, "steps", 1, finish="toy_workers:finish_badly")
    assert (code, ending(folder)[0]) == (MaskTokenInUse.exit_code, "failed")
    assert said.splitlines()[-1] == "error: nothing was made"


def test_a_killed_rank_restarts_the_group_from_its_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "kill@7/1/1")
    code, _, said = supervised.run(folder, "steps", restarts=3)
    assert code == 0, said
    assert "worker 1 of 2 ended by signal SIGKILL" in said or "rank 1 was killed" in said
    first, second = events(folder, "attempt started")
    assert (first["detail"]["attempt"], second["detail"]["attempt"], second["detail"]["ranks"]) == (1, 2, [0, 1])
    ports = {os.path.basename(path) for path in folder.glob("port-*")}  # noqa: PTH119
    assert len(ports) == 2
    died = next(e for e in events(folder, "worker ended") if e["detail"]["signal"] == signal.SIGKILL)
    assert (died["detail"]["rank"], died["detail"]["done"], died["detail"]["saved"]) == (1, 7, 5)
    assert read(folder, "runs")[-1]["state"] == "finished"
    log = (folder / "logs" / "train-1.log").read_text()
    assert "--- attempt 1, pid" in log
    assert "--- attempt 2, pid" in log


def test_an_independent_worker_restarts_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "kill@7/1/1")
    code, _, said = supervised.run(folder, "steps", restarts=3, independent=True)
    assert code == 0, said
    assert [e["detail"]["ranks"] for e in events(folder, "attempt started")] == [[0], [1], [1]]
    assert not (folder / "pid-0-2").exists()
    assert (folder / "pid-1-2").exists()


def test_the_same_failure_three_times_without_progress_stops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "raise@3/0/99")
    code, _, said = supervised.run(folder, "steps", 1, restarts=5)
    assert (code, ending(folder)[0]) == (NoProgress.exit_code, "failed")
    assert len(events(folder, "attempt started")) == 3
    assert "ValueError: bad value" in said.splitlines()[-1]
    assert events(folder, "supervisor ended")[0]["detail"]["code"] == "progress.none"
    assert "progress.none" in (folder / "postmortem.md").read_text()


def test_failures_with_progress_between_them_do_not_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "raise@always/0/99")
    code, _, said = supervised.run(folder, "steps", 1, restarts=1)
    assert code == 0, said
    assert len(events(folder, "attempt started")) == 3


def test_a_users_fault_is_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "refuse@3/1/99")
    code, _, said = supervised.run(folder, "steps", restarts=3)
    assert code == MaskTokenInUse.exit_code
    assert said.splitlines()[-1] == "error: mask token 7 occurs 3 times"
    assert len(events(folder, "attempt started")) == 1
    assert ending(folder) == ("failed", 25, "MaskTokenInUse: mask token 7 occurs 3 times")


@pytest.mark.parametrize("what", ["sleep", "busy"])
def test_a_hang_is_named_with_stacks_before_anything_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("TOY", f"{what}@7/1/99")
    code, _, said = supervised.run(folder, "steps", 2, hang_limit_scale=HASTY)
    assert code == WorkerHung.exit_code, said
    names = [event["event"] for event in events(folder)]
    killed = next(
        n for n, e in enumerate(events(folder)) if e["event"] == "worker ended" and e["detail"]["signal"] == 9
    )
    assert names.index("hang") < names.index("stacks saved") < killed
    (hang,) = events(folder, "hang")
    code_of_it = {"sleep": "hang.wait", "busy": "hang.busy"}[what]
    assert (hang["detail"]["rank"], hang["detail"]["code"], hang["detail"]["action"]) == (1, code_of_it, "kill")
    stacks = (folder / "supervision" / "stacks" / "attempt-1-rank-1.txt").read_text()
    assert "toy_workers.py" in stacks
    assert f"in {'_hang_busy' if what == 'busy' else '<lambda>'}" in stacks


def test_a_stopped_worker_is_named_and_continued_not_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "stop@7/0/99")
    code, _, said = supervised.run(folder, "steps", 1, hang_limit_scale=HASTY)
    assert code == 0, said
    (hang,) = events(folder, "hang")
    assert (hang["detail"]["code"], hang["detail"]["action"], hang["detail"]["state"]) == ("hang.stopped", "named", "T")


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "file", "supervisor"])
def test_a_request_to_stop_saves_and_is_never_success(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    with start(folder, "steps", restarts=3) as process:
        running(folder)
        if how == "file":
            write_stop(folder, False, "a test")
        elif how == "supervisor":
            os.kill(supervisor_of(folder), signal.SIGTERM)
        else:
            process.send_signal(getattr(signal, how))
        _, said = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code, said
    state, code, message = ending(folder)
    assert (state, code) == ("interrupted", Interrupted.exit_code)
    assert message.startswith("stopped at step")
    assert said.splitlines()[-1] == message
    assert (folder / "checkpoint-0").exists()
    (asked,) = events(folder, "stop asked")
    by = asked["detail"]["by"]
    named = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "file": "a test", "supervisor": None}[how]
    assert by.get("via") == named
    if how == "supervisor":
        assert (by["signal"], by["sender_pid"]) == ("SIGTERM", os.getpid())


def test_a_save_that_fails_when_asked_to_stop_is_no_clean_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    monkeypatch.setenv("TOY_BAD_SAVE", "0")
    with start(folder, "steps", restarts=3) as process:
        running(folder)
        write_stop(folder, False, "a test")
        _, said = process.communicate(timeout=60)
    assert process.returncode == DiskFull.exit_code, said
    state, code, message = ending(folder)
    assert (state, code) == ("failed", DiskFull.exit_code)
    assert "no room for the checkpoint of step" in message
    found = verdict(collect(folder))
    assert (found.code, found.ranks) == ("disk.full", (0,))


def test_a_stop_signal_to_the_whole_tree_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd's and Slurm's way; what the viewer passes on is no second request."""
    monkeypatch.setenv("TOY_STEPS", LONG)
    with start(folder, "steps", restarts=3) as process:
        pids = [*running(folder), supervisor_of(folder), process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code, said
    assert (folder / "checkpoint-0").exists()
    assert all(event["detail"]["exit_code"] == Interrupted.exit_code for event in events(folder, "worker ended"))


def test_a_worker_without_a_log_is_not_started_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    (folder / "logs" / "train-1.log").mkdir(parents=True)
    code, _, said = supervised.run(folder, "steps")
    (event,) = events(folder, "worker not started")
    assert "worker 1 could not be started" in event["message"]
    assert (code, ending(folder)[0]) == (PathNotWritable.exit_code, "failed"), said
    assert "worker 1 could not be started" in ending(folder)[2]


def test_a_folder_that_was_moved_is_told_with_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGKILL, then attempts without a log, ended as "3 times the same failure", and made the old folder anew."""
    monkeypatch.setenv("TOY_STEPS", LONG)
    moved = folder.with_name("moved")
    with start(folder, "steps", 1, restarts=3, hang_limit_scale=HASTY) as process:
        (worker,) = running(folder, 1)
        folder.rename(moved)
        os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=60)
    evidence = until(lambda: (now := collect(moved)).named("supervisor ended") and now)
    assert process.returncode == FolderLost.exit_code
    found = verdict(evidence)
    assert (found.code, found.exit_code) == ("refused.folder_lost", FolderLost.exit_code)
    assert f"it is {moved} now" in found.sentence
    assert f"put {moved} back in the place of {folder}, `dflash resume {folder}`" in found.advice
    assert not folder.exists()


def test_a_worker_that_hangs_before_its_first_sign_is_not_ended_by_being_asked(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_HANG_SCALE", raising=False)
    stuck = "import os, sys, time\nif 'shared.worker' in sys.orig_argv and os.environ['RANK'] == '1': time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(stuck)
    here = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}"}
    code, _, said = supervised.run(folder, "steps", independent=True, environment=here, hang_limit_scale=HASTY)
    assert code == WorkerHung.exit_code, said
    found = verdict(collect(folder))
    assert (found.code, found.ranks) == ("hang.startup", (1,))


def test_a_parent_that_ignores_the_death_of_children_loses_none(folder: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start(folder, "steps")
    finally:
        signal.signal(signal.SIGCHLD, before)
    with process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert ending(folder) == ("finished", 0, "")


def test_a_second_request_kills(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "sleep@0/0/99")
    with start(folder, "steps", 1, hang_limit_scale=1.0) as process:
        running(folder, 1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)  # a script's echo of the same Ctrl-C
        until(lambda: events(folder, "stop asked"))
        time.sleep(0.5)
        assert len(events(folder, "stop asked")) == 1
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code, said
    assert [e["detail"]["now"] for e in events(folder, "stop asked")] == [False, True]
    assert ending(folder)[0] == "interrupted"


def test_a_worker_that_does_not_hear_is_killed_after_its_grace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "sleep@0/0/99")
    with start(folder, "steps", 1, hang_limit_scale=HASTY) as process:
        pid = running(folder, 1)[0]
        write_stop(folder, False, "a test")
        process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert not alive(pid)
    assert (folder / "supervision" / "stacks" / "attempt-1-rank-0.txt").exists()


def test_the_run_outlives_its_viewer_and_its_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", "200")
    with start(folder, "steps") as process:
        running(folder)
        process.kill()
    assert events(folder, "supervisor ended") == []
    until(lambda: events(folder, "supervisor ended"))
    assert ending(folder) == ("finished", 0, "")


def test_a_pipe_of_the_shell_ends_with_the_viewer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exec 3> >(tee log); dflash train`: whoever reads descriptor 3 must not wait for the run."""
    monkeypatch.setenv("TOY_STEPS", LONG)
    ours, theirs = os.pipe()
    with start(folder, "steps", 1, pass_fds=(theirs,)) as process:
        os.close(theirs)
        running(folder, 1)
        process.kill()
    assert os.read(ours, 1) == b""
    assert events(folder, "supervisor ended") == []
    os.close(ours)
    write_stop(folder, False, "a test")
    until(lambda: events(folder, "supervisor ended"))


def test_a_closed_terminal_ends_only_the_viewer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", "200")
    ours, theirs = pty.openpty()
    values = {"entry": "toy_workers:steps", "num_workers": 1}
    shell = subprocess.Popen(
        [sys.executable, str(supervised.HERE / "supervised.py"), str(folder), json.dumps(values)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),  # TIOCSCTTY: the terminal hangs up on its session
        env={**os.environ, "PYTHONPATH": str(supervised.HERE)},
    )  # fmt: skip
    os.close(theirs)
    running(folder, 1)
    os.close(ours)
    assert shell.wait(60) == 129
    until(lambda: events(folder, "supervisor ended"))
    assert ending(folder) == ("finished", 0, "")


def test_detach_returns_at_once_and_says_where_the_run_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    code, out, said = supervised.run(folder, "steps", detach=True)
    assert code == 0, said
    assert f"dflash stop {folder}" in out
    assert events(folder, "supervisor ended") == []
    write_stop(folder, False, "a test")
    until(lambda: events(folder, "supervisor ended"))


def test_a_stop_asked_before_detach_has_left_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    code, _, said = supervised.run(folder, "steps", detach=True, asked=["Ctrl-C"])
    assert code == Interrupted.exit_code, said
    assert "Ctrl-C" in events(folder, "stop asked")[0]["message"]


def test_workers_of_a_killed_supervisor_save_and_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    with start(folder, "steps") as process:
        pids = running(folder)
        os.kill(supervisor_of(folder), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == WorkerKilled.exit_code
    assert "ended by signal SIGKILL" in said.splitlines()[-1]
    until(lambda: not any(alive(pid) for pid in pids))
    left = json.loads((folder / "workers" / "train-0.json").read_text())
    assert (left["error"], left["code"]) == ("SupervisorGone", 75)
    monkeypatch.setenv("TOY_STEPS", "12")
    assert supervised.run(folder, "steps")[0] == 0


def test_a_second_command_on_the_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    with start(folder, "steps", 1) as process:
        running(folder, 1)
        process.kill()
    code, _, said = supervised.run(folder, "steps", 1)
    assert code == RunBusy.exit_code
    assert f"in use by process {supervisor_of(folder)}" in said
    write_stop(folder, False, "a test")
    until(lambda: events(folder, "supervisor ended"))


def test_what_a_dead_worker_started_is_swept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "child@3/0/1")
    code, _, said = supervised.run(folder, "steps", 1, restarts=1)
    assert code == 0, said
    until(lambda: not alive(int((folder.parent / "child").read_text())))


@pytest.mark.parametrize(
    ("broken", "said_first"),
    [
        ("import manifests.team as t; t.Team.running = property(lambda team: 1 / 0)", "the supervisor failed"),
        ("import manifests.crew as c; c.Crew.__init__ = lambda *_: 1 / 0", "the supervisor could not begin"),
    ],
    ids=["at work", "before its work"],
)
def test_a_bug_of_the_supervisor_is_recorded_and_leaves_no_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str, said_first: str
) -> None:
    monkeypatch.setenv("TOY_STEPS", LONG)
    (folder.parent / "sitecustomize.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH_MORE", str(folder.parent))
    code, _, said = supervised.run(folder, "steps", 1)
    assert code == 1
    assert f"{said_first}: ZeroDivisionError" in said
    assert "ZeroDivisionError" in (folder / "logs" / "train-supervisor.log").read_text()
    assert events(folder, "supervisor failed") != []
    assert ending(folder)[:2] == ("failed", 1)


def test_it_is_small_quick_and_idle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event within a second of a death, 40 MB, and hardly any CPU with eight workers."""
    monkeypatch.setenv("TOY_STEPS", LONG)
    with start(folder, "until_stopped", 8, hang_limit_scale=1.0) as process:
        until(lambda: len(list(folder.glob("alive-*"))) == 8)
        pid = supervisor_of(folder)
        time.sleep(1.0)
        least = least_of_three(lambda: share_of_a_core(pid), 0.02)
        worker = int((folder / "alive-3").read_text())
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == WorkerKilled.exit_code
    died = next(e for e in events(folder, "worker ended") if e["detail"]["signal"] == signal.SIGKILL)
    (verdict,) = events(folder, "verdict")
    assert died["detail"]["mono"] - killed < 1.0
    assert verdict["detail"]["mono"] - killed < 5.0
    assert rss_peak(folder) < 40 << 20
    assert least < 0.02, least


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_a_core(pid: int) -> float:
    before, since = cpu_s(pid), time.monotonic()
    time.sleep(4.0)
    return (cpu_s(pid) - before) / (time.monotonic() - since)


def rss_peak(folder: Path) -> int:
    """Bytes, as the supervisor itself measured at its end."""
    return int(events(folder, "supervisor ended")[0]["detail"]["peak_memory"])


def test_a_worker_that_never_starts_is_a_plain_failure(folder: Path) -> None:
    code, _, said = supervised.run(folder, "no_such_module:main", 1, restarts=0)
    assert code == WorkerFailed.exit_code
    assert "no_such_module" in said
