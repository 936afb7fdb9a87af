"""Records: whole or absent, from many processes, in the order of their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.commit import Ledger, damaged_lines, files_of, latest, read
from manifests.records import KINDS, EventRecord, MetricRecord, RunRecord, columns_of
from manifests.run_order import in_order, newest_place


def test_append_and_read_in_order(tmp_path: Path) -> None:
    for rank in (1, 0):
        Ledger(tmp_path, f"r{rank}").append(EventRecord(run_id="a", event=f"rank {rank} é"))
    assert [record["event"] for record in read(tmp_path, "events")] == ["rank 1 é", "rank 0 é"]
    assert len(files_of(tmp_path, "events")) == 2


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_torn_last_line_costs_itself_only(tmp_path: Path, cut: int) -> None:
    ledger = Ledger(tmp_path, "w")
    for step in (1, 2):
        ledger.append(MetricRecord(run_id="a", global_step=step, split="train", name="loss", value=step / 2))
    path = files_of(tmp_path, "metrics")[0]
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["global_step"] for record in read(tmp_path, "metrics")] == ([1, 2] if cut == 1 else [1])
    ledger.append(MetricRecord(run_id="a", global_step=3, split="train", name="loss", value=0.0))
    assert [record["global_step"] for record in read(tmp_path, "metrics")] == ([1, 2, 3] if cut == 1 else [1, 3])
    assert damaged_lines(tmp_path, "metrics") == [], "a kill is no damage"


def test_runs_are_in_the_order_of_their_files_lines_whatever_the_clock_says(tmp_path: Path) -> None:
    def run(run_id: str, *lines: tuple[float, str], after: float | None = None) -> list[dict[str, Any]]:
        detail = {} if after is None else {"after": after}
        return [{"run_id": run_id, "time": time, "state": state, "detail": detail} for time, state in lines]

    def order(*runs: list[dict[str, Any]]) -> list[str]:
        return [f"{r['run_id']} {r['state']}" for r in in_order([record for found in runs for record in found])]

    back = run("b", (50.0, "started"), (20.0, "failed"))  # set right while it ran
    assert order(back) == ["b started", "b failed"]
    later = run("a", (30.0, "started"), (35.0, "failed"), after=newest_place(back))
    last = run("0", (40.0, "started"), after=newest_place([*later, *back]))
    assert order(last, later, back) == ["b started", "b failed", "a started", "a failed", "0 started"]
    beside = run("c", (60.0, "started"), (70.0, "finished"))
    assert order(beside, back, run("d", (65.0, "started"))) == [
        "b started", "b failed", "c started", "d started", "c finished",
    ]  # fmt: skip
    for junk in ("x", None, [1.0], True):
        (record,) = run("e", (1.0, "started"))
        assert in_order([record | {"detail": {"after": junk}}, record | {"detail": junk}])
    assert newest_place([]) is None


def test_a_damaged_line_is_named_and_void(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w")
    for step in (1, 2, 3):
        ledger.append(MetricRecord(run_id="a", global_step=step, split="train", name="loss", value=step / 2))
    path = files_of(tmp_path, "metrics")[0]
    path.write_bytes(path.read_bytes().replace(b'"value":1.0', b'"value":9.0'))
    assert [record["value"] for record in read(tmp_path, "metrics")] == [0.5, 1.5]
    ((where, number, reason),) = damaged_lines(tmp_path, "metrics")
    assert (where, number) == (path, 2)
    assert "its bytes give" in reason
    assert damaged_lines(tmp_path, "events") == []


def test_no_two_records_of_a_process_have_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0, 5.0, 4.0, 4.0, 6.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    ledger = Ledger(tmp_path, "w")
    for event in "abcde":
        ledger.append(EventRecord(run_id="a", event=event))
    times = [record["time"] for record in read(tmp_path, "events")]
    assert len(set(times)) == 5
    assert [record["event"] for record in read(tmp_path, "events")] == list("abcde")


def test_one_append_is_one_write_and_then_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, "w")
    ledger.append(EventRecord(run_id="a", event="first"))
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("write", "fsync")}

    def spy(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real[name](*arguments)

        return call

    for name in real:
        monkeypatch.setattr(os, name, spy(name))
    ledger.append(*(EventRecord(run_id="a", event=str(n)) for n in range(100)))
    assert calls == ["write", "fsync"]


def test_a_non_finite_number_is_refused_not_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w")
    with pytest.raises(ValueError):
        ledger.append(MetricRecord(run_id="a", global_step=1, split="train", name="loss", value=float("nan")))
    assert read(tmp_path, "metrics") == []


@pytest.mark.crash
def test_kill_while_appending_leaves_whole_records(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from manifests.commit import Ledger
from manifests.records import EventRecord
ledger = Ledger(Path(sys.argv[1]), "w")
step = 0
while True:
    ledger.append(EventRecord(run_id="a", event=str(step), message="x" * 5000))
    print(step, flush=True)
    step += 1
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(30)]
        child.kill()
        said += [int(line) for line in child.stdout.read().split()]
    found = [int(record["event"]) for record in read(tmp_path, "events")]
    assert found[: len(said)] == said, "an acknowledged record is missing"
    assert len(found) <= len(said) + 1


def test_latest_wins() -> None:
    records = [{"block": 1, "n": 1}, {"block": 2, "n": 2}, {"block": 1, "n": 3}]
    assert latest(records, "block") == {1: {"block": 1, "n": 3}, 2: {"block": 2, "n": 2}}


def test_columns_follow_the_declarations() -> None:
    assert columns_of("runs")["exit_code"] == "BIGINT"
    assert columns_of("runs")["detail"] == "JSON"
    assert columns_of("evaluations")["plain_tokens_per_second"] == "DOUBLE"
    assert all(list(columns_of(kind))[:3] == ["folder", "writer", "time"] for kind in KINDS)


def test_record_lines_are_plain_json(tmp_path: Path) -> None:
    Ledger(tmp_path, "w").append(
        RunRecord(run_id="a", command="train", state="started", detail={"config": {"steps": 3}})
    )
    line = files_of(tmp_path, "runs")[0].read_text().splitlines()[0]
    assert json.loads(line)["detail"] == {"config": {"steps": 3}}
