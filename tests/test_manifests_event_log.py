"""An event is never lost to a disk that refuses it for a while, and never ends the run that it is about."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from manifests import event_log
from manifests.commit import read
from manifests.event_log import EventLog
from shared.ring import read_ring
from shared.samples import events_path


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read(folder, "events") if record["run_id"] == "r"]


def test_events_are_in_the_ledger_and_in_the_ring(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "r", "boot")
    log.write("attempt started", attempt=1)
    log.write("verdict", "rank 0 is gone", attempt=1, number=math.nan, path=Path("x"))
    written, ring = ledger(tmp_path), read_ring(events_path(tmp_path))
    assert [e["event"] for e in written] == [e["event"] for e in ring] == ["attempt started", "verdict"]
    assert [e["detail"] for e in written] == [e["detail"] for e in ring]
    detail = written[1]["detail"]
    assert (detail["n"], detail["boot"], detail["number"], detail["path"]) == (2, "boot", "nan", "x")
    assert written[0]["detail"]["mono"] < detail["mono"]


def test_what_the_disk_refuses_waits_in_order_and_the_ring_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_LOOK_EVERY_S", 0.0)
    log = EventLog(tmp_path, "r", "boot")
    log.write("attempt started")
    (tmp_path / "manifest").rename(tmp_path / "moved")
    (tmp_path / "manifest").write_text("a file where the folder was")
    log.write("worker ended", attempt=1)
    log.write("verdict", attempt=1)
    log.retry()
    (tmp_path / "manifest").unlink()
    (tmp_path / "moved").rename(tmp_path / "manifest")
    assert [e["event"] for e in ledger(tmp_path)] == ["attempt started"]
    in_ring = [e["event"] for e in read_ring(events_path(tmp_path))]
    assert in_ring == ["attempt started", "log degraded", "worker ended", "verdict"]
    log.retry()
    log.write("supervisor ended")
    names = [e["event"] for e in ledger(tmp_path)]
    assert names == ["attempt started", "worker ended", "verdict", "log degraded", "supervisor ended"]
    assert "cannot write" in ledger(tmp_path)[3]["detail"]["reason"]


def test_a_folder_without_a_place_for_anything_ends_nothing(tmp_path: Path) -> None:
    for name in ("manifest", "supervision"):
        (tmp_path / name).write_text("a file where the folder was")
    log = EventLog(tmp_path, "r", "boot")
    log.write("attempt started")
    log.retry()
    assert not events_path(tmp_path).exists()
