"""The page about how a run ended, for somebody at three in the morning: what happened and what to do first.

Markdown that also reads well as plain text. `dflash why` prints it, the supervisor writes it as RUN/postmortem.md. Made
from evidence and verdict alone; the parts with tables and logs are in manifests/postmortem_parts.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from manifests import postmortem_parts as parts
from manifests.evidence import Evidence
from manifests.verdict import Verdict
from manifests.verdict_finding import ranks_text

_SURE = {
    "proved": "proved by the evidence below",
    "likely": "likely: the evidence fits, but does not exclude everything else",
    "unknown": "not established: nothing on record says more",
}


def page(evidence: Evidence, verdict: Verdict) -> str:
    """The whole page."""
    sections = [
        _head(evidence, verdict),
        _listed("Evidence", verdict.evidence),
        _listed("Excluded", verdict.excluded),
        _listed("What followed from it" if verdict.code not in ("done", "running") else "Before", verdict.cascade),
        _section("Timeline", parts.timeline(evidence)),
        _section("Ranks", parts.ranks(evidence, verdict)),
        _section("Memory before the end", parts.memory(evidence)),
        _section("Stacks", parts.stacks(evidence, verdict)),
        _section("Last lines", parts.last_lines(evidence, verdict)),
        _listed("What could not be known", evidence.gaps),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(evidence: Evidence, verdict: Verdict) -> str:
    """The first line says what, to whom, where and when; the second what to do."""
    sentence = verdict.sentence or verdict.code
    when = f", {parts.local(verdict.time)}" if verdict.time else ""
    lines = [f"# {sentence[:1].upper()}{sentence[1:]}{when} ({verdict.confidence})"]
    lines += [f"**What to do:** {verdict.advice}"] if verdict.advice else []
    who = f", {ranks_text(verdict.ranks)}" if verdict.ranks else ""
    box = f"`{verdict.code}`{who}, {_SURE.get(verdict.confidence, verdict.confidence)}; exit code {verdict.exit_code}"
    run = evidence.run or {}
    facts = evidence.supervisor or {}
    on = f" on {facts['host']}" if facts.get("host") else ""
    began = f", started {parts.local(run['time'])}" if run.get("time") else ""
    lines += [f"Verdict: {box}.", f"Run: `{evidence.run_dir}` ({evidence.role or 'no run'}{on}{began})."]
    return "\n\n".join(lines)


def _listed(title: str, lines: Iterable[str]) -> str:
    """A section of points, "" when there are none."""
    points = "\n".join(f"- {parts.one_line(line)}" for line in lines)
    return f"## {title}\n\n{points}" if points else ""


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""
