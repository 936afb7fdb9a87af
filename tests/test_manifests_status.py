"""Status tells running from finished from lost, from files and the kernel's lock alone."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import GONE, MadeRun, holder, identity
from supervised import least_of_three

from manifests import status as status_module
from manifests.commit import Ledger, files_of, read
from manifests.evidence import collect
from manifests.query import ask
from manifests.records import CheckpointRecord, RunRecord, ShardRecord
from manifests.resume import newest_run
from manifests.runs import is_owned, recorded
from manifests.status import FolderStatus, status_of, statuses
from manifests.status_text import lines_of
from manifests.verdict import verdict
from manifests.why import starts
from shared.atomic import write_json
from shared.errors import CheckpointMismatch, ConfigRefused, DiskFull, Interrupted, NonFinite, RunBusy, WorkerFailed
from shared.gpus import Gpu, GpuReport
from shared.kernel import Kernel

ENDINGS = [
    (DiskFull("full"), "failed", 41),
    (Interrupted("stop"), "interrupted", 75),
    (KeyboardInterrupt(), "interrupted", 75),
    (ZeroDivisionError("bug"), "failed", 1),
    (ConfigRefused("block 32"), "refused", 43),
    (None, "finished", 0),
]


@pytest.mark.parametrize(("error", "state", "code"), ENDINGS, ids=str)
def test_every_ending_is_a_record(tmp_path: Path, error: BaseException | None, state: str, code: int) -> None:
    def work() -> None:
        with recorded(tmp_path, "train", {"steps": 3}):
            assert status_of(tmp_path).state == "running"
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    last = read(tmp_path, "runs")[-1]
    assert (last["state"], last["exit_code"]) == (state, code)
    assert status_of(tmp_path).state == state
    assert not is_owned(tmp_path)


def test_a_refused_command_does_not_make_a_finished_run_failed(tmp_path: Path) -> None:
    with recorded(tmp_path, "train", {}):
        pass
    with pytest.raises(CheckpointMismatch), recorded(tmp_path, "train", {}):
        raise CheckpointMismatch("block_size is 16, 8 asked")
    assert status_of(tmp_path).state == "finished"
    rows = ask([tmp_path], "SELECT state FROM run_states").rows
    assert rows == [("finished",)]


def test_an_evaluation_runs_beside_the_training_it_measures(tmp_path: Path) -> None:
    with recorded(tmp_path, "train", {}), recorded(tmp_path, "eval", {}):
        assert status_of(tmp_path).state == "running"
        with pytest.raises(RunBusy), recorded(tmp_path, "eval", {}):
            raise AssertionError("two evaluations wrote into one folder")
    assert status_of(tmp_path).state == "finished"


@pytest.mark.crash
def test_a_clock_that_went_back_hides_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A boot before NTP: the run that was resumed with the true clock was shown as ended, and could not be stopped."""
    with monkeypatch.context() as ahead:
        at = time.time() + 3600
        ahead.setattr("time.time", lambda: at)
        with pytest.raises(Interrupted), recorded(tmp_path, "train", {}):
            raise Interrupted("stopped at step 58")
    for number in range(3):  # each finds the first one's records in its future
        with suppress(WorkerFailed), recorded(tmp_path, "train", {}) as run_id:
            assert status_of(tmp_path).state == "running"
            assert (collect(tmp_path).run or {})["run_id"] == run_id
            assert collect(tmp_path).ended is None
            newest = newest_run(tmp_path)
            assert newest is not None
            assert (newest["run_id"], newest["state"]) == (run_id, "started")
            assert newest["time"] < time.time() + 60, "the wall clock is not changed for it"
            raise WorkerFailed(f"the fault of {number}")
        assert (status_of(tmp_path).state, (collect(tmp_path).ended or {})["run_id"]) == ("failed", run_id)
        assert f"the fault of {number}" in status_of(tmp_path).message
        assert len(starts(tmp_path)) == number + 1
    with suppress(WorkerFailed), recorded(tmp_path, "eval", {}):
        raise WorkerFailed("of an evaluation")
    assert "of an evaluation" in status_of(tmp_path).message


def test_a_killed_command_is_lost_never_blank(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from manifests.runs import recorded
with recorded(Path(sys.argv[1]), "extract", {}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    status = status_of(tmp_path)
    assert status.state == "lost"
    assert status.run is not None
    assert status.run.verdict is not None
    assert f"dflash resume {tmp_path}" in status.run.verdict["advice"]


def test_what_a_store_holds(tmp_path: Path) -> None:
    store = tmp_path / "x.zarr"
    store.mkdir()
    (store / "store.json").write_text("{}")
    (store / "plan.json").write_text(json.dumps({"blocks": [[0], [1], [2]]}))
    ledger = Ledger(store, "w0")
    ledger.append(RunRecord(run_id="a", command="extract", state="failed", exit_code=41, message="DiskFull: full"))
    for block in (0, 1, 1):
        ledger.append(ShardRecord(block=block, rank=0, documents=2, tokens=50, bytes=500, seconds=1.0, seal="a"))
    (status,) = statuses([tmp_path])
    assert (status.kind, status.state, status.holds["blocks"], status.holds["tokens"]) == (
        "store",
        "failed",
        "2/3",
        100,
    )


def test_the_checkpoint_that_is_told_is_one_that_is_there(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w0")
    for step in (50, 100):
        path = f"checkpoints/step-{step:08d}"
        (tmp_path / path).mkdir(parents=True)
        ledger.append(CheckpointRecord(run_id="a", global_step=step, path=path, bytes=1))
    ledger.append(RunRecord(run_id="a", command="train", state="failed", exit_code=50, message="x"))
    assert statuses([tmp_path])[0].holds["checkpoint"] == 100
    (tmp_path / "checkpoints" / "step-00000100").rmdir()
    assert statuses([tmp_path])[0].holds["checkpoint"] == 50


def test_withdrawn_blocks_do_not_count_and_damaged_lines_are_told(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w0")
    for block, state in ((0, "done"), (1, "done"), (1, "withdrawn"), (2, "done")):
        ledger.append(
            ShardRecord(block=block, rank=0, documents=2, tokens=50, bytes=500, seconds=1.0, seal="a", state=state)
        )
    path = files_of(tmp_path, "shards")[0]
    path.write_bytes(path.read_bytes().replace(b'"block":2', b'"block":7'))
    holds = status_of(tmp_path).holds
    assert (holds["blocks"], holds["tokens"]) == (1, 50)
    assert holds["damaged_record_lines"] == f"1, first line 4 of {path}"


def test_json_output(tmp_path: Path) -> None:
    Ledger(tmp_path / "run", "w").append(RunRecord(run_id="a", command="train", state="finished", exit_code=0))
    done = subprocess.run(
        [sys.executable, "-m", "shared", "status", str(tmp_path), "--json"], capture_output=True, text=True, check=True
    )
    (row,) = json.loads(done.stdout)
    assert (row["command"], row["state"]) == ("train", "finished")


@pytest.mark.parametrize(("first", "second"), [("prepare", "extract"), ("extract", "train"), ("train", "prepare")])
def test_a_folder_of_another_kind_is_refused_and_untouched(tmp_path: Path, first: str, second: str) -> None:
    with recorded(tmp_path, first, {}):
        pass
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(ConfigRefused, match=f"made by `dflash {first}`.*another folder"),
        recorded(tmp_path, second, {}),
    ):
        raise AssertionError("never entered")
    assert sorted(tmp_path.rglob("*")) == before
    with recorded(tmp_path, first, {}):
        pass


def test_eval_and_export_write_into_their_run(tmp_path: Path) -> None:
    for command in ("train", "eval", "export", "train"):
        with recorded(tmp_path, command, {}):
            pass
    assert [record["state"] for record in read(tmp_path, "runs")] == ["started", "finished"] * 4


def test_a_disk_too_full_for_the_ending_does_not_hide_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_ledger: Ledger, *_records: object) -> None:
        raise DiskFull("no room for a record")

    def work() -> None:
        with recorded(tmp_path, "train", {}):
            monkeypatch.setattr(Ledger, "append", full)
            raise NonFinite("the fault itself")

    with pytest.raises(NonFinite, match="the fault itself"):
        work()


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("good", "odd"):
        with recorded(tmp_path / name, "train", {}):
            pass
    # A file that opens and answers every read with EIO, also for root: nothing is mapped at address 0.
    (tmp_path / "odd" / "manifest" / "runs.x.jsonl").symlink_to("/proc/self/mem")
    states = {Path(row.folder).name: row.state for row in statuses([tmp_path])}
    assert states == {"good": "finished", "odd": "unreadable"}


def text_of(status: FolderStatus) -> str:
    return "\n".join(lines_of(status))


def told(state: FolderStatus) -> Any:
    """The picture of the run, which is there."""
    assert state.run is not None
    return state.run


def test_a_running_training(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        run = MadeRun(tmp_path).started().supervised(child.pid, 2).log(0, "one\ntwo\nthree\nfour\n")
        run.beat(0, child.pid, "step", 40).beat(1, child.pid, "step", 41)
        status = status_of(tmp_path)
    assert (status.state, status.message) == ("running", "step 40/100 steps  4 steps/s  ETA 15s")
    picture = told(status)
    assert (picture.phase, picture.done, picture.total, picture.unit) == ("step", 40, 100, "steps")
    assert picture.eta_s == pytest.approx(15, rel=0.1)
    assert [rank.pid for rank in picture.ranks] == [child.pid, child.pid]
    assert picture.verdict is None
    assert picture.last_sign_s < 60
    assert text_of(status).splitlines()[1:] == ["    log of rank 0:", "      | two", "      | three", "      | four"]
    json.dumps(status.as_dict())


def test_ranks_that_differ_have_a_line_each(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        run = MadeRun(tmp_path).started().supervised(child.pid, 3).log(1, "the last of rank 1\n")
        run.beat(0, child.pid, "step", 40).beat(1, child.pid, "eval", 40, silent_s=42).beat(2, child.pid, "done", 100)
        text = text_of(status_of(tmp_path))
        assert "rank 0: step 40/100 steps\n" in text
        assert re.search(r"rank 1: eval 40/100 steps, silent for 4[2-9]s\n", text)
        assert "rank 2: done 100/100 steps\n" in text
        assert "| the last of rank 1" in text
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not told(status := status_of(tmp_path)).ranks[0].stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert status.state == "running"
        assert status.message.startswith("its supervisor is stopped by a signal and watches nothing")
        assert f"rank 0: step 40/100 steps, stopped by a signal (`kill -CONT {child.pid}` lets it go on)" in text_of(
            status
        )


def test_paused_then_stopping(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        run = MadeRun(tmp_path).started().supervised(child.pid).beat(0, child.pid, "step", 40)
        run.event("restart", attempt=1).event("paused", code="disk.full", free=2e9, needed=5.25e9)
        status = status_of(tmp_path)
        assert (status.state, told(status).restarts) == ("paused", 1)
        assert status.message.startswith("the disk is full: 2 GB free, it goes on by itself at 5.25 GB; step 40/100")
        run.event("paused", code="disk.full", free=790, needed=53_687_091)  # a disk of a gigabyte
        message = status_of(tmp_path).message
        assert message.startswith("the disk is full: 790 bytes free, it goes on by itself at 53.69 MB; step 40/100")
        run.event("continued")
        assert status_of(tmp_path).state == "running"
        (tmp_path / "supervision").mkdir()
        request = {"time": 1.0, "user": "ada", "host": "desk", "tty": "/dev/pts/3", "via": "dflash stop", "now": False}
        write_json(tmp_path / "supervision" / "stop.json", request)  # of an earlier run: too old to count
        assert status_of(tmp_path).state == "running"
        write_json(tmp_path / "supervision" / "stop.json", request | {"time": time.time() + 1})
        status = status_of(tmp_path)
    assert (status.state, told(status).stop["user"]) == ("stopping", "ada")
    assert "asked to stop by dflash stop by ada@desk on /dev/pts/3; step 40" in status.message


def test_a_run_of_another_host(tmp_path: Path) -> None:
    there = {"host": "node7", "boot": "another boot", "pid_ns": "pid:[1]", "pid1_start": 1}
    MadeRun(tmp_path / "fresh").started().supervised(GONE, **there).beat(0, GONE, "step", 40)
    MadeRun(tmp_path / "old", ago=300).started().supervised(GONE, **there).beat(0, GONE, "step", 40)
    fresh, old = statuses([tmp_path])
    assert (fresh.state, old.state) == ("running", "unknown")
    assert re.match(r"on node7, last sign of life \ds ago: step 40/100 steps", fresh.message), fresh.message
    assert old.message.startswith("on node7, last sign of life 5m0")
    assert told(old).last_sign_s == pytest.approx(300, abs=5)


def test_lost_by_a_reboot_and_by_a_killed_supervisor(tmp_path: Path) -> None:
    before = time.time() - (Kernel().boot_time() or time.time()) + 100  # a run of the boot before ended before this one
    run = MadeRun(tmp_path / "boot", ago=before).started()
    run.supervised(GONE, boot="the boot before").beat(0, GONE, "step", 40)
    status = status_of(tmp_path / "boot")
    assert (status.state, told(status).verdict["code"]) == ("lost", "host.reboot")
    assert f"cause: host.reboot ({told(status).verdict['confidence']})" in text_of(status)
    assert f"more: dflash why {tmp_path / 'boot'}" in text_of(status)
    with holder(tmp_path / "orphans") as worker, subprocess.Popen(["sleep", "600"]) as supervisor:
        run = MadeRun(tmp_path / "orphans").started().supervised(supervisor.pid)
        run.event("worker spawned", attempt=1, rank=0, **identity(worker.pid)).beat(0, worker.pid, "step", 40)
        supervisor.kill()
        supervisor.wait()
        status = status_of(tmp_path / "orphans")
    assert status.state == "stopping"
    assert status.message.startswith("its supervisor is gone, so rank 0 will save and leave; step 40/100")
    assert told(status).verdict["code"] == "sup.killed"


def test_gpus_of_a_running_and_of_a_lost_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Question:
        def answer(self) -> GpuReport:
            return report

    gpu = Gpu(0, "H200", "GPU-0", 61 << 30, 140 << 30, 97)
    report = GpuReport((gpu, replace(gpu, index=1, used=0, utilisation=None)), "GPU 2 did not answer within 0.5 s")
    monkeypatch.setattr(status_module, "GpuQuestion", Question)
    for name, device in (("cuda", "auto"), ("cpu", "cpu")):
        MadeRun(tmp_path / name).record("started", config={"device": device}).supervised(GONE)
    on_cpu, on_gpu = statuses([tmp_path])
    assert "    GPUs: 61.0 0.0 of 140 GiB in use, 97 ? % busy; GPU 2 did not answer within 0.5 s" in lines_of(on_gpu)
    assert [gpu["uuid"] for gpu in on_gpu.as_dict()["run"]["gpus"]] == ["GPU-0", "GPU-0"]
    assert "GPUs" not in text_of(on_cpu)
    report = GpuReport((), "no NVML: the package nvidia-ml-py is not installed")
    on_gpu = statuses([tmp_path])[1]
    assert "NVML" not in text_of(on_gpu)  # nothing to do with the run, and said by `dflash doctor`
    assert told(on_gpu).gpus_missing == report.missing


def test_how_a_run_failed_is_told_with_its_verdict(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).started().supervised(GONE)
    verdict = {"code": "sig.kill.oom_cgroup", "confidence": "proved", "ranks": [3], "time": 1.0, "phase": "step"}
    run.event("restart").event("verdict", verdict=verdict | {"advice": "more memory"})
    run.record("failed", "OutOfMemory: rank 3", 55)
    status = status_of(tmp_path)
    assert (status.state, told(status).exit_code, told(status).restarts) == ("failed", 55, 1)
    assert "cause: sig.kill.oom_cgroup (proved), rank 3, in phase step, 1970" in text_of(status)
    assert "to do: more memory" in text_of(status)


def test_a_run_of_torchrun_is_judged_as_by_why(tmp_path: Path) -> None:
    """Rank 1 was killed: the record is rank 0's and names what that met."""
    said = "RuntimeError: [gloo] Read error: Connection reset by peer"
    MadeRun(tmp_path, ago=60).started(world_size=2, host="node7")
    run = MadeRun(tmp_path).beat(1, GONE, "step", 40, silent_s=3.0).beat(0, GONE + 1, "step", 41)
    ending = {"pid": GONE + 1, "start_ticks": 1, "rank": 0, "started": time.time() - 10, "ended": time.time()}
    ending |= {"code": 1, "error": "RuntimeError", "message": said, "traceback": "", "phase": "step", "done": 41}
    (tmp_path / "workers").mkdir()
    write_json(tmp_path / "workers" / "train-0.json", ending | {"attempt": 1, "unit": "steps", "signal": None})
    run.record("failed", said, 1)
    why = json.loads(json.dumps(verdict(collect(tmp_path)).as_dict()))
    status = status_of(tmp_path)
    assert (why["code"], why["ranks"]) == ("unknown", [1])
    assert json.loads(json.dumps(status.as_dict()))["run"]["verdict"] == why
    assert (status.state, status.message, told(status).exit_code) == ("failed", why["sentence"], 1)
    assert "    cause: unknown (unknown), rank 1, in phase step" in text_of(status)
    assert f"    more: dflash why {tmp_path}" in lines_of(status)
    run.record("finished", exit_code=0)
    assert (status_of(tmp_path).message, told(status_of(tmp_path)).verdict) == ("", None)


def test_an_end_that_a_full_disk_did_not_record(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).started().supervised(GONE)
    run.event("supervisor ended", "no room", state="failed", exit_code=41, code="disk.full", error="DiskFull")
    assert status_of(tmp_path).state == "failed"


def test_an_evaluation_beside_a_lost_training_does_not_hide_it(tmp_path: Path) -> None:
    MadeRun(tmp_path).started().supervised(GONE)
    with recorded(tmp_path, "eval", {}):
        pass
    assert (status_of(tmp_path).command, status_of(tmp_path).state) == ("train", "lost")


def test_a_second_is_enough_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """30,000 blocks, a terabyte of document records that must not be read, a lost and a failed training."""
    store = tmp_path / "x.zarr"
    ledger = Ledger(store, "w0")
    ledger.append(
        *(
            ShardRecord(block=block, rank=0, documents=32, tokens=9000, bytes=500, seconds=1.0, seal="a")
            for block in range(30_000)
        )
    )
    for kind in ("documents", "metrics"):
        with (store / "manifest" / f"{kind}.w0.jsonl").open("wb") as file:
            file.truncate(1 << 40)
    MadeRun(tmp_path / "run").started().supervised(GONE).beat(0, GONE, "step", 40)
    MadeRun(tmp_path / "torchrun").started(world_size=2).beat(0, GONE, "step", 40).record("failed", "reset", 1)
    code = (
        "import sys\nfrom shared.cli import cli\n"
        f"cli.main(['status', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'transformers', 'zarr', 'duckdb', 'numpy', 'rich'} & set(sys.modules)))"
    )

    # Processor seconds, because other tests run beside this one: alone it is the wall time. They slow a core down, too.
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stdout.splitlines()[-1] == "heavy: []"
        assert "blocks: 30,000" in done.stdout
        assert "[folder]  train lost" in done.stdout
        assert f"more: dflash why {tmp_path / 'torchrun'}" in done.stdout
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert least_of_three(seconds, 1.0) < 1.0


def test_what_may_not_be_read_and_what_may_not_be_written(tmp_path: Path) -> None:
    """As another user: a folder of somebody else's is shown, one that is closed is said to be."""
    for name in ("open", "closed"):
        MadeRun(tmp_path / name).started().supervised(GONE).beat(0, GONE, "step", 40)
    (tmp_path / "closed" / "manifest").chmod(0o700 if os.geteuid() == 0 else 0)
    for folder in (tmp_path, *tmp_path.parents[:3]):  # pytest's own folders: two levels, three under xdist
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        said = json.dumps({Path(row.folder).name: [row.state, row.message] for row in statuses([tmp_path])})
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:  # noqa: PTH123 - a descriptor
        rows = json.load(pipe)
    os.waitpid(child, 0)
    (tmp_path / "closed" / "manifest").chmod(0o755)
    assert rows["open"][0] == "lost"
    assert rows["closed"][0] == "unreadable"
    assert "Permission denied" in rows["closed"][1]
