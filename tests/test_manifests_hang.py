"""Silence is judged by what the process does meanwhile; what may take its time raises no alarm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from manifests.hang import Hang, Look, grace_after_continue_s, hung, name_of
from manifests.hang_watch import Learned, RankWatch
from shared.beat import BeatState
from shared.kernel import TICKS_PER_S, Process
from shared.phases import FLOOR_S

SILENT = Look(phase="step", silent_s=70.0, limit_s=60.0, state="S", state_s=60.0, alive_s=0.5, cpu_share=0.0)


def look(**changes: object) -> Look:
    return replace(SILENT, **changes)  # type: ignore[arg-type]


NAMES = {
    "waits, the GIL free": (look(), "hang.wait"),
    "spins": (look(cpu_share=0.98, state="R"), "hang.busy"),
    "holds the GIL asleep": (look(alive_s=40.0), "hang.gil"),
    "holds the GIL and spins": (look(alive_s=40.0, cpu_share=1.0, state="R"), "hang.gil"),
    "stopped": (look(state="T", state_s=4.0, alive_s=4.0), "hang.stopped"),
    "traced": (look(state="t", state_s=4.0), "hang.stopped"),
    "stopped just now": (look(state="T", state_s=1.0), None),
    "in the kernel": (look(state="D", state_s=5.0, alive_s=30.0), "hang.io"),
    "in the kernel, other threads live": (look(state="D", state_s=5.0), "hang.io"),
    "in the kernel for a moment": (look(state="D", state_s=0.1), None),
    "never came to its work": (look(phase="rendezvous"), "hang.startup"),
    "never reported": (look(phase="spawn", alive_s=None), "hang.startup"),
    "imports with the GIL held": (look(phase="import", alive_s=50.0), "hang.gil"),
    "a sign of life due": (look(alive_s=2.0), None),
    "the last sign of life is from before the silence": (look(silent_s=1.24, limit_s=1.2, alive_s=1.49), None),
    "a sign of life in a short silence": (look(silent_s=1.9, limit_s=1.2, alive_s=0.4), "hang.wait"),
    "no sign of life in a short silence": (look(silent_s=2.9, limit_s=1.2, alive_s=3.1), "hang.gil"),
    "CPU not known yet": (look(cpu_share=None), None),
    "just dead": (look(state="Z", state_s=0.3), None),
    "dead, but the kernel holds a thread of it": (look(state="Z", state_s=5.0), "hang.io"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_silent_rank_is_named_by_the_table(what: str) -> None:
    seen, name = NAMES[what]
    assert name_of(seen) == name
    found = hung({0: seen})
    assert found == (None if name is None else Hang(0, name, {0: name}))


def test_within_its_limit_nothing_is_a_hang() -> None:
    assert hung({0: look(silent_s=59.0, alive_s=50.0)}) is None
    assert hung({0: look(limit_s=math.inf, phase="wait for room")}) is None


TOGETHER = {
    "the one that holds the GIL": ({0: look(), 1: look(silent_s=69.0, alive_s=60.0), 2: look()}, 1),
    "the one that spins": ({0: look(silent_s=80.0), 1: look(cpu_share=1.0)}, 1),
    "the one that is stopped, though its own limit is far": (
        {0: look(), 1: look(phase="checkpoint", silent_s=20.0, limit_s=180.0, state="T", state_s=20.0)}, 1,
    ),
    "the longest silent of those that only wait": ({0: look(), 1: look(silent_s=75.0), 2: look()}, 1),
    "nobody while another may still save": (
        {0: look(phase="checkpoint", silent_s=20.0, limit_s=180.0, cpu_share=0.9), 1: look()}, None,
    ),
    "nobody while another may still save and this one spins, for a GPU or for nothing": (
        {0: look(phase="checkpoint", silent_s=20.0, limit_s=180.0), 1: look(cpu_share=1.0)}, None,
    ),
    "nobody while another still moves in the same step": (
        {0: look(silent_s=1.0, cpu_share=1.0), 1: look(silent_s=75.0)}, None,
    ),
    "whoever stopped moving long after the others did": (
        {0: look(silent_s=61.0, cpu_share=1.0), 1: look(silent_s=300.0)}, 0,
    ),
    "whoever did not come to the rendezvous": (
        {0: look(phase="rendezvous", silent_s=90.0), 1: look(phase="import", silent_s=80.0)}, 1,
    ),
    "nobody while the others are about to be over it too": (
        {0: look(silent_s=60.5), 1: look(silent_s=59.9, cpu_share=1.0)}, None,
    ),
    "whoever is not at the step for which the others wait": (
        {0: look(silent_s=1805.0), 1: look(phase="compile", silent_s=1803.0, limit_s=1800.0), 2: look(silent_s=1804.0)},
        1,
    ),
    "whoever waits for one whose checkpoint is over its limit": (
        {0: look(phase="checkpoint", silent_s=200.0, limit_s=180.0), 1: look(silent_s=199.0)}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("who", TOGETHER)
def test_of_ranks_that_wait_for_each_other_the_culprit_is_named(who: str) -> None:
    looks, rank = TOGETHER[who]
    found = hung(looks)
    assert (None if found is None else found.rank) == rank


def test_grace_after_a_continue_is_one_more_limit() -> None:
    assert grace_after_continue_s(60.0, 1.0) == 60.0
    assert grace_after_continue_s(0.5, 0.02) == 2.0
    assert grace_after_continue_s(math.inf, 1.0) == 10.0


def beat(reported: float, phase: str = "step", since: float = 0.0, alive: float = 0.0) -> BeatState:
    return BeatState(pid=1, phase=phase, phase_since=since, reported=reported, alive=alive or reported, alive_count=1)


def process(state: str = "S", ticks: int = 0) -> Process:
    return Process(start_ticks=1, state=state, cpu_ticks=ticks, rss=0, session=1, parent=0)


def test_a_limit_learns_from_the_longest_silence_that_ended_well() -> None:
    watch, learned = RankWatch(0.0), Learned()
    for now in (1.0, 31.0, 32.0):  # a step of 30 s
        watch.see(beat(now), process(), now, learned)
    assert learned.longest_gap == {"step": 30.0}
    assert watch.look(33.0, learned, 1.0).limit_s == 150.0
    assert watch.look(33.0, learned, 0.1).limit_s == pytest.approx(15.0)
    assert watch.look(33.0, learned, 0.0).limit_s == math.inf
    watch.see(beat(40.0, "checkpoint", 40.0), process(), 40.0, learned)
    watch.see(beat(240.0, "step", 240.0), process(), 240.0, learned)
    assert learned.longest == {"step": 40.0, "checkpoint": 200.0}
    assert RankWatch(0.0).look(1.0, learned, 1.0).limit_s == FLOOR_S["spawn"]


def test_what_was_not_seen_or_stood_still_is_forgiven() -> None:
    watch, learned = RankWatch(0.0), Learned()
    watch.see(beat(10.0), process(), 10.0, learned)
    assert watch.look(100.0, learned, 1.0).over
    watch.forgive(99.0)
    seen = watch.look(100.0, learned, 1.0)
    assert (seen.silent_s, seen.over) == (1.0, False)


@pytest.mark.parametrize("how", ["stopped", "forgiven"])
def test_an_hour_that_was_forgiven_teaches_nothing(how: str) -> None:
    watch, learned = RankWatch(0.0), Learned()
    watch.see(beat(10.0), process(), 10.0, learned)
    watch.see(beat(10.0), process("T" if how == "stopped" else "S"), 11.0, learned)
    if how == "forgiven":
        watch.forgive(3610.0)
    watch.see(beat(3611.0), process(), 3611.0, learned)
    watch.see(beat(3612.0, "checkpoint", 3612.0), process(), 3612.0, learned)
    assert learned.longest_gap["step"] <= 1.0
    assert learned.longest["step"] <= 2.0


@pytest.mark.parametrize(
    ("state", "ticks_per_s", "busy"),
    [("R", TICKS_PER_S, True), ("S", 0, False), ("R", TICKS_PER_S * 0.3, True), ("S", TICKS_PER_S, True)],
)
def test_a_busy_loop_on_crowded_cores_is_busy(state: str, ticks_per_s: float, busy: bool) -> None:
    watch, learned = RankWatch(0.0), Learned()
    for now in range(70):
        watch.see(beat(1.0, alive=now), process(state, int(ticks_per_s * now)), float(now), learned)
    share = watch.look(69.0, learned, 1.0).cpu_share
    assert share is not None
    assert (share >= 0.5) == busy
