"""The values between evidence and verdict: how one worker ended, and what one anomaly is called.

Made and judged by the other verdict modules; read manifests/verdict.py first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole

PROVED, LIKELY, UNKNOWN = "proved", "likely", "unknown"
# The supervisor looks ten times a second: a death lies at most this long before it was noticed.
NOTICED_WITHIN_S = 0.15
# What a crash says last, its native backtrace left out; NCCL's watchdog alone writes a dozen lines.
_LAST_LINES = 30
# A heart that beats once a second has stopped at most this long after its last beat.
BEATS_EVERY_S = 1.5
_ONE_BOOT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Death:
    """One worker's end. `seen` says who tells of it: "supervisor", the worker "itself", or only its "silence"."""

    rank: int
    seen: str
    attempt: int = 0
    pid: int = 0
    mono: float | None = None
    """When it was noticed, monotonic seconds."""
    time: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    ending: dict[str, Any] = field(default_factory=dict)
    phase: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    saved: float | None = None
    peak_memory: float | None = None
    beat_age: float | None = None
    oom_before: dict[str, Any] = field(default_factory=dict)
    oom_after: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    shm_free: int | None = None
    asked: bool = False
    last_lines: tuple[str, ...] = ()
    fault_lines: tuple[str, ...] = ()

    @property
    def error(self) -> str:
        """The class of what ended it, "" when it wrote none."""
        return str(self.ending.get("error") or "")

    @property
    def message(self) -> str:
        """The sentence of what ended it."""
        return str(self.ending.get("message") or "")

    @property
    def clean(self) -> bool:
        """Whether it did its work and said so: exit 0 alone proves nothing."""
        return self.exit_code in (0, None) and self.signal is None and self.ending.get("code") == 0 and not self.error

    @property
    def span(self) -> tuple[float, float] | None:
        """Between which monotonic times it ended: by its own clock when it wrote an ending, else as it was noticed."""
        if self.mono is None:
            return None
        if self.seen != "supervisor":
            return self.mono, self.mono + (BEATS_EVERY_S if self.seen == "silence" else 0.0)
        ended = number(self.ending.get("ended"))
        if ended is not None and self.time is not None and 0.0 <= self.time - ended <= 30.0:
            at = self.mono - (self.time - ended)
            return at, at
        return self.mono - NOTICED_WITHIN_S, self.mono

    @property
    def where(self) -> str:
        """Phase and count, as the end of a sentence."""
        return where(self.phase, self.done, self.total, self.unit)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An anomaly with a name. `cascade`: what it looks like follows from something else, so it is no root."""

    code: str
    ranks: tuple[int, ...] = ()
    span: tuple[float, float] | None = None
    time: float | None = None
    confidence: str = PROVED
    sentence: str = ""
    evidence: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    advice: str = ""
    cascade: bool = False
    grade: int = 2
    """How direct the evidence is: 2 an exception, a signal, a hang; 1 an exit code; 0 what came after a stop."""
    phase: str = ""
    step: float | None = None
    exit_code: int | None = None
    short: str = ""
    """A few words for the list of consequences."""


def where(phase: str, done: float | None, total: float | None, unit: str) -> str:
    """ " in phase step at step 1,204 of 10,000", with the space before it; "" when nothing is known."""
    if not phase:
        return ""
    text = f" in phase {phase}"
    if done is None or not unit:
        return text
    of = f" of {total:,.0f}" if total is not None else ""
    return f"{text} at step {done:,.0f}{of}" if unit == "steps" else f"{text} at {done:,.0f}{of} {unit}"


def gib(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """ "rank 3", "ranks 0 and 1", "ranks 0-7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def deaths(evidence: Evidence, attempt: int | None) -> list[Death]:
    """The ends of this attempt's workers, of all attempts for None, in the order in which they were noticed.

    Where the supervisor recorded none (it was killed, its records are gone, there was no supervisor), what the worker
    itself wrote counts.
    """
    found = [_of_event(event) for event in evidence.named("worker ended")]
    seen = {(death.rank, death.pid) for death in found}
    for rank, ending in evidence.endings.items():
        if (rank, whole(ending.get("pid"))) not in seen:
            found.append(_of_ending(evidence, rank, ending))
    chosen = [death for death in found if attempt is None or death.attempt == attempt]
    return sorted(chosen, key=lambda death: (death.mono is None, death.mono or 0.0, death.time or 0.0, death.rank))


def silent(evidence: Evidence, known: list[Death]) -> list[Death]:
    """Workers of the newest attempt that are gone without a word: a heartbeat that stopped, no process, no ending."""
    told = {(death.rank, death.pid) for death in known}
    found = []
    for rank, beat in evidence.beats.items():
        if (rank, beat.pid) in told or rank in evidence.now.alive_ranks:
            continue
        found.append(
            Death(
                rank=rank,
                seen="silence",
                attempt=beat.attempt,
                pid=beat.pid,
                mono=beat.alive if beat.alive and _anchors(evidence) else None,
                time=beat.time or None,
                phase=beat.phase,
                done=beat.done,
                total=beat.total,
                unit=beat.unit,
                last_lines=log_of(evidence, rank),
                fault_lines=evidence.faults.get(rank, ()),
            )
        )
    return found


def log_of(evidence: Evidence, rank: int) -> tuple[str, ...]:
    """The last lines of one worker's log; the frames of native backtraces were left out when it was read."""
    return evidence.logs.get(f"{evidence.role}-{rank}.log", ())[-_LAST_LINES:]


def _of_event(event: dict[str, Any]) -> Death:
    detail = event["detail"]
    ending = _object(detail.get("ending"))
    return Death(
        rank=whole(detail.get("rank")),
        seen="supervisor",
        attempt=whole(detail.get("attempt")),
        pid=whole(detail.get("pid")),
        mono=number(detail.get("mono")),
        time=number(detail.get("t")) or event["time"],
        exit_code=_optional(detail.get("exit_code")),
        signal=_optional(detail.get("signal")) or None,
        ending=ending,
        phase=str(detail.get("phase") or ending.get("phase") or ""),
        done=number(detail.get("done")),
        total=number(detail.get("total")),
        unit=str(detail.get("unit") or ""),
        saved=number(detail.get("saved")),
        peak_memory=number(detail.get("peak_memory")),
        beat_age=number(detail.get("beat_age")),
        oom_before=_object(detail.get("oom_before")),
        oom_after=_object(detail.get("oom_after")),
        memory=_object(detail.get("memory")),
        shm_free=_optional(detail.get("shm_free")),
        asked=detail.get("asked") is True,
        last_lines=_lines(detail.get("last_lines")),
        fault_lines=_lines(detail.get("fault_lines")),
    )


def _of_ending(evidence: Evidence, rank: int, ending: dict[str, Any]) -> Death:
    beat = evidence.beats.get(rank)
    return Death(
        rank=rank,
        seen="itself",
        attempt=whole(ending.get("attempt")),
        pid=whole(ending.get("pid")),
        mono=_monotonic(evidence, number(ending.get("ended"))),
        time=number(ending.get("ended")),
        exit_code=_optional(ending.get("code")),
        ending=ending,
        phase=str(ending.get("phase") or (beat.phase if beat else "")),
        done=number(ending.get("done")),
        total=number(ending.get("total")),
        unit=str(ending.get("unit") or ""),
        last_lines=log_of(evidence, rank),
        fault_lines=evidence.faults.get(rank, ()),
    )


def _anchors(evidence: Evidence) -> list[tuple[float, float]]:
    """Moments whose wall and monotonic time are both on record; none where those are of several machines' clocks."""
    known = [(e["detail"].get("t"), e["detail"].get("mono")) for e in evidence.events]
    known += [(sample.get("t"), sample["mono"]) for sample in evidence.samples]
    known += [(beat.started, beat.phase_since) for beat in evidence.beats.values() if beat.started]
    found = [
        (float(wall), float(mono)) for wall, mono in known if number(wall) is not None and number(mono) is not None
    ]
    boots = [wall - mono for wall, mono in found]
    # Under torchrun ranks of two nodes write here; machines that booted within a minute of each other pass for one.
    return found if evidence.supervised or not boots or max(boots) - min(boots) <= _ONE_BOOT_S else []


def _monotonic(evidence: Evidence, wall: float | None) -> float | None:
    """The monotonic time of a moment that has only a wall time, by the nearest moment that has both."""
    nearest = min(_anchors(evidence), key=lambda anchor: abs(anchor[0] - (wall or 0.0)), default=None)
    return None if wall is None or nearest is None else nearest[1] + wall - nearest[0]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _optional(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _lines(value: Any) -> tuple[str, ...]:
    return tuple(str(line) for line in value) if isinstance(value, list | tuple) else ()
