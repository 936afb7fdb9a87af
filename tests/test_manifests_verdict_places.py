"""Where and when a run was, seen from where one asks: no reboot, restart or death that nothing here can show."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import MadeRun
from verdict_night import BOOT, HOST, PID1, START, WALL, Night

from manifests.evidence import Evidence, collect
from manifests.run_picture import open_run
from manifests.verdict import Verdict, verdict

HOST_NAMESPACE = "pid:[4026531836]"


def night(share: float = 0.41, available: float = 0.6) -> Night:
    """A run of two ranks whose last sign is 30.4 s after its start."""
    made = Night()
    made.sampled(30, share, available)
    made.beating(30.4)
    return made


def seen(**now: Any) -> Verdict:
    return verdict(night().evidence(**now))


# Several machines, no supervisor.


def two_nodes(younger: tuple[int, ...] = (0, 1)) -> Night:
    """torchrun over two nodes, of which one has been up for 100 s and the other for 5000: rank 3 fails, 2 is killed."""
    made = Night(ranks=4, supervised=False)
    made.beating(30.0)
    for rank in younger:
        beat = made.beats[rank]
        moved = {name: getattr(beat, name) - START + 100.0 for name in ("reported", "alive", "phase_since")}
        made.beats[rank] = replace(beat, **moved)
    note = {"number": 15, "name": "SIGTERM", "sender_pid": 70, "sender_command": "python bin/torchrun x"}
    for rank in (0, 1):
        made.ending(33.0, rank, "Interrupted", "stopped at step 1204", 75, signal=note)
    made.ending(30.1, 3, "ValueError", "ValueError: shapes differ")
    return made


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3)])
def test_on_the_younger_of_two_nodes_no_reboot_is_seen(ranks: tuple[int, ...]) -> None:
    made = two_nodes(ranks)
    younger = {"mono": 160.0, "boot_id": "boot-b", "boot_time": WALL - 100.0}
    found = verdict(made.evidence(at=60, **younger))
    assert (found.code, found.ranks, found.confidence) == ("py.exception", (3,), "likely")
    assert "shapes differ" in found.sentence


def test_a_reboot_without_a_supervisor_is_told_by_the_clock_and_the_boot() -> None:
    made = two_nodes(younger=())
    rebooted = {"mono": 20.0, "boot_id": "boot-b", "boot_time": WALL + 40.0}
    assert verdict(made.evidence(at=60, **rebooted)).code == "host.reboot"
    unknown = {"mono": 20.0, "boot_id": "boot-b", "boot_time": None}
    assert verdict(made.evidence(at=60, **unknown)).code == "py.exception", "without the boot's time it is not known"


def test_only_the_clock_of_a_rank_that_lives_here_is_compared() -> None:
    made = two_nodes()
    made.endings.clear()
    states = {"alive_ranks": (0, 1), "rank_states": {0: "R", 1: "R"}, "owned": True}
    evidence = made.evidence(at=40, mono=140.0, boot_id="boot-b", boot_time=WALL - 100.0, **states)
    _, _, picture = open_run(evidence)
    assert [round(rank.silent_s) for rank in picture.ranks] == [10, 10, 10, 10]


# Another machine of the same name.


def test_a_namesake_that_was_up_while_the_run_lived_is_another_machine() -> None:
    namesake = {
        "boot_id": "boot-b",
        "supervisor_alive": None,
        "owned": None,
        "boot_time": WALL - 9000.0,
        "mono": 9060.0,
    }
    late = seen(at=120, **namesake)
    assert (late.code, late.confidence) == ("unknown", "unknown")
    assert f"another host with the name {HOST}" in late.sentence
    fresh = night().evidence(at=60, **namesake)
    assert (verdict(fresh).code, verdict(fresh).confidence) == ("running", "likely")
    assert open_run(fresh)[0] == "running"
    assert open_run(night().evidence(at=120, **namesake))[0] == "unknown", "never lost: it cannot be seen from here"
    for began in (WALL - 20.0, WALL + 40.0):  # clocks agree to a minute
        assert seen(at=120, **{**namesake, "boot_time": began}).code == "host.reboot"


# Containers.


def container(begun: float, then: str = "pid:[4026532001]", **now: Any) -> Verdict:
    made = night()
    made.events[0]["detail"]["pid_ns"] = then
    here: dict[str, Any] = {"supervisor_alive": None, "pid_ns": "pid:[4026532777]", "pid1_start": int(begun * 100)}
    return verdict(made.evidence(at=90_000, **(here | now)))


def test_a_container_that_began_while_the_run_lived_is_another_one() -> None:
    found = container(START + 20)
    assert (found.code, found.confidence) == ("unknown", "unknown")
    assert "another container" in found.sentence
    assert container(START + 29).code == "container.restart", "within three seconds of the last sign"


@pytest.mark.parametrize(("after", "confidence"), [(5.0, "proved"), (300.0, "proved"), (3600.0, "likely")])
def test_a_restart_of_the_container_is_proved_only_soon_after(after: float, confidence: str) -> None:
    found = container(START + 30.4 + after)
    assert (found.code, found.confidence) == ("container.restart", confidence)


def test_a_container_whose_beginning_cannot_be_read_is_only_likely() -> None:
    found = container(0.0, pid1_start=None)
    assert (found.code, found.confidence) == ("container.restart", "likely")


def test_a_run_of_the_host_itself_is_not_restarted_with_a_container() -> None:
    found = container(START + 40, HOST_NAMESPACE)
    assert (found.code, found.confidence) == ("unknown", "unknown")
    assert "on the host itself" in found.sentence
    assert "container" in found.sentence
    same = container(START + 40, HOST_NAMESPACE, pid_ns=HOST_NAMESPACE, pid1_start=PID1)
    assert same.code == "tree.killed"


# Memory of the host, when everything vanished.


@pytest.mark.parametrize(
    ("available", "code", "excluded"),
    [(0.6, "tree.killed", True), (0.19, "tree.killed", False), (0.09, "tree.oom_group", False)],
)
def test_a_scope_without_a_limit_is_judged_by_the_host(available: float, code: str, excluded: bool) -> None:
    made = night(available=available)
    for sample in made.samples:
        sample["memory"]["max"] = None
    found = verdict(made.evidence())
    assert found.code == code
    assert any("lack of memory" in line for line in found.excluded) is excluded
    assert ("memory was not the reason" in found.sentence) is excluded
    assert found.confidence == ("proved" if excluded else "likely")


def test_why_a_tree_vanished_names_the_host_that_was_short() -> None:
    assert "the host had 8.0% of its memory left" in verdict(night(available=0.08).evidence()).sentence


# The last sign of life.


def compiling(at: float, **beat: Any) -> Evidence:
    """A run without a supervisor: its last report 30 s after the start, its heart beating until `at`; asked at 1000."""
    made = Night(supervised=False)
    made.beating(30.0, "compile")
    made.beats = {rank: replace(state, alive=START + at, **beat) for rank, state in made.beats.items()}
    return made.evidence(at=1000, host="login1", boot_id="boot-b", boot_time=WALL - 9e5, mono=9e5, owned=None)


def test_a_heart_that_beats_in_a_long_compile_is_a_sign_of_life() -> None:
    evidence = compiling(990.0)
    assert evidence.last_time == WALL + 990
    assert verdict(evidence).code == "running"
    state, sentence, picture = open_run(evidence)
    assert (state, picture.last_sign_s) == ("running", 10.0)
    assert "gone" not in sentence


def test_reports_that_change_nothing_do_not_make_a_sign_later_than_it_was() -> None:
    waiting = compiling(900.0, reported=START, time=WALL + 900)
    assert waiting.last_time == WALL + 900
    assert compiling(900.0, reported=START, time=WALL + 900, started=0.0).last_time == WALL + 1800, "one clock only"
    assert compiling(0.0, alive_count=0).last_time == WALL + 30, "no liveness thread: the report itself"


def test_a_run_of_another_host_is_not_called_gone() -> None:
    evidence = compiling(100.0)
    found = verdict(evidence)
    assert (found.code, found.confidence) == ("unknown", "unknown")
    said = " ".join((found.sentence, *found.evidence, *found.cascade))
    assert "is gone" not in said
    assert "lives no more" not in said
    assert "login1" in found.sentence
    assert "is gone" in verdict(replace(evidence, now=replace(evidence.now, host=HOST, boot_id=BOOT))).sentence


def test_a_real_heartbeat_counts_with_its_liveness(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, ago=500).started()
    run.ago = 100
    run.beat(0, 1, "compile", 0, silent_s=300)
    last = collect(tmp_path).last_time
    assert last is not None
    assert 95 < time.time() - last < 110, "its report is 400 s old, its heart beat on for 300 s"
