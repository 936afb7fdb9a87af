"""Which of an attempt's anomalies is the root: the first by monotonic time, never one that follows from another.

Ranks in step die of each other: what merely lost a peer, or waited for one, is listed as a consequence. Two that come
within 50 ms with evidence of the same kind are both named. Independent workers (stage 1) have no consequences: there
the newest anomaly is judged. Used by manifests/verdict.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manifests.evidence import Evidence
from manifests.evidence_files import whole
from manifests.verdict_deaths import judge, not_started
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Death, Finding, deaths, ranks_text, silent
from manifests.verdict_hangs import hang_finding

TIE_S = 0.05


def anomalies(evidence: Evidence, attempt: int | None, *, gone: bool) -> list[Finding]:
    """Everything that went wrong in an attempt. `gone`: workers that live no more without a word count too."""
    ends = deaths(evidence, attempt)
    if gone:
        ends += [death for death in silent(evidence, deaths(evidence, None)) if attempt in (None, death.attempt)]
    found = [finding for death in ends if (finding := judge(evidence, death, ends)) is not None]
    found += not_started(evidence, attempt)
    if (hang := hang_finding(evidence, attempt)) is not None:
        found.append(hang)
    return found


def last_attempt(evidence: Evidence) -> int:
    """The number of the newest attempt, 0 when nothing says."""
    numbers = [
        whole(event["detail"].get("attempt")) for event in evidence.named("attempt started", "worker ended", "hang")
    ]
    numbers += [beat.attempt for beat in evidence.beats.values()]
    return max([*numbers, *(whole(ending.get("attempt")) for ending in evidence.endings.values())], default=0)


def root_of(
    evidence: Evidence, found: Sequence[Finding], attempt: int | None
) -> tuple[Finding | None, tuple[str, ...]]:
    """(the root, what followed from it as sentences); None when nothing went wrong."""
    if not found:
        return None, ()
    solid = [finding for finding in found if not finding.cascade and finding.grade > 0]
    solid = solid or [finding for finding in found if not finding.cascade]
    if not solid:
        return _without_root(evidence, found, attempt), tuple(_line(finding, None) for finding in _in_order(found))
    told = [finding for finding in solid if finding.code != UNKNOWN]
    doubt = bool(told) and any(finding.span is None for finding in solid if finding.code == UNKNOWN)
    ordered = _in_order(told if doubt else solid)
    first = ordered[-1] if evidence.independent else ordered[0]
    tied = [finding for finding in ordered if finding is first or _gap(first, finding) <= TIE_S]
    # A rank that is gone without a word is no second root, only a doubt: it may have been the first.
    named = [finding for finding in tied if finding.code != UNKNOWN or finding.grade == 2] or tied
    doubt = doubt or len(named) < len(tied)
    best = max(finding.grade for finding in named)
    roots = [finding for finding in named if finding.grade == best]
    rest = [finding for finding in _in_order(found) if not any(finding is root for root in roots)]
    if evidence.independent:
        rest = []
    root = _merged(roots)
    if doubt and not evidence.independent and root.confidence == PROVED:
        root = replace(root, confidence=LIKELY)
    return root, tuple(_line(finding, roots[0]) for finding in rest)


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    def at(finding: Finding) -> tuple[bool, float, float, tuple[int, ...]]:
        middle = sum(finding.span) / 2 if finding.span else 0.0
        return finding.span is None, middle, finding.time or 0.0, finding.ranks

    return sorted(found, key=at)


def _gap(one: Finding, other: Finding) -> float:
    """Seconds between two anomalies: 0 when the times at which they may have happened overlap."""
    if one.span is not None and other.span is not None:
        return max(0.0, one.span[0] - other.span[1], other.span[0] - one.span[1])
    if one.span is None and other.span is None and one.time is not None and other.time is not None:
        return abs(one.time - other.time)  # no supervisor saw them: their own clocks, of one host, must do
    return float("inf")


def _merged(roots: list[Finding]) -> Finding:
    """One finding for several that tie; of different kinds, it cannot be told which came first."""
    first = roots[0]
    if len(roots) == 1:
        return first
    ranks = tuple(sorted({rank for root in roots for rank in root.ranks}))
    same = all(root.code == first.code for root in roots)
    sentence = f"{ranks_text(ranks)} at the same time: " + "; ".join(root.sentence for root in roots[:3])
    if len(roots) > 3:
        sentence += f"; and {len(roots) - 3} more"
    return replace(
        first,
        ranks=ranks,
        sentence=sentence,
        confidence=_weakest(roots) if same or _weakest(roots) == UNKNOWN else LIKELY,
        evidence=tuple(dict.fromkeys(line for root in roots for line in root.evidence)),
        excluded=tuple(dict.fromkeys(line for root in roots for line in root.excluded)),
    )


def _weakest(roots: list[Finding]) -> str:
    order = (PROVED, LIKELY, UNKNOWN)
    return max((root.confidence for root in roots), key=order.index)


def _line(finding: Finding, root: Finding | None) -> str:
    later = ""
    if root is not None and root.span is not None and finding.span is not None:
        seconds = finding.span[1] - root.span[1]
        later = f", {abs(seconds):,.1f} s {'later' if seconds >= 0 else 'earlier'}"
    return f"{ranks_text(finding.ranks)}{later}: {finding.short or finding.sentence} ({finding.code})"


def _without_root(evidence: Evidence, found: Sequence[Finding], attempt: int | None) -> Finding:
    """Only consequences: say what can be said, and not that one of them was the cause."""
    ordered = _in_order(found)
    first = ordered[0]
    if any(finding.code == "sup.killed" for finding in ordered):
        alone = next(finding for finding in ordered if finding.code == "sup.killed")
        return replace(alone, time=evidence.supervisor_time or alone.time)
    if not any(finding.code == "comm.peer_death" for finding in ordered):
        return replace(first, ranks=(), cascade=False)
    waiting = {rank for finding in ordered for rank in finding.ranks}
    ends = deaths(evidence, attempt)
    left = tuple(sorted(death.rank for death in ends if death.clean and death.rank not in waiting))
    # A rank that we asked to leave was there until then: nobody had missed it.
    there = waiting | {death.rank for death in ends if death.asked}
    missing = tuple(rank for rank in range(evidence.num_workers) if rank not in there)
    timed_out = any(finding.grade == 1 for finding in ordered)
    if left:
        reason = f"{ranks_text(left)} finished while {ranks_text(tuple(sorted(waiting)))} still waited for it"
        return replace(first, code="comm.mismatch", ranks=left, confidence=LIKELY, sentence=reason, cascade=False)
    if timed_out:
        named = missing or tuple(sorted(waiting))
        reason = f"{ranks_text(tuple(sorted(waiting)))} waited in vain in a collective"
        reason += f" for {ranks_text(missing)}" if missing else ""
        return replace(first, code="comm.mismatch", ranks=named, confidence=LIKELY, sentence=reason, cascade=False)
    sentence = f"{ranks_text(tuple(sorted(waiting)))} lost a peer; how the first of them ended is not on record"
    return replace(first, code="unknown", ranks=missing, confidence=UNKNOWN, sentence=sentence, cascade=False)


def clean(evidence: Evidence, attempt: int | None) -> bool:
    """Whether every rank that ended in an attempt had done its work, and one did."""
    ends: list[Death] = deaths(evidence, attempt)
    return bool(ends) and all(death.clean for death in ends)
