"""The mutation check: what is said of a run when one source of evidence is gone, in real run folders.

Taking a source away may make the answer less exact ("likely", "unknown", a name that says less), never wrong: each
scenario lists the names that it allows then. Called by tests/fault_matrix.py and tests/test_fault_matrix.py.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_rewrite import SOURCES, without
from fault_run import Live

from manifests.evidence import collect
from manifests.verdict import verdict


@dataclass(frozen=True, kw_only=True)
class Mutated:
    """What was said without one source."""

    scenario: str
    phase: str
    seed: int
    source: str
    expected: str
    named: str
    confidence: str
    allowed: bool
    degraded: bool
    sentence: str


def mutate(live: Live, phase: str, seed: int) -> list[Mutated]:
    """Judge copies of a played run, each without one source."""
    found = []
    expect = live.scenario.expect
    kernel = live.host.kernel() if live.host else None
    whole = live.judged()
    with tempfile.TemporaryDirectory(prefix="dflash-mutation-") as folder:
        for source in SOURCES:
            copy = without(live.run_dir, Path(folder) / source.replace(" ", "-"), source)
            said = verdict(collect(copy, kernel))
            same = said.code in (expect.code, *expect.or_code)
            weaker = said.code in ("unknown", *expect.weaker)
            named = set(said.ranks) <= set(whole.ranks) or expect.ranks == "any" or said.code == "unknown"
            found.append(
                Mutated(
                    scenario=live.scenario.name,
                    phase=phase,
                    seed=seed,
                    source=source,
                    expected=expect.code,
                    named=said.code,
                    confidence=said.confidence,
                    allowed=(same or weaker) and named and not (weaker and not same and said.confidence == "proved"),
                    degraded=not same or said.confidence != whole.confidence,
                    sentence=said.sentence,
                )
            )
    return found


def table(mutated: Sequence[Mutated]) -> str:
    """A row per source: how many runs kept their name, how many said less, which said something wrong."""
    lines = ["", "without                  runs  same  less exact  wrong   less exact: what was said instead"]
    for source in SOURCES:
        rows = [row for row in mutated if row.source == source]
        if not rows:
            continue
        less = [row for row in rows if row.allowed and row.degraded]
        wrong = [row for row in rows if not row.allowed]
        said = Counter(f"{row.expected} -> {row.named} ({row.confidence})" for row in less)
        shown = "; ".join(f"{text} x{count}" for text, count in said.most_common(6))
        same = len(rows) - len(less) - len(wrong)
        lines.append(f"{source:24s} {len(rows):5d} {same:5d} {len(less):11d} {len(wrong):6d}   {shown}")
        lines += [
            f"    WRONG {row.scenario} / {row.phase} / {row.seed}: {row.named} ({row.confidence}) {row.sentence}"
            for row in wrong
        ]
    return "\n".join(lines)
