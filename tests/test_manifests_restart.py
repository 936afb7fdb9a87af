"""What failed is started again while it makes progress, a few times without, and never when that cannot help."""

from __future__ import annotations

import pytest

from manifests.restart import Attempt, Policy, decide, fingerprint

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
