"""What a loop reports: when it counts as progress, who shares a heartbeat, and several beats as one line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_shared_beat import MOST_S, seconds_each

from shared.beat import BeatState, read_beat
from shared.errors import PathNotWritable
from shared.progress import combine, line
from shared.reporter import Reporter, Ticks, progress_path


def beat_of(run_dir: Path, rank: int = 0) -> BeatState:
    found = read_beat(progress_path(run_dir, "toy", rank))
    assert found is not None
    return found


def test_ticks_are_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.4, 0.9, 1.0, 1.5, 2.1, 2.2])
    monkeypatch.setattr("shared.reporter.time.monotonic", lambda: next(clock))
    told: list[float] = []
    tick = Ticks(told.append)
    for _ in range(6):
        tick()
    assert told == [3, 5]


def test_only_what_moves_counts_as_progress(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, "toy", 0)
    reporter.update("step", 3, 10, "steps")
    first = beat_of(tmp_path)
    assert (first.phase, first.done, first.total, first.unit, first.first) == ("step", 3, 10, "steps", 3)
    reporter.update("step", 3, 10, "steps", loss=1.0)
    same = beat_of(tmp_path)
    assert same.reported == first.reported
    assert same.numbers == {"loss": 1.0}
    moved = []
    for change in (
        lambda: reporter.update("step", 4, 10, "steps"),
        lambda: reporter.inner(1),
        lambda: reporter.inner(2),
        lambda: reporter.update("eval", 4, 10, "steps"),
        lambda: reporter.update("eval", 4, 10, "steps", inner=1),
    ):
        time.sleep(0.002)
        change()
        moved.append(beat_of(tmp_path).reported)
    assert sorted(set(moved)) == moved
    last = beat_of(tmp_path)
    assert last.phase_since > first.phase_since
    assert last.first == 4


def test_saved_is_kept_and_is_no_progress_of_the_phase(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, "toy", 0)
    reporter.update("checkpoint", 4, 10, "steps")
    before = beat_of(tmp_path)
    assert before.saved is None
    reporter.saved(4)
    after = beat_of(tmp_path)
    assert (after.saved, after.reported) == (4, before.reported)
    reporter.update("step", 5, 10, "steps")
    assert beat_of(tmp_path).saved == 4


def test_reports_of_several_threads_do_not_tear(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, "toy", 0)
    reporter.update("step", 0, None, "steps")

    def tell(thread: int) -> None:
        for i in range(300):
            reporter.inner(thread * 1000 + i)

    threads = [threading.Thread(target=tell, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        beat_of(tmp_path)
    assert beat_of(tmp_path).sequence == 1 + 4 * 300


def test_the_process_has_one_beat_and_says_that_it_lives(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from shared.beat import read_beat
from shared.reporter import Reporter, progress_path
folder = Path({str(tmp_path)!r})
own = Reporter(folder, "toy", 0)
own.adopt()
own.update("import", 0, None, "modules")
own.saved(3)
Reporter(folder, "toy", 0).update("step", 1, 5, "steps")
Reporter(folder, "toy", 1).update("step", 2, 5, "steps")
while read_beat(progress_path(folder, "toy", 0)).alive_count < 2:
    time.sleep(0.01)
os._exit(0)  # before the third sign of life, a second later
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, env={"DFLASH_ATTEMPT": "3"}, timeout=60)
    assert time.monotonic() - began > 1.0, "one a second"
    found, other = beat_of(tmp_path), beat_of(tmp_path, 1)
    assert (found.sequence, found.phase, found.saved, found.attempt) == (3, "step", 3, 3)
    assert found.alive_count == 2
    assert found.pid > 0 < found.start_ticks
    assert (other.sequence, other.saved, other.alive_count) == (1, None, 0)


def test_a_report_costs_microseconds(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, "toy", 0)
    shown = {"loss": 1.23456, "tokens/block": 3.21, "tokens/s": 123456.7, "held-out": 3.3}
    steps = iter(range(10**6))
    assert seconds_each(lambda: reporter.update("step", next(steps), 10**6, "steps", **shown)) < MOST_S
    assert seconds_each(lambda: reporter.saved(1)) < MOST_S / 4


def state(**changes: object) -> BeatState:
    given = {"phase": "step", "done": 30.0, "first": 10.0, "total": 100.0, "unit": "steps", "time": 110.0}
    return BeatState(**{**given, "started": 100.0, **changes})  # type: ignore[arg-type]


def test_ranks_in_step_are_shown_by_the_first_and_workers_of_their_own_are_added_up() -> None:
    assert combine([], summed=True) is None
    one = combine([state(numbers={"loss": 2.0}), state(done=29.0)], summed=False)
    assert one is not None
    assert (one.done, one.total, one.rate, one.eta_s, one.numbers) == (30, 100, 2.0, 35.0, {"loss": 2.0})
    both = combine([state(), state(done=20.0, total=None)], summed=True)
    assert both is not None
    assert (both.done, both.total, both.rate) == (50, None, 3.0)
    assert "step 50 steps" in line("toy", both)


def test_a_worker_that_is_done_does_not_hide_the_others_phase() -> None:
    loading = state(phase="load", unit="bytes", done=5.0, total=9.0, started=105.0)
    shot = combine([state(phase="done"), loading], summed=True)
    assert shot is not None
    assert (shot.phase, shot.done, shot.total) == ("load", 5, 9)


def test_where_a_reporter_is(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, "toy", 0)
    assert reporter.where == ("", 0.0, None, "")
    reporter.update("load", 5, 9, "bytes")
    assert reporter.where == ("load", 5, 9, "bytes")


def test_a_place_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(PathNotWritable, match="progress"):
        Reporter(tmp_path / "run", "toy", 0)
