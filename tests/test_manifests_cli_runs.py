"""`dflash why`, `logs`, `stop` and `resume`, on made folders and on real runs that are stopped and killed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import fault, run, verify
from made_runs import GONE, MadeRun, holder, identity
from safetensors.torch import load_file
from supervised import alive
from tiny_target import TEXTS, save_target
from toy_run import command, config_of, environment, run_here
from toy_store import counting_texts, make_store

from manifests import stop_command
from manifests.evidence import collect
from manifests.resume import continuation_of, continued
from manifests.runs import recorded
from shared.atomic import write_json
from shared.errors import ConfigRefused, DataMissing, DiskFull, RunBusy, RunNotRunning
from shared.kernel import process

COMMAND = ["train", "--store=x.zarr", "--steps", "9"]


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """What the condition gives once it is true of something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.03)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


# resume


def spec(folder: Path, run_id: str, arguments: list[str], cwd: Path) -> None:
    (folder / "supervision").mkdir(exist_ok=True)
    values = {"run_id": run_id, "argv": arguments, "cwd": str(cwd), "run_dir": os.path.relpath(folder, cwd)}
    write_json(folder / "supervision" / "spec.json", values)


@pytest.mark.parametrize(
    ("arguments", "goes_on"),
    [
        (["train", "--store=x"], ["train", "--store=x", "--resume"]),
        (["train", "--no-resume", "--store=x"], ["train", "--store=x", "--resume"]),
        (["train", "--store=x", "--resume"], ["train", "--store=x", "--resume"]),
        (["extract", "--out", "x"], ["extract", "--out", "x"]),
    ],
)
def test_the_command_that_goes_on(arguments: list[str], goes_on: list[str]) -> None:
    assert continued(arguments, detach=False) == goes_on
    assert continued(goes_on, detach=True) == [*goes_on, "--detach"]
    assert continued([*arguments, "--detach"], detach=True).count("--detach") == 1


def test_the_command_comes_from_the_newest_run(tmp_path: Path) -> None:
    MadeRun(tmp_path, "first").started(COMMAND, tmp_path).record("interrupted", exit_code=75)
    assert continuation_of(tmp_path).arguments == [*COMMAND, "--resume"]
    spec(tmp_path, "first", ["train", "--store=y"], tmp_path / "manifest")
    assert continuation_of(tmp_path).arguments == ["train", "--store=y", "--resume"]
    assert continuation_of(tmp_path).cwd == tmp_path / "manifest"
    # One that was refused since is not what ran here, an evaluation neither.
    MadeRun(tmp_path, "refused").started(["train", "--store=z"], tmp_path).record("refused", exit_code=43)
    with recorded(tmp_path, "eval", {}):
        pass
    assert continuation_of(tmp_path).arguments == ["train", "--store=y", "--resume"]
    MadeRun(tmp_path, "second").started(["train", "--store=z"], tmp_path)
    assert continuation_of(tmp_path).arguments == ["train", "--store=z", "--resume"]  # spec.json is the first one's


def test_what_cannot_be_resumed_says_why_in_one_line(tmp_path: Path) -> None:
    with recorded(tmp_path / "rows", "prepare", {}):
        pass
    for name, cwd, argv, more in (
        ("torchrun", tmp_path, COMMAND, {"world_size": 16}),
        ("moved", tmp_path / "gone", COMMAND, {}),
        ("script", tmp_path, ["-c", "launch(config)"], {}),
        ("busy", tmp_path, COMMAND, {}),
    ):
        MadeRun(tmp_path / name).started(argv, cwd, **more)
    for name, error, words in (
        ("rows", DataMissing, "holds no training and no extraction"),
        ("torchrun", ConfigRefused, "started by torchrun or Slurm with 16 processes"),
        ("moved", ConfigRefused, f"was started in {tmp_path / 'gone'}, which is gone"),
        ("script", ConfigRefused, "but by: dflash -c launch"),
    ):
        problem = fault(run("resume", tmp_path / name))
        assert isinstance(problem, error), problem
        assert words in str(problem)
    with holder(tmp_path / "busy") as child:
        problem = fault(run("resume", tmp_path / "busy"))
        assert isinstance(problem, RunBusy)
        assert f"process {child.pid} on" in str(problem)


def test_a_folder_that_was_moved_is_not_trained_anew_where_it_was(tmp_path: Path) -> None:
    MadeRun(tmp_path / "old").started(COMMAND, tmp_path)
    spec(tmp_path / "old", "made", COMMAND, tmp_path)
    (tmp_path / "link").symlink_to("old")
    assert continuation_of(tmp_path / "link").cwd == tmp_path
    (tmp_path / "old").rename(tmp_path / "new")
    problem = fault(run("resume", tmp_path / "new"))
    assert isinstance(problem, ConfigRefused)
    assert f"was made as {tmp_path / 'old'}" in str(problem)


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path) -> None:
    MadeRun(tmp_path).started(COMMAND, tmp_path / "gone").record("finished", exit_code=0)
    result = run("resume", tmp_path)
    assert (result.exit_code, "is finished" in result.output) == (0, True)


# logs


def test_logs_of_all_ranks_of_one_and_of_the_supervisor(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).started().record("finished", exit_code=0)
    made.log(0, "a\nb\nc\n").log(1, "d\n").log("supervisor", "watched\n")
    assert run("logs", tmp_path, "-n", 2).output == ("==> logs/train-0.log <==\nb\nc\n\n==> logs/train-1.log <==\nd\n")
    assert run("logs", tmp_path, "--rank", 1).output == "d\n"
    assert run("logs", tmp_path, "--rank", "supervisor").output == "watched\n"
    (tmp_path / "logs" / "train-1.fault").write_text("Fatal Python error: Segmentation fault\n")
    assert run("logs", tmp_path, "--stacks").output == "Fatal Python error: Segmentation fault\n"
    assert fault(run("logs", tmp_path, "--rank", 7)).exit_code == ConfigRefused.exit_code
    assert fault(run("logs", tmp_path / "logs")).exit_code == DataMissing.exit_code
    # The run has ended, so following it ends too.
    assert run("logs", tmp_path, "--rank", 1, "-f").output == "d\n"


def test_following_ends_with_the_run_and_quietly_with_its_reader(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).started().log(0, "first\n")
    line = [sys.executable, "-m", "shared", "logs", str(tmp_path), "-f"]
    with holder(tmp_path) as child:
        made.supervised(child.pid, 2)
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with (
            subprocess.Popen(line, **streams) as follower,
            subprocess.Popen(line, **streams) as left,
            subprocess.Popen(line, **streams) as interrupted,
        ):
            for process in (follower, left, interrupted):
                assert process.stdout.readline() == "first\n"
            left.stdout.close()
            assert left.wait(60) == 0  # though nothing new was printed
            interrupted.send_signal(signal.SIGINT)
            assert (interrupted.wait(60), interrupted.stderr.read()) == (130, "")
            made.log(0, "--- attempt 2 ---\n").log(1, "late rank\n")
            assert follower.stdout.readline() == "--- attempt 2 ---\n"
            assert [follower.stdout.readline() for _ in range(3)] == ["\n", "==> logs/train-1.log <==\n", "late rank\n"]
            made.log(1, "without an end")
            made.record("failed", exit_code=50)
            child.kill()
            assert follower.stdout.read() == "without an end\n"
            assert follower.wait(60) == 0
            assert (left.stderr.read(), follower.stderr.read()) == ("", "")


def test_logs_that_torchrun_kept_are_said_to_be_there(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).started(world_size=2).record("failed", "RuntimeError: reset", 1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train-0.fault").touch()
    MadeRun(tmp_path, "refused").started().record("refused", exit_code=43)
    for more in ((), ("-f",), ("--rank", 1)):
        problem = fault(run("logs", tmp_path, *more))
        assert isinstance(problem, DataMissing)
        assert "torchrun or Slurm started its 2 processes and kept what they printed; look at the" in str(problem)
    made.log(1, "redirected there\n")
    assert run("logs", tmp_path).output == "redirected there\n"


@pytest.mark.parametrize("following", [[], ["-f"]], ids=["", "follow"])
def test_a_full_disk_behind_the_output_is_not_taken_for_the_run_folders(tmp_path: Path, following: list[str]) -> None:
    MadeRun(tmp_path).started().log(0, "first\n").record("failed", exit_code=50)
    line = [sys.executable, "-m", "shared", "logs", str(tmp_path), *following]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: the output cannot be written: No space left on device; send it elsewhere\n"
    assert (done.returncode, done.stderr) == (DiskFull.exit_code, said)


# stop


def test_nothing_to_stop_is_one_line_with_its_code(tmp_path: Path) -> None:
    MadeRun(tmp_path / "lost").started().supervised(GONE)
    MadeRun(tmp_path / "done").started().record("finished", exit_code=0)
    (tmp_path / "nothing").mkdir()
    for name, words in (
        ("lost", "train, is lost"),
        ("done", "train, is finished"),
        ("nothing", "nothing ever ran there"),
    ):
        problem = fault(run("stop", tmp_path / name))
        assert (type(problem), problem.exit_code) == (RunNotRunning, 45)
        assert words in str(problem)
    with recorded(tmp_path / "rows", "prepare", {}):
        problem = fault(run("stop", tmp_path / "rows"))
        assert f"`dflash prepare` is at work there (process {os.getpid()} on" in str(problem)
    assert not list(tmp_path.rglob("stop.json"))


def test_the_request_says_who_asked_and_how(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        MadeRun(tmp_path).started().supervised(child.pid)
        result = run("stop", tmp_path, "--no-wait", "--now")
    assert result.exit_code == 0
    request = json.loads((tmp_path / "supervision" / "stop.json").read_text())
    assert (request["pid"], request["now"], request["via"]) == (os.getpid(), True, "dflash stop")
    assert request["user"]


def test_a_disk_that_takes_no_request_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise DiskFull("no room for a request")

    monkeypatch.setattr(stop_command, "write_stop", full)
    with holder(tmp_path) as child:
        made = MadeRun(tmp_path).started().supervised(child.pid)
        result = run("stop", tmp_path, "--no-wait")
        assert (result.exit_code, child.wait(60)) == (0, 0)  # it heard SIGTERM
        made.record("interrupted", exit_code=75)
    with holder(tmp_path):  # a holder that no signal from here can reach
        made.record("started")
        assert isinstance(fault(run("stop", tmp_path)), DiskFull)


def test_waiting_says_that_nobody_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_command, "ANSWER_S", 0.3)
    with holder(tmp_path) as child:
        MadeRun(tmp_path).started().supervised(child.pid)
        child.send_signal(signal.SIGSTOP)
        line = "import manifests.stop_command as c\nc.ANSWER_S = 0.3\nfrom shared.cli import main\nmain()"
        with subprocess.Popen(
            [sys.executable, "-c", line, "stop", str(tmp_path)], stderr=subprocess.PIPE, text=True
        ) as stop:
            assert stop.stderr is not None
            until(lambda: f"`kill -CONT {child.pid}` wakes it" in stop.stderr.readline(), "the warning", 60)
            stop.send_signal(signal.SIGINT)
            assert stop.wait(60) == 130
            assert "the request stays" in stop.stderr.read()


@contextmanager
def orphan(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A worker on record, in a session of its own with a child, whose supervisor is gone; and the child's pid."""
    line = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", line], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            started = int(child.stdout.readline())
            made = MadeRun(folder).started().supervised(GONE)
            made.event("worker spawned", attempt=1, rank=0, **identity(child.pid))
            yield child, started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def test_workers_without_their_supervisor_are_killed_from_here(tmp_path: Path) -> None:
    with orphan(tmp_path) as (child, started):
        result = run("stop", tmp_path, "--now", "--no-wait")
        assert result.exit_code == 0
        assert (
            f"its supervisor (process {GONE}) is gone; killed worker 0 (process {child.pid}) from here" in result.stderr
        )
        assert child.wait(60) == -signal.SIGKILL
        until(lambda: not alive(started), "the end of what it had started")


def test_who_has_a_workers_pid_since_is_not_killed(tmp_path: Path) -> None:
    with orphan(tmp_path) as (child, _):
        found = stop_command.orphans_of(collect(tmp_path))
        assert [(worker.rank, worker.pid, worker.supervisor) for worker in found] == [(0, child.pid, GONE)]
        stop_command._kill([dataclasses.replace(found[0], start_ticks=found[0].start_ticks + 1)])
        assert child.poll() is None
        ticks = identity(child.pid)["start_ticks"] + 1
        MadeRun(tmp_path).event("worker spawned", attempt=1, rank=0, pid=child.pid, start_ticks=ticks)
        assert stop_command.orphans_of(collect(tmp_path)) == []


def test_a_stopped_worker_without_its_supervisor_is_named(tmp_path: Path) -> None:
    with orphan(tmp_path) as (child, _):
        child.send_signal(signal.SIGSTOP)
        until(lambda: (found := process(child.pid)) and found.state == "T", "the stop")
        said = run("stop", tmp_path, "--no-wait").stderr
        assert f"its supervisor (process {GONE}) is gone; worker 0 (process {child.pid})" in said
        assert f"`kill -CONT {child.pid}` wakes it" in said
        assert child.poll() is None


def test_a_lock_that_is_not_ours_to_read_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of another user with umask 027: who may ask it to stop cannot open its lock."""

    def unreadable(folder: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(folder / ".owner"))

    monkeypatch.setattr(stop_command, "is_owned", unreadable)
    MadeRun(tmp_path).started().supervised(GONE).record("interrupted", "stopped at step 7", exit_code=75)
    stop_command.wait(tmp_path, {"time": 0.0})
    leaving = tmp_path / "leaving"
    with holder(leaving) as child:  # its supervisor has recorded the end, and is on its way out
        MadeRun(leaving).started().supervised(child.pid).record("interrupted", exit_code=75)
        assert stop_command._in_use(leaving)


# why


def test_a_running_run_that_was_restarted_says_why(tmp_path: Path) -> None:
    """`restarts: 1` was all that status and why said, with the verdict on disk."""
    with holder(tmp_path) as child:
        made = MadeRun(tmp_path).started().supervised(child.pid).beat(0, child.pid, "step", 40)
        assert json.loads(run("status", tmp_path, "--json").output)[0]["earlier"] == []
        named = {"code": "sig.quit", "sentence": "rank 0 crashed with SIGQUIT in phase step at step 58"}
        made.event("verdict", attempt=1, verdict=named).event("restart", attempt=1).event("attempt started", attempt=2)
        told = "attempt 1: rank 0 crashed with SIGQUIT in phase step at step 58 (sig.quit)"
        for command in ("status", "why"):
            lines = run(command, tmp_path).output.splitlines()
            assert lines[lines.index("    restarts: 1") + 1].strip() == told
        assert json.loads(run("status", tmp_path, "--json").output)[0]["earlier"] == [told]
        found = json.loads(run("why", tmp_path, "--json").output)["verdict"]
        assert (found["code"], found["cascade"]) == ("running", [told])
        made.record("finished", exit_code=0)
    assert json.loads(run("status", tmp_path, "--json").output)[0]["earlier"] == []


def test_why_of_what_never_ran_is_one_line(tmp_path: Path) -> None:
    with recorded(tmp_path, "prepare", {}):
        pass
    assert isinstance(fault(run("why", tmp_path)), DataMissing)


def test_why_of_a_running_and_of_a_finished_run(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        made = MadeRun(tmp_path, ago=100).started().supervised(child.pid).beat(0, child.pid, "step", 40)
        text = run("why", tmp_path).output
        assert "train running: " in text
        assert re.search(r"time: 1m4\ds since", text)
        assert "load 20s" in text
        assert "goodput: 0.1" in text  # 10 s of 100
        made.ago = 0
        made.event("worker ended", attempt=1, rank=0, pid=child.pid, exit_code=0, spent={"load": 20.0, "step": 75.0})
        made.event("restart")
        made.record("finished", exit_code=0)
    text = run("why", tmp_path).output
    assert "goodput: 0.7" in text
    assert "1 attempt, 1 restarted" in text
    answer = json.loads(run("why", tmp_path, "--json").output)
    assert answer["verdict"]["code"] == "done"
    assert answer["account"]["phases"] == {"load": 20.0, "step": 75.0}
    assert answer["evidence"]["run"]["run_id"] == "made"


# All of it on real runs.


def processes_of(folder: Path) -> list[int]:
    """The living supervisor and workers of a run."""
    evidence = collect(folder)
    pids = [(evidence.supervisor or {}).get("pid")] if evidence.now.supervisor_alive else []
    return [*pids, *(evidence.beats[rank].pid for rank in evidence.now.alive_ranks if rank in evidence.beats)]


def kill_everything(folder: Path, command: subprocess.Popen[Any]) -> None:
    """As the end of a container does: nobody gets to say anything."""
    pids = [command.pid, *processes_of(folder)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    command.wait(60)
    until(lambda: not processes_of(folder), "all processes gone", 60)


def dflash(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shared", *map(str, arguments)]


@pytest.mark.crash
@pytest.mark.parametrize(
    "stopped_first",
    [pytest.param(False, id="killed"), pytest.param(True, marks=pytest.mark.slow, id="stopped, then killed")],
)
def test_stopped_killed_and_resumed_equals_undisturbed_to_the_bit(tmp_path: Path, stopped_first: bool) -> None:
    store = make_store(tmp_path / "toy.zarr", counting_texts(32), blocks=2)
    changes: dict[str, Any] = {"steps": 100, "save_every": 10, "eval_every": 70}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    config = config_of(Path("toy.zarr"), Path("run"), **changes)  # paths are relative to its folder
    folder = tmp_path / "run"

    def step() -> float:
        beats = collect(folder).beats
        return beats[0].done if 0 in beats and beats[0].phase == "step" else 0

    def start(line: list[str], cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(line, cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True)

    begin: tuple[list[str], Path] = [*command(config), *options], tmp_path
    if stopped_first:
        with start(*begin) as first:
            until(lambda: step() >= 12, "step 12")
            stopped = subprocess.run(dflash("stop", folder), capture_output=True, text=True, check=False)
            assert stopped.returncode == 0, stopped.stderr
            assert "train interrupted: training stopped on request at step" in stopped.stdout
            assert first.wait(30) == 75
        begin = dflash("resume", folder), Path("/")
    with start(*begin) as second:
        # Early: it must not come to the estimate at step 70 before all of it is killed.
        until(lambda: step() >= (45 if stopped_first else 15), "steps after its checkpoint")
        kill_everything(folder, second)
    (row,) = json.loads(subprocess.run(dflash("status", folder, "--json"), capture_output=True, check=True).stdout)
    assert (row["state"], row["run"]["verdict"]["code"]) == ("lost", "tree.killed")
    assert row["run"]["phase"] in ("step", "checkpoint")
    assert f"dflash resume {folder}" in row["run"]["verdict"]["advice"]
    third = subprocess.run(
        dflash("resume", folder, "--detach"), cwd="/", env=environment(), capture_output=True, text=True, check=False
    )
    assert third.returncode == 0, third.stderr
    assert isinstance(fault(run("resume", folder)), RunBusy)
    followed = subprocess.run(dflash("logs", folder, "-f"), capture_output=True, text=True, check=True, timeout=200)
    assert "step 100" in followed.stdout
    assert "is finished" in run("resume", folder).output

    run_here(config_of(store, tmp_path / "undisturbed", **changes))
    one, two = (
        path / "checkpoints" / "step-00000100" / "drafter.safetensors" for path in (folder, tmp_path / "undisturbed")
    )
    weights, expected = load_file(one), load_file(two)
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.crash
def test_an_extraction_that_was_killed_whole_is_resumed(tmp_path: Path) -> None:
    save_target(tmp_path / "target", "qwen3")
    rows = [{"id": str(i), "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
            for i, text in enumerate(TEXTS)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = run("prepare", tmp_path / "data.jsonl", "--target", tmp_path / "target", "--out", tmp_path / "rows")
    assert prepared.exit_code == 0, prepared.output
    line = dflash("extract", "--target=target", "--data=rows", "--out=x.zarr", "--target-layer-ids=0,2", "--topk=4")
    line += ["--block-tokens=40", "--device=cpu"]
    with subprocess.Popen(line, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) as first:
        store = tmp_path / "x.zarr"
        until(lambda: len(processes_of(store)) == 2, "a supervisor and a worker")
        kill_everything(store, first)
    (row,) = json.loads(run("status", store, "--json").stdout)
    assert (row["state"], row["command"]) == ("lost", "extract")
    again = subprocess.run(
        dflash("resume", store), cwd="/", env=environment(), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "extracted" in again.stdout
    assert verify(store).exit_code == 0
