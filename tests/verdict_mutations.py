"""Evidence with one source taken away: a verdict on it must stay right or become honest, never wrong.

`python tests/verdict_mutations.py` prints which source degrades which scenario to what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verdict_scenarios import scenarios

from manifests.evidence import Evidence
from manifests.verdict import verdict


def _events(
    evidence: Evidence, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> tuple[dict[str, Any], ...]:
    """The events with another detail; None takes one away."""
    changed = [(event, change({**event["detail"], "_name": event["event"]})) for event in evidence.events]
    return tuple(
        {**event, "detail": {key: value for key, value in detail.items() if key != "_name"}}
        for event, detail in changed
        if detail is not None
    )


def _without(*names: str) -> Callable[[Evidence], Evidence]:
    """Without the events of these names."""
    return lambda e: replace(e, events=tuple(event for event in e.events if event["event"] not in names))


def _without_details(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return lambda detail: detail | {key: value for key, value in values.items() if key in detail}


def _no_endings(e: Evidence) -> Evidence:
    return replace(e, endings={}, events=_events(e, _without_details(ending=None)))


def _no_fault_lines(e: Evidence) -> Evidence:
    return replace(e, faults={}, events=_events(e, _without_details(fault_lines=[])))


def _no_last_lines(e: Evidence) -> Evidence:
    return replace(e, logs={}, events=_events(e, _without_details(last_lines=[])))


def _no_oom(e: Evidence) -> Evidence:
    none = {"vmstat": None, "cgroup": None}
    samples = tuple(sample | {"oom": none} for sample in e.samples)
    events = _events(e, _without_details(oom_before=none, oom_after=none))
    return replace(e, samples=samples, events=events, now=replace(e.now, oom=none))


def _no_memory(e: Evidence) -> Evidence:
    none = dict.fromkeys(("current", "max", "available", "total"))
    samples = tuple(sample | {"memory": none, "pressure": None} for sample in e.samples)
    return replace(e, samples=samples, events=_events(e, _without_details(memory=none)))


def _no_beats(e: Evidence) -> Evidence:
    none = {"beat_age": None, "phase": None, "done": None, "total": None, "unit": None, "saved": None}
    events = _events(e, lambda d: _without_details(**none)(d) if d["_name"] == "worker ended" else d)
    return replace(e, beats={}, events=events)


def _no_boot(e: Evidence) -> Evidence:
    supervisor = {**e.supervisor, "boot": None} if e.supervisor else None
    events = _events(e, _without_details(boot=None))
    return replace(e, supervisor=supervisor, events=events, now=replace(e.now, boot_id=None, boot_time=None))


def _no_pid1(e: Evidence) -> Evidence:
    supervisor = {**e.supervisor, "pid1_start": None, "pid_ns": None} if e.supervisor else None
    return replace(e, supervisor=supervisor, now=replace(e.now, pid1_start=None, pid_ns=None))


def _no_sender(e: Evidence) -> Evidence:
    def change(detail: dict[str, Any]) -> dict[str, Any]:
        ending, by = detail.get("ending"), detail.get("by")
        if isinstance(ending, dict):
            detail = detail | {"ending": ending | {"signal": None}}
        if isinstance(by, dict) and "signal" in by:
            detail = detail | {"by": {"signal": by["signal"]}}
        return detail

    endings = {rank: ending | {"signal": None} for rank, ending in e.endings.items()}
    return replace(e, endings=endings, events=_events(e, change))


def _no_supervisor(e: Evidence) -> Evidence:
    kept = _without("supervisor started")(e)
    return replace(kept, supervisor=None, now=replace(e.now, supervisor_alive=None))


MUTATIONS: dict[str, Callable[[Evidence], Evidence]] = {
    "endings": _no_endings,
    "fault lines": _no_fault_lines,
    "last lines": _no_last_lines,
    "OOM counters": _no_oom,
    "memory samples": _no_memory,
    "all samples": lambda e: replace(e, samples=()),
    "beats": _no_beats,
    "boot id": _no_boot,
    "pid 1": _no_pid1,
    "supervisor event": _no_supervisor,
    "worker-ended events": _without("worker ended"),
    "signal sender": _no_sender,
    "stop.json": lambda e: replace(e, stop=None),
    "stop-asked events": _without("stop asked"),
    "hang events": _without("hang"),
    "stacks": _without("stacks saved"),
    "supervisor-ended events": _without("supervisor ended", "gave up"),
    "run's ending": lambda e: replace(e, ended=None),
    "all events": lambda e: replace(e, events=(), supervisor=None, now=replace(e.now, supervisor_alive=None)),
}


def main() -> None:
    """Print which source degrades which scenario to what."""
    whole = {s.name: verdict(s.evidence, s.attempt) for s in scenarios()}
    for source, mutate in MUTATIONS.items():
        print(f"without {source}:")  # noqa: T201
        for scenario in scenarios():
            found, before = verdict(mutate(scenario.evidence), scenario.attempt), whole[scenario.name]
            if (found.code, found.confidence, found.ranks) != (before.code, before.confidence, before.ranks):
                print(f"    {scenario.name:40} {before.code} ({before.confidence}) {before.ranks}"  # noqa: T201
                      f" -> {found.code} ({found.confidence}) {found.ranks}")  # fmt: skip


if __name__ == "__main__":
    main()
