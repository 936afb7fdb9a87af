"""The tables and quotations of a post-mortem page: timeline, ranks, memory, stacks, logs.

Each function gives Markdown, "" when there is nothing to show. Used by manifests/postmortem.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict import Verdict
from manifests.verdict_finding import deaths, gib, ranks_text
from manifests.verdict_host import elsewhere
from manifests.verdict_signals import signal_name

_MOST_EVENTS = 60
_MOST_LINES = 12
_STACK_LINES = 40
_SECONDS = 60.0
_QUIET = ("worker spawned",)


def local(moment: float) -> str:
    """Local time with its zone: "2026-01-02 03:04:05 CET"; the number itself when it is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return str(moment)


def one_line(text: str) -> str:
    """Text for a list or a table: no newline, no bar, at most 600 characters."""
    return " ".join(str(text).split())[:600].replace("|", "\\|")


def timeline(evidence: Evidence) -> str:
    """The run's events in order, with the last signs of life; wall time shown, monotonic time obeyed."""
    rows: list[tuple[float, float | None, str]] = []
    for event in evidence.events:
        mono = number(event["detail"].get("mono"))
        if event["event"] not in _QUIET and mono is not None:
            rows.append((mono, number(event["detail"].get("t")) or event["time"], _told(event)))
    if evidence.samples:
        last = evidence.samples[-1]
        rows.append((last["mono"], number(last.get("t")), "last sample by the supervisor"))
    for rank, beat in sorted(evidence.beats.items()):
        at = beat.time + max(0.0, beat.alive - beat.reported)
        rows.append((beat.alive or beat.reported, at, f"last heartbeat of rank {rank}"))
    rows.sort(key=lambda row: row[0])
    if len(rows) > _MOST_EVENTS:
        left = len(rows) - _MOST_EVENTS
        rows = [*rows[:10], (rows[10][0], None, f"... {left} more ..."), *rows[-(_MOST_EVENTS - 10) :]]
    shown = [f"{local(wall) if wall else '':23}  {text}" for _, wall, text in rows]
    return _quoted(shown)


def _told(event: dict[str, Any]) -> str:
    detail, name = event["detail"], event["event"]
    if name == "verdict" and isinstance(detail.get("verdict"), dict):
        said = detail["verdict"]
        return f"verdict: {said.get('sentence')} ({said.get('code')}, {said.get('confidence')})"
    if event["message"]:
        return f"{name}: {event['message']}"
    if name == "worker ended":
        asked = ", as asked" if detail.get("asked") else ""
        return f"worker ended: rank {detail.get('rank')}, {_how(detail)}{asked}"
    known = {
        key: detail[key]
        for key in ("attempt", "rank", "ranks", "code", "state", "reason", "exit_code")
        if detail.get(key)
    }
    return f"{name}{': ' if known else ''}{', '.join(f'{key} {value}' for key, value in known.items())}"


def _how(detail: dict[str, Any]) -> str:
    if detail.get("signal"):
        return f"signal {signal_name(whole(detail['signal']))}"
    return f"exit code {detail['exit_code']}" if detail.get("exit_code") is not None else "how is not on record"


def ranks(evidence: Evidence, verdict: Verdict) -> str:
    """One row per rank: where it was, what it saved, how it ended."""
    ends = {death.rank: death for death in deaths(evidence, None)}
    known = sorted({*evidence.beats, *ends})
    if not known:
        return ""
    without_ending = "not on record, and not seen from here" if elsewhere(evidence) else "gone without a word"
    rows = ["| rank | pid | attempt | phase | done | saved | ended | peak memory |", "|" + "---|" * 8]
    for rank in known:
        death, beat = ends.get(rank), evidence.beats.get(rank)
        newer = death is not None and beat is not None and death.pid != beat.pid
        if newer:
            death = None
        phase = death.phase if death and death.phase else beat.phase if beat else ""
        done = death.done if death and death.done is not None else beat.done if beat else None
        total = death.total if death and death.total is not None else beat.total if beat else None
        saved = death.saved if death and death.saved is not None else beat.saved if beat else None
        peak = (death.peak_memory or number(death.ending.get("peak_memory"))) if death else None
        ended = "" if death is None else _end_of(death.signal, death.exit_code, death.error, death.asked)
        if not ended:
            ended = "lives" if rank in evidence.now.alive_ranks else without_ending
        cells = [
            f"**{rank}**" if rank in verdict.ranks else str(rank),
            str((death.pid if death else 0) or (beat.pid if beat else "")),
            str((death.attempt if death else 0) or (beat.attempt if beat else "")),
            phase,
            "" if done is None else f"{done:,.0f}" + (f" of {total:,.0f}" if total is not None else ""),
            "" if saved is None else f"{saved:,.0f}",
            one_line(ended),
            "" if peak is None else gib(peak),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _end_of(signal: int | None, code: int | None, error: str, asked: bool) -> str:
    how = f"signal {signal_name(signal)}" if signal else f"exit code {code}" if code is not None else ""
    parts = [part for part in (how, error, "asked to" if asked else "") if part]
    return ", ".join(parts)


def memory(evidence: Evidence) -> str:
    """The last minute before the last sample: one row in ten seconds, then every second of the last five."""
    if not evidence.samples:
        return ""
    end = evidence.samples[-1]["mono"]
    last = [sample for sample in evidence.samples if sample["mono"] > end - _SECONDS]
    chosen = [s for index, s in enumerate(last) if index % 10 == 0 or s["mono"] > end - 5.0]
    rows = ["| before the end | cgroup | host available | waiting for memory | OOM kills | disk free | largest rank |"]
    rows.append("|" + "---|" * 7)
    rows += [_memory_row(sample, end) for sample in chosen]
    return "\n".join(rows)


def _memory_row(sample: dict[str, Any], end: float) -> str:
    held, oom = _object(sample.get("memory")), _object(sample.get("oom"))
    current, limit, available = (number(held.get(name)) for name in ("current", "max", "available"))
    used = "" if current is None else gib(current)
    if current is not None and limit:
        used += f" of {gib(limit)} ({current / limit:.0%})"
    waiting = number(_object(sample.get("pressure")).get("memory"))
    free = number(sample.get("disk_free"))
    seen = {rank: facts for rank, facts in _object(sample.get("ranks")).items() if isinstance(facts, list)}
    sizes = [(number(facts[2]) or 0.0, rank) for rank, facts in seen.items() if len(facts) > 2]
    largest = max(sizes, default=None)
    kills = ", ".join(
        f"{name} {oom[key]}" for name, key in (("host", "vmstat"), ("cgroup", "cgroup")) if oom.get(key) is not None
    )
    cells = [
        f"{end - sample['mono']:.0f} s",
        used,
        "" if available is None else gib(available),
        "" if waiting is None else f"{waiting:.0f} %",
        kills,
        "" if free is None else gib(free),
        "" if largest is None else f"rank {largest[1]}: {gib(largest[0])}",
    ]
    return f"| {' | '.join(cells)} |"


def stacks(evidence: Evidence, verdict: Verdict) -> str:
    """What the ranks were doing when they were looked at, same with same; those unlike the most are suspects."""
    groups = _groups(evidence)
    if not groups:
        return ""
    largest = max(len(ranks_) for _, ranks_, _ in groups)
    only = sum(len(ranks_) == largest for _, ranks_, _ in groups) == 1
    shown = []
    for summary, members, text in sorted(groups, key=lambda group: (len(group[1]), group[1])):
        named = bool(set(members) & set(verdict.ranks))
        odd = len(groups) > 1 and (named or (only and len(members) < largest))
        mark = " (suspect)" if odd and (named or not verdict.ranks) else ""
        shown.append(f"{ranks_text(members)}{mark}: {one_line(summary)}")
        if text:
            shown.append(_quoted(text.splitlines()[:_STACK_LINES]))
    return "\n\n".join(shown)


def _groups(evidence: Evidence) -> list[tuple[str, tuple[int, ...], str]]:
    """(summary, ranks, one rank's whole stack) of the newest dump."""
    saved = [event for event in evidence.named("stacks saved") if isinstance(event["detail"].get("groups"), dict)]
    if not saved:
        return []
    detail = saved[-1]["detail"]
    found = []
    for summary, members in detail["groups"].items():
        numbers = tuple(sorted(whole(rank) for rank in members)) if isinstance(members, list) else ()
        if numbers:
            name = f"attempt-{detail.get('attempt')}-rank-{numbers[0]}.txt"
            found.append((str(summary), numbers, _main_thread(evidence.stacks.get(name, ""))))
    return found


def _main_thread(text: str) -> str:
    """The part of a saved stack file that is the main thread's Python stack."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    stacks_ = [thread for thread in threads if re.match(r"(?:Current thread|Thread) 0x", thread)]
    chosen = next((thread for thread in stacks_ if thread.startswith("Current thread")), stacks_[-1] if stacks_ else "")
    return "\n".join(line for line in chosen.splitlines() if line.startswith(("Current", "Thread", "  File")))


def last_lines(evidence: Evidence, verdict: Verdict) -> str:
    """The ends of the logs, the named ranks' first; the supervisor's own only when it failed itself."""
    ends = {death.rank: death for death in deaths(evidence, None)}
    known = sorted({*evidence.beats, *ends}, key=lambda rank: (rank not in verdict.ranks, rank))
    shown = []
    for rank in known[:8]:
        name = f"{evidence.role}-{rank}.log"
        death = ends.get(rank)
        lines = evidence.logs.get(name) or (death.last_lines if death else ())
        fault = death.fault_lines if death and death.fault_lines else evidence.faults.get(rank, ())
        if any(not line.startswith("--- attempt") for line in lines):
            shown.append(f"Rank {rank} (`logs/{name}`):\n\n{_quoted(lines[-_MOST_LINES:])}")
        if fault and rank in verdict.ranks and not verdict.code.startswith("hang."):
            shown.append(f"Rank {rank} (`logs/{evidence.role}-{rank}.fault`):\n\n{_quoted(fault[:_STACK_LINES])}")
    name = f"{evidence.role}-supervisor.log"
    own = evidence.logs.get(name, ())
    if any(line.startswith("Traceback") for line in own) or (own and not evidence.events):
        shown.append(f"Supervisor (`logs/{name}`):\n\n{_quoted(own[-_MOST_LINES:])}")
    return "\n\n".join(shown)


def _quoted(lines: Sequence[str]) -> str:
    """Lines as they are, fenced by more tildes than any of them begins with."""
    if not lines:
        return ""
    longest = max((len(found[0]) for line in lines if (found := re.match(r"\s*(~+)", line))), default=0)
    fence = "~" * max(3, longest + 1)
    return "\n".join([fence, *(" ".join(line.splitlines())[:300] for line in lines), fence])


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
