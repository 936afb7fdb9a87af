"""A run that lives: what is odd about it right now. Used by manifests/verdict.py.

Whether it lives is asked of its processes and its folder's lock; from another host or container only a fresh heartbeat
tells.
"""

from __future__ import annotations

import math

from manifests.evidence import Evidence
from manifests.verdict_finding import LIKELY, PROVED, Finding, ranks_text
from manifests.verdict_host import elsewhere, place_of, unwatched
from shared.phases import limit_s

FRESH_S = 60.0
"""On another host the files of a shared disk are up to half a minute old."""
_SILENT_S = 5.0
"""The liveness thread beats once a second."""


def is_running(evidence: Evidence) -> bool:
    """Whether processes of the run live. A supervisor that is gone while workers live is a verdict of its own."""
    now = evidence.now
    if now.supervisor_alive is not None:
        return now.supervisor_alive
    if elsewhere(evidence):
        return evidence.last_time is not None and now.time - evidence.last_time <= FRESH_S
    if now.alive_ranks or now.owned:
        return not (now.alive_ranks and unwatched(evidence))
    # The same boot in another container: the monotonic clock is the same, processes and locks may not be seen.
    alive = max((beat.alive for beat in evidence.beats.values()), default=-math.inf)
    other = (evidence.supervisor or {}).get("pid_ns") not in (None, now.pid_ns)
    return other and 0.0 <= now.mono - alive < _SILENT_S


def running(evidence: Evidence) -> Finding:
    """What it does, and which ranks are stopped or silent."""
    now = evidence.now
    phase, step, place = place_of(evidence)
    stopped = tuple(rank for rank, state in sorted(now.rank_states.items()) if state in ("T", "t"))
    notes, quiet = _silences(evidence, stopped)
    ranks = tuple(sorted({*stopped, *quiet}))
    for rank in stopped:
        pid = evidence.beats[rank].pid if rank in evidence.beats else 0
        notes.insert(0, f"rank {rank} is stopped (SIGSTOP or a debugger)" + (f": kill -CONT {pid}" if pid else ""))
    if now.supervisor_state in ("T", "t"):
        notes.insert(0, "the supervisor is stopped (SIGSTOP): nobody watches; kill -CONT its process")
    if (pause := _paused(evidence)) is not None:
        notes.insert(0, pause)
    if evidence.stop is not None or evidence.named("stop asked"):
        notes.insert(0, "it was asked to stop and is saving")
    sure = now.supervisor_alive is True or bool(now.alive_ranks) or now.owned is True
    watched = evidence.supervisor is not None or not evidence.spec
    if not watched:
        notes.insert(0, "its supervisor's records are gone: whether that lives is not known")
    where_ = "" if sure else f", seen from {now.host} only by its files"
    first = f": {notes[0]}" if notes else ""
    return Finding(
        code="running",
        ranks=ranks,
        time=evidence.last_time,
        confidence=PROVED if sure and watched else LIKELY,
        sentence=f"running{place}{where_}{first}",
        evidence=tuple(notes),
        phase=phase,
        step=step,
    )


def _silences(evidence: Evidence, stopped: tuple[int, ...]) -> tuple[list[str], list[int]]:
    """Ranks whose Python stands still, or that made no progress for half of what their phase allows."""
    notes: list[str] = []
    ranks: list[int] = []
    if not evidence.now.alive_ranks:
        return notes, ranks
    for rank, beat in sorted(evidence.beats.items()):
        if rank in stopped or rank not in evidence.now.alive_ranks:
            continue
        still, silent = evidence.now.mono - beat.alive, evidence.now.mono - beat.reported
        if beat.alive and still > _SILENT_S:
            notes.append(f"rank {rank} has not run any Python for {still:,.0f} s (native code holds the GIL)")
            ranks.append(rank)
        elif silent > limit_s(beat.phase, 0.0, 0.5):
            notes.append(f"{ranks_text((rank,))} made no progress in phase {beat.phase} for {silent:,.0f} s")
            ranks.append(rank)
    return notes, ranks


def _paused(evidence: Evidence) -> str | None:
    changes = evidence.named("paused", "continued", "attempt started")
    if not changes or changes[-1]["event"] != "paused":
        return None
    return f"paused: {changes[-1]['message'] or 'the disk is full; it goes on when there is room'}"
