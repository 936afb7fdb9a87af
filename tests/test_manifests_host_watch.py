"""An OOM kill that was counted explains one death, and only one that came soon after."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from manifests import host_watch
from manifests.host_watch import HostWatch
from shared.kernel import Kernel
from shared.ring import read_ring
from shared.samples import samples_path


def kernel(root: Path, kills: int) -> Kernel:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "vmstat").write_text(f"nr_free_pages 1\noom_kill {kills}\n")
    return Kernel(root)


def moved(watch: HostWatch, *, killed: bool = True) -> int:
    facts = watch.at_death(killed=killed)
    return int(facts["oom_after"]["vmstat"] - facts["oom_before"]["vmstat"])


def test_each_kill_is_used_up_by_one_death(tmp_path: Path) -> None:
    watch = HostWatch(kernel(tmp_path, 3), None)
    assert moved(watch) == 0
    kernel(tmp_path, 5)
    assert moved(watch, killed=False) == 2  # an exception is no OOM kill: it uses up nothing
    assert [moved(watch), moved(watch), moved(watch)] == [2, 1, 0]


def test_what_was_counted_before_an_attempt_says_nothing_about_it(tmp_path: Path) -> None:
    watch = HostWatch(kernel(tmp_path, 3), None)
    kernel(tmp_path, 4)
    watch.since(time.monotonic())
    assert moved(watch) == 0


def test_a_kill_of_minutes_ago_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "_BEFORE_S", 0.05)
    monkeypatch.setattr(host_watch, "SAMPLE_EVERY_S", 3600.0)  # however long this machine pauses between two ticks
    (tmp_path / "run").mkdir()
    watch = HostWatch(kernel(tmp_path, 3), tmp_path / "run")
    kernel(tmp_path, 4)
    time.sleep(0.1)
    assert watch.tick({})
    assert not watch.tick({})
    assert moved(watch) == 0
    watch.close()
    (sample,) = read_ring(samples_path(tmp_path / "run"))
    assert sample["oom"]["vmstat"] == 4
