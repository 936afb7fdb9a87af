"""Where the time of a run went: starts, attempts, seconds per phase, and the share that moved the work on.

Made from what workers counted themselves (the heartbeat's `spent`, which an event keeps when one ends) for `dflash why`
(why.py). Goodput is time in steps / all time: the rest is what saving, loading, compiling, pausing and dying cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manifests.evidence import Evidence
from shared.phases import STEP
from shared.progress import duration


@dataclass(frozen=True, kw_only=True)
class Account:
    """One run from its start to its end, or to its last sign of life: seconds, mean over the ranks for phases."""

    started: float
    elapsed_s: float
    attempts: int
    restarts: int
    phases: dict[str, float]
    goodput: float | None
    """None when no worker ever reported."""

    def lines(self) -> list[str]:
        """The account as text, most time first."""
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        attempts = f"{self.attempts} attempt{'' if self.attempts == 1 else 's'}"
        lines = [f"time: {duration(self.elapsed_s)} since {begun}, {attempts}, {self.restarts} restarted"]
        if self.goodput is not None:
            spent = sorted(self.phases.items(), key=lambda item: -item[1])
            other = max(0.0, self.elapsed_s - sum(self.phases.values()))
            shares = [f"{name} {duration(seconds)}" for name, seconds in [*spent, ("none", other)] if seconds >= 0.5]
            lines += [f"by phase: {', '.join(shares)}", f"goodput: {self.goodput:.3f} (time in steps / all time)"]
        return lines


def account(evidence: Evidence) -> Account:
    """The account of the newest run; of one that is lost up to its last sign of life."""
    assert evidence.run is not None
    begun = float(evidence.run["time"])
    ended = evidence.ended["time"] if evidence.ended else evidence.last_time
    if evidence.ended is None and (evidence.now.owned or evidence.now.supervisor_alive):
        ended = evidence.now.time
    elapsed = max(0.0, (ended or begun) - begun)
    phases = _phases(evidence)
    return Account(
        started=begun,
        elapsed_s=elapsed,
        attempts=_attempts(evidence),
        restarts=len(evidence.named("restart")),
        phases=phases,
        goodput=min(1.0, phases.get(STEP, 0.0) / elapsed) if phases and elapsed else None,
    )


def _attempts(evidence: Evidence) -> int:
    """The largest number of an attempt: workers of an extraction each count their own."""
    numbers = [event["detail"].get("attempt") for event in evidence.named("attempt started")]
    numbers += [beat.attempt for beat in evidence.beats.values()]
    return max((number for number in numbers if isinstance(number, int)), default=0) or int(bool(evidence.beats))


def _phases(evidence: Evidence) -> dict[str, float]:
    """Seconds by phase, all attempts, mean over the ranks; every process once."""
    ended = [event["detail"] for event in evidence.named("worker ended")]
    totals = [detail.get("spent") for detail in ended]
    over = {(detail.get("rank"), detail.get("pid")) for detail in ended}
    for rank, beat in evidence.beats.items():
        if (rank, beat.pid) not in over:
            living = rank in evidence.now.alive_ranks
            totals.append(beat.spent_until(evidence.now.mono if living else max(beat.alive, beat.reported)))
    return _mean(totals, max(1, evidence.num_workers))


def _mean(totals: Iterable[Any], ranks: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for total in totals:
        for phase, seconds in (total if isinstance(total, dict) else {}).items():
            if isinstance(seconds, int | float):
                found[phase] = found.get(phase, 0.0) + seconds / ranks
    return {phase: round(seconds, 3) for phase, seconds in found.items()}
