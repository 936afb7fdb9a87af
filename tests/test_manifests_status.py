"""Status tells running from finished from lost, from files and the kernel's lock alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.commit import Ledger, files_of, read
from manifests.query import ask
from manifests.records import RunRecord, ShardRecord
from manifests.runs import is_owned, recorded
from manifests.status import status_of, statuses
from shared.errors import CheckpointMismatch, ConfigRefused, DiskFull, Interrupted, NonFinite, RunBusy

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
    assert "run the same command again" in status.message


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
