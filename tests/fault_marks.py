"""Compares what was said of a played run with what was done to it: one row of the score sheet for one seed.

Called by tests/fault_matrix.py and tests/test_fault_matrix.py after tests/fault_run.py has played the scenario.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_run import Live, Scenario, staged
from fault_toys import expected_result

from manifests.verdict import Verdict
from manifests.verdict_memory import moved

DEATH_TO_EVENT_S, DEATH_TO_VERDICT_S = 1.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the score sheet, for one seed."""

    scenario: str
    phase: str
    seed: int
    expected: str
    named: str
    ranks: tuple[int, ...]
    confidence: str
    wrong: tuple[str, ...]
    """What is not as it should be; empty for a right answer."""
    event_s: float | None
    verdict_s: float | None
    sentence: str = ""

    @property
    def right(self) -> bool:
        return not self.wrong


def play(scenario: Scenario, phase: str, seed: int, folder: Path) -> Result:
    """Play a scenario with the fault in `phase`, its rank and moment by `seed`; the run stays in `folder`."""
    with staged(scenario, phase, seed, folder) as live:
        return marks(live, phase, seed)


def marks(live: Live, phase: str, seed: int) -> Result:
    """Compare what was said with what was done."""
    expect = live.scenario.expect
    asked = time.monotonic()
    found = live.judged()
    answered = time.monotonic()
    wrong = [*live.notes, *_wrong_name(live, found), *_wrong_end(live)]
    event_s, verdict_s = _seconds(live)
    if live.scenario.prompt and event_s is not None and event_s > DEATH_TO_EVENT_S:
        wrong.append(f"event after {event_s:.2f} s")
    if live.scenario.prompt and verdict_s is not None and verdict_s > DEATH_TO_VERDICT_S:
        wrong.append(f"verdict after {verdict_s:.2f} s")
    if verdict_s is None and expect.exit_code is None:
        verdict_s = answered - asked
    return Result(
        scenario=live.scenario.name,
        phase=phase,
        seed=seed,
        expected=expect.code,
        named=_named_on_record(live) or found.code,
        ranks=found.ranks,
        confidence=found.confidence,
        wrong=tuple(wrong),
        event_s=event_s,
        verdict_s=verdict_s,
        sentence=found.sentence,
    )


def _named_on_record(live: Live) -> str:
    if not live.scenario.expect.named:
        return ""
    return ", ".join(sorted({event["detail"]["code"] for event in live.events("hang")}))


def _wrong_name(live: Live, found: Verdict) -> list[str]:
    expect, wrong = live.scenario.expect, []
    codes = (expect.code, *expect.or_code)
    if found.code not in codes:
        wrong.append(f"named {found.code} ({found.confidence}): {found.sentence}")
    elif found.confidence not in (*expect.confidence, *(("likely",) if _another_was_killed(live) else ())):
        wrong.append(f"confidence {found.confidence}, not {' or '.join(expect.confidence)}")
    every = tuple(range(live.spec.num_workers))
    ranks = {"victims": live.plan.ranks, "all": every, "none": (), "any": found.ranks}[expect.ranks]
    if found.code in codes and found.ranks != ranks:
        wrong.append(f"ranks {found.ranks}, not {ranks}: {found.sentence}")
    if expect.named:
        hangs = {(e["detail"]["code"], e["detail"]["rank"]) for e in live.events("hang")}
        if hangs != {(expect.named, rank) for rank in live.plan.ranks}:
            wrong.append(f"hangs on record: {sorted(hangs)}")
    elif found.code == "done" and (hangs := live.events("hang")):
        wrong.append(f"false alarm: {hangs[0]['message']}")
    said = [event["detail"]["verdict"]["code"] for event in live.events("verdict")]
    if expect.code not in ("done", "progress.none", "storm") and said and said[-1] not in codes:
        wrong.append(f"the supervisor said {said[-1]} at the time")
    return wrong


def _another_was_killed(live: Live) -> bool:
    """Whether this machine's OOM killer took somebody else's process just then: a test of it may run beside this one.

    Then a SIGKILL cannot be proved to be from outside.
    """
    counts = [
        (event["detail"].get("oom_before"), event["detail"].get("oom_after")) for event in live.events("worker ended")
    ]
    changes = [moved(before, after) for before, after in counts if before and after]
    return live.host is None and any(change["vmstat"] and not change["cgroup"] for change in changes)


def _wrong_end(live: Live) -> list[str]:
    expect, wrong = live.scenario.expect, []
    if expect.exit_code is not None and live.code != expect.exit_code:
        wrong.append(f"exit code {live.code}, not {expect.exit_code}")
    if live.code == 137 or (expect.code != "done" and live.code == 0):
        wrong.append(f"exit code {live.code}")
    if (left := live.processes()) and not live.scenario.outlived:
        wrong.append(f"processes left: {left}")
    if expect.code == "done":
        writers = range(live.spec.num_workers)
        results = {rank: _text(live.run_dir / "toy" / f"result-{rank}") for rank in writers}
        right = str(expected_result(live.plan.steps))
        if set(results.values()) != {right} and live.scenario.entry == "fault_toys:work":
            wrong.append(f"results {results}, an uninterrupted run gives {right}")
    return wrong


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _seconds(live: Live) -> tuple[float | None, float | None]:
    """From the fault to the first event that tells of it, and to the first verdict."""
    moments = [at for rank in live.plan.ranks if (at := live.moment(rank)) is not None]
    begun = live.acted if live.acted is not None else min(moments, default=None)
    if begun is None:
        return None, None
    told = [event for event in live.events("worker ended", "hang") if event["detail"].get("rank") in live.plan.ranks]
    return _after(begun, told), _after(begun, live.events("verdict"))


def _after(begun: float, events: list[dict[str, Any]]) -> float | None:
    later = [event["detail"]["mono"] - begun for event in events if event["detail"]["mono"] >= begun]
    return min(later, default=None)
