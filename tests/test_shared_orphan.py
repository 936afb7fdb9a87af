"""How long a worker lives without its supervisor: to its next boundary, never for ever."""

from __future__ import annotations

import pytest

from shared import phases
from shared.orphan import OrphanWatch


def ends_at(watch: OrphanWatch, phase: str, reports: float | None = None, until: float = 10_000.0) -> float | None:
    """Second after its supervisor that it must end; it reports every `reports` seconds, or never again."""
    for second in range(int(until)):
        now = 1000.0 + second
        reported = 990.0 if reports is None else now - now % reports
        if watch.overdue(now, True, phase, reported) is not None:
            return float(second)
    return None


@pytest.mark.parametrize(
    ("phase", "scale", "reports", "second"),
    [
        (phases.STEP, 1.0, None, 61),
        (phases.STEP, 0.5, None, 31),
        (phases.STEP, 0.0, None, 61),  # nobody looks for hangs, but nobody lives for ever
        (phases.CHECKPOINT, 1.0, None, 181),
        (phases.STEP, 1.0, 10.0, 1801),  # goes on, and asks nobody
        (phases.WAIT_FOR_ROOM, 1.0, 1.0, 1801),
        (phases.COMPILE, 1.0, None, 6),
        (phases.LOAD, 1.0, 1.0, 6),
    ],
)
def test_the_deadline_is_that_of_the_phase(phase: str, scale: float, reports: float | None, second: float) -> None:
    assert ends_at(OrphanWatch(scale), phase, reports) == second


def test_what_took_long_before_may_take_long_again() -> None:
    watch = OrphanWatch(1.0)
    for second in range(600):  # a report every 100 s
        watch.overdue(400.0 + second, False, phases.CHECKPOINT, 400.0 + second // 100 * 100)
    assert ends_at(watch, phases.CHECKPOINT) == 501


def test_a_new_phase_and_a_supervisor_begin_anew() -> None:
    watch = OrphanWatch(1.0)
    assert ends_at(watch, phases.STEP, until=50) is None
    assert watch.overdue(1050.0, True, phases.CHECKPOINT, 1050.0) is None
    assert [watch.overdue(1000.0 + s, True, phases.CHECKPOINT, 1050.0) is None for s in range(51, 240)][-11:] == (
        [True] * 2 + [False] * 9
    )


def test_who_was_stopped_meanwhile_may_save() -> None:
    watch = OrphanWatch(1.0)
    assert watch.overdue(1000.0, True, phases.STEP, 999.0) is None
    assert watch.overdue(5000.0, True, phases.STEP, 999.0) is None  # after SIGSTOP and SIGCONT
    assert [watch.overdue(5000.0 + s, True, phases.STEP, 999.0) for s in (3, 6, 9)] == [None] * 3
