"""Status tells running from finished from lost, from files and the kernel's lock alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.commit import Ledger, read
from manifests.records import RunRecord, ShardRecord
from manifests.runs import is_owned, recorded
from manifests.status import status_of, statuses
from shared.errors import DiskFull, Interrupted

ENDINGS = [
    (DiskFull("full"), "failed", 41),
    (Interrupted("stop"), "interrupted", 75),
    (KeyboardInterrupt(), "interrupted", 75),
    (ZeroDivisionError("bug"), "failed", 1),
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
        ledger.append(ShardRecord(block=block, rank=0, documents=2, tokens=50, bytes=500, seconds=1.0))
    (status,) = statuses([tmp_path])
    assert (status.kind, status.state, status.holds["blocks"], status.holds["tokens"]) == (
        "store",
        "failed",
        "2/3",
        100,
    )


def test_json_output(tmp_path: Path) -> None:
    Ledger(tmp_path / "run", "w").append(RunRecord(run_id="a", command="train", state="finished", exit_code=0))
    done = subprocess.run(
        [sys.executable, "-m", "shared", "status", str(tmp_path), "--json"], capture_output=True, text=True, check=True
    )
    (row,) = json.loads(done.stdout)
    assert (row["command"], row["state"]) == ("train", "finished")
