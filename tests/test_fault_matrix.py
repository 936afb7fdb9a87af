"""The fault matrix, one id per fault and phase: the right name, on the right rank, in time, with nothing left behind.

`make test` plays every third of the quick ones in one phase; `pytest -m "crash or slow" tests/test_fault_matrix.py`
all, in all phases; `python tests/fault_matrix.py --seeds 20` prints the score sheet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_hosts import why_not
from fault_marks import marks, play
from fault_matrix import quick_phase, sheet
from fault_mutations import mutate
from fault_rewrite import SOURCES
from fault_run import Scenario, staged
from fault_scenarios import BY_NAME, SCENARIOS

from shared.phases import SCALE_VARIABLE

pytestmark = pytest.mark.crash


def cases() -> Iterator[object]:
    """All faults in all phases; what `make test` leaves out is slow: of the quick ones it plays every third."""
    quick = [scenario.name for scenario in SCENARIOS if scenario.quick][::3]
    for scenario in SCENARIOS:
        for phase in scenario.phases:
            left_out = [] if scenario.name in quick and phase == quick_phase(scenario) else [pytest.mark.slow]
            chosen = [pytest.mark.gpu] if scenario.needs == "cuda" else left_out
            name = f"{scenario.name}-{phase}".replace(" ", "_").replace("/", "_")
            yield pytest.param(scenario, phase, marks=chosen, id=name)


@pytest.mark.parametrize(("scenario", "phase"), list(cases()))
def test_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, phase: str) -> None:
    if reason := why_not(scenario.needs):
        pytest.skip(reason)
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)
    with staged(scenario, phase, 1, tmp_path / "run") as live:
        result = marks(live, phase, 1)
        assert result.right, sheet([result]) + "\n" + "\n".join(result.wrong)
        less = mutate(live, phase, 1)
    assert [change for change in less if not change.allowed] == []


def test_evidence_that_is_gone_makes_an_answer_less_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mutations of the other tests would take nothing away."""
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)
    with staged(BY_NAME["everything killed"], "step", 2, tmp_path / "run") as live:
        assert marks(live, "step", 2).right
        less = {change.source: change for change in mutate(live, "step", 2)}
    assert set(less) == set(SOURCES)
    assert less["samples"].degraded
    assert less["all events"].degraded
    assert all(change.allowed for change in less.values())


def test_a_wrong_name_is_marked_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix can fail: the same fault under another expectation is no right answer."""
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)
    scenario = BY_NAME["os._exit(3)"]
    honest = BY_NAME["SIGSEGV"].expect
    wrong = Scenario(name="mistaken", fault=scenario.fault, expect=honest, world=2)
    result = play(wrong, "load", 0, tmp_path / "run")
    assert not result.right
    assert any("named py.exit_code" in said for said in result.wrong)
    assert any("exit code 50, not 51" in said for said in result.wrong)
