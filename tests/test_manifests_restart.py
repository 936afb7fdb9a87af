"""What failed is started again while it makes progress, a few times without, and never when that cannot help."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.hang import Hang
from manifests.judgement import Judged, judge
from manifests.restart import Attempt, Policy, decide, fingerprint
from manifests.team import Team
from manifests.worker_process import Exit

POLICY = Policy(restarts=3)


def attempts(*outcomes: str, every_s: float = 3600.0) -> list[Attempt]:
    """One failed attempt each: "+" saved something new, "p" was a pause, a letter is the fingerprint of one in vain."""
    return [
        Attempt(
            number=number + 1,
            started=number * every_s,
            ended=(number + 1) * every_s - 1,
            fingerprint=outcome.strip("+"),
            progressed="+" in outcome,
            paused=outcome == "p",
        )
        for number, outcome in enumerate(outcomes)
    ]


@pytest.mark.parametrize(
    "code",
    ["refused.mask_token_in_use", "data.nonfinite", "compile.contract", "data.corrupt", "user.stop", "progress.none"],
)
def test_what_would_end_the_same_way_is_not_tried_again(code: str) -> None:
    assert decide(attempts("a+"), code, POLICY).kind == "stop"


@pytest.mark.parametrize(
    "code",
    ["sig.kill.external", "sig.term.external", "py.exception", "hang.gil", "sig.kill.oom_cgroup", "unknown"],
)
def test_everything_else_is(code: str) -> None:
    assert decide(attempts("a"), code, POLICY).kind == "restart"
    assert decide(attempts("a"), code, Policy(restarts=0)).kind == "stop"


def test_delays_grow_with_failures_in_vain_and_shrink_for_tests() -> None:
    waits = [decide(attempts(*"abcdef"[:n]), "unknown", Policy(restarts=9)).delay_s for n in range(1, 7)]
    assert waits == [1, 5, 15, 45, 120, 120]
    assert decide(attempts("a", "b"), "unknown", Policy(restarts=9, hurry=0.02)).delay_s == pytest.approx(0.1)
    assert decide(attempts("a", "b", "c+"), "unknown", POLICY).delay_s == 1


def test_only_attempts_without_progress_use_up_restarts() -> None:
    assert decide(attempts(*"abc"), "unknown", POLICY).kind == "restart"
    assert decide(attempts(*"abcd"), "unknown", POLICY).kind == "stop"
    assert decide(attempts("a", "b", "c", "d+"), "unknown", POLICY).kind == "restart"
    assert decide(attempts(*["a+"] * 50), "unknown", POLICY).kind == "restart"


def test_the_same_failure_three_times_in_vain_has_its_own_code() -> None:
    policy = Policy(restarts=10)
    assert decide(attempts("a", "a"), "py.exception", policy).kind == "restart"
    found = decide(attempts("b", "a", "a", "a"), "py.exception", policy)
    assert (found.kind, found.code) == ("stop", "progress.none")
    assert decide(attempts("a", "b", "a", "a"), "py.exception", policy).kind == "restart"
    assert decide(attempts("a", "a+", "a", "a"), "py.exception", policy).kind == "restart"
    assert decide(attempts(*"abcd"), "py.exception", POLICY).code == ""  # the last verdict stands


def test_many_starts_within_half_an_hour_are_a_storm_even_with_progress() -> None:
    assert decide(attempts(*["a+"] * 9, every_s=60.0), "unknown", POLICY).kind == "restart"
    found = decide(attempts(*["a+"] * 10, every_s=60.0), "unknown", POLICY)
    assert (found.kind, found.code) == ("stop", "storm")
    assert decide(attempts(*["a+"] * 30, every_s=300.0), "unknown", POLICY).kind == "restart"


def test_a_full_disk_pauses_only_where_waiting_can_help() -> None:
    pausing = Policy(restarts=3, on_disk_full="pause")
    assert decide(attempts("a"), "disk.full", pausing, short_of_room=True).kind == "pause"
    assert decide(attempts("a"), "disk.full", pausing, short_of_room=False).kind == "restart"
    assert decide(attempts("a"), "disk.full", Policy(restarts=3), short_of_room=True).kind == "stop"
    assert decide(attempts(*["p"] * 30, "a", every_s=10.0), "unknown", pausing).kind == "restart"


def test_a_fingerprint_ignores_numbers_and_all_but_the_first_line() -> None:
    first = fingerprint("py.exception", "ValueError", "ValueError: bad row 17 of 3000\nmore 1")
    assert first == fingerprint("py.exception", "ValueError", "ValueError: bad row 4 of 12\nless")
    assert first != fingerprint("py.exception", "KeyError", "ValueError: bad row 4 of 12")
    assert fingerprint("sig.kill.external", "", "") == "sig.kill.external"


def ended(code: int | None, signal: int | None) -> Exit:
    return Exit(
        rank=0,
        attempt=1,
        pid=7,
        code=code,
        signal=signal,
        mono=1.0,
        ending=None,
        beat=None,
        peak_memory=0,
        asked=False,
    )


def test_failures_without_a_name_are_the_same_only_by_how_they_came() -> None:
    """A SIGKILL and two workers that could not be started were "3 times the same failure"."""
    team = Team([])
    team.close(Judged("unknown", 0, 50, "rank 0 was killed"), ended(None, 9), 1.0)
    for number, said in ((2, "worker 1 could not be started: cannot write a"), (3, "worker 0 could not be started: b")):
        team.close(Judged("unknown", 0, 40, said), None, float(number))
    assert len({attempt.fingerprint for attempt in team.history}) == 3
    assert decide(team.history, "unknown", POLICY).code == ""
    for rank in (0, 1, 2):
        team.close(Judged("unknown", rank, 40, f"worker {rank} could not be started: no log"), None, 4.0 + rank)
    assert decide(team.history, "unknown", POLICY).code == "progress.none"
    left = ended(75, None)
    first = team.close(Judged("unknown", 0, 50, "one"), left, 8.0).fingerprint
    assert team.close(Judged("unknown", 0, 50, "two"), left, 9.0).fingerprint == first


def test_a_folder_that_gives_nothing_back_does_not_hide_what_the_supervisor_saw(tmp_path: Path) -> None:
    """It was moved: a SIGKILL that the supervisor had seen was "nothing on record says how"."""
    for exit, code in (
        (ended(None, 9), "unknown"),  # whether for lack of memory nobody can say now
        (ended(None, 11), "sig.segv"),
        (ended(3, None), "py.exit_code"),
    ):
        found = judge(tmp_path / "moved away", [exit], None, 1, None)
        assert (found.code, found.rank) == (code, 0)
        assert found.verdict is not None
        assert "nothing on record" not in found.sentence
    assert "was killed (SIGKILL)" in judge(tmp_path / "x", [ended(None, 9)], None, 1, None).sentence
    assert judge(tmp_path / "x", [], Hang(1, "hang.wait", {1: "hang.wait"}), 1, None).code == "hang.wait"
