"""What supervision promises in numbers: seconds from a death to event and verdict, megabytes, share of a step."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from fault_run import Expect, Live, Scenario, made_ready

from manifests.benchmarks.supervision import cost_of_calls, watch_a_supervisor
from shared.beat import read_beat
from shared.phases import SCALE_VARIABLE
from shared.reporter import progress_path

pytestmark = pytest.mark.crash

KILLS = 20
"""Over three workers: the tenth start of one within half an hour is a storm."""
NOTHING = Expect(code="user.stop")


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has the limits that its test gives it."""
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)


def long_run(folder: Path, world: int, **spec: object) -> Live:
    """An extraction of toy workers that would go on for minutes; each saves something new within moments."""
    scenario = Scenario(
        name="promises", expect=NOTHING, fault="", roles=("extract",), world=world, plan={"steps": 20_000}, spec=spec
    )
    live = made_ready(scenario, "step", 0, folder)
    live.start()
    return live


def saved(live: Live, rank: int) -> float:
    """What a rank's process has made durable; 0 before it says so."""
    beat = read_beat(progress_path(live.run_dir, live.plan.role, rank))
    return (beat.saved or 0.0) if beat is not None and beat.phase in ("step", "checkpoint") else 0.0


def test_a_death_is_on_record_within_a_second_and_judged_within_five(tmp_path: Path) -> None:
    live = long_run(tmp_path / "run", 3, restarts=3, hang_limit_scale=0.1)
    dice = random.Random(5)
    killed: list[tuple[int, float]] = []
    try:
        before = dict.fromkeys(range(3), 0.0)
        for number in range(KILLS):
            rank = number % 3
            assert live.wait(lambda rank=rank: saved(live, rank) > before[rank], 60, f"progress of worker {rank}")
            time.sleep(dice.uniform(0.0, 0.1))
            before[rank] = saved(live, rank)
            beat = read_beat(progress_path(live.run_dir, live.plan.role, rank))
            assert beat is not None
            killed.append((beat.pid, time.monotonic()))
            os.kill(beat.pid, signal.SIGKILL)
        assert live.wait(lambda: len(live.events("verdict")) == KILLS, 60, "all verdicts")
    finally:
        live.end_everything()
    deaths = {event["detail"]["pid"]: event["detail"] for event in live.events("worker ended")}
    verdicts = live.events("verdict")
    to_event = sorted(deaths[pid]["mono"] - at for pid, at in killed)
    said = [(v["detail"]["verdict"]["code"], v["detail"]["verdict"]["confidence"]) for v in verdicts]
    assert said == [("sig.kill.external", "proved")] * KILLS
    moments = [
        min(v["detail"]["mono"] for v in verdicts if v["detail"]["mono"] > deaths[pid]["mono"]) - at
        for pid, at in killed
    ]
    assert to_event[-1] <= 1.0, to_event
    assert max(moments) <= 5.0, sorted(moments)


def test_a_stopped_process_is_named_within_ten_seconds_at_the_usual_limits(tmp_path: Path) -> None:
    live = long_run(tmp_path / "run", 2)
    try:
        assert live.wait(lambda: saved(live, 1) > 0, 60, "work")
        pid = live.worker(1)
        live.send(pid, signal.SIGSTOP)
        stopped = live.acted
        assert stopped is not None
        assert live.wait(lambda: bool(live.events("hang")), 60, "a name for the stopped process")
        hang = live.events("hang")[0]["detail"]
        assert (hang["code"], hang["rank"], hang["action"]) == ("hang.stopped", 1, "named")
        assert hang["mono"] - stopped <= 10.0
        found = live.judged()
        assert (found.code, found.ranks) == ("running", (1,))  # nothing is killed for it
        assert f"kill -CONT {pid}" in f"{found.sentence} {found.evidence}"
        live.send(pid, signal.SIGCONT)
        reached = saved(live, 1)
        assert live.wait(lambda: saved(live, 1) > reached, 60, "going on")
    finally:
        live.end_everything()


@pytest.mark.slow
def test_watching_is_small_and_cheap(tmp_path: Path) -> None:
    """40 MB, and a thousandth of a step of a quarter second: the report of a step and the supervisor's own time."""
    calls = cost_of_calls(tmp_path)
    watched = watch_a_supervisor(tmp_path / "run", workers=8, seconds=6.0)
    assert watched["peak"] <= 40e6, watched
    share = calls["report"] / 0.25 + calls["alive"] + watched["share"] / 8
    assert share <= 0.001, (calls, watched)
