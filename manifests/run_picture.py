"""What a supervised run is doing, or how it was lost, as plain values: the part of `dflash status` about processes.

Made from the evidence of manifests/evidence.py and, when nothing lives any more, the verdict over it; read by
status.py, printed by status_text.py. Its keys are what `dflash status --json` promises. Nothing waits, writes or locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number
from manifests.stop_requests import told
from manifests.verdict import verdict
from manifests.verdict_host import elsewhere
from manifests.verdict_living import is_running
from shared.phases import DONE, WAIT_FOR_ROOM
from shared.progress import Snapshot, combine, duration, line, readable_size

LIVING = ("running", "paused", "stopping")
"""The states in which processes are at work."""
SILENT_S = 10.0
"""Below this a rank's silence is the rhythm of saving and evaluating."""
_LIVING_LINES, _LOST_LINES = 3, 8


@dataclass(frozen=True)
class RankPicture:
    """One worker: `silent_s` is the time since its last progress, `state` the kernel's letter ("" when unknown)."""

    rank: int
    pid: int
    phase: str
    done: float
    total: float | None
    unit: str
    silent_s: float
    state: str
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class RunPicture:
    """One run of `train` or `extract`: counts of the present phase, times in seconds, verdict and GPUs as objects."""

    run_id: str
    host: str
    exit_code: int | None = None
    phase: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    rate: float | None = None
    eta_s: float | None = None
    attempt: int = 0
    restarts: int = 0
    last_sign_s: float | None = None
    """Since the newest thing that any of its processes wrote."""
    ranks: Sequence[RankPicture] = ()
    stop: Mapping[str, Any] | None = None
    paused: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None
    log_rank: int | None = None
    log_lines: Sequence[str] = ()
    uses_gpus: bool = False
    gpus: Sequence[Mapping[str, Any]] = ()
    gpus_missing: str = ""
    gaps: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def open_run(evidence: Evidence) -> tuple[str, str, RunPicture]:
    """(state, sentence, picture) of a run whose newest record says that it started and not how it ended.

    States: running, paused, stopping, lost; unknown for a run of another host without a sign of life.
    """
    assert evidence.run is not None
    ranks = _ranks(evidence)
    shot = combine([evidence.beats[rank] for rank in sorted(evidence.beats)], summed=evidence.independent)
    state = state_of(evidence)
    ended = evidence.named("supervisor ended")
    if state == "lost" and ended:  # it came to its end, on a disk that took no record of it
        state = str(ended[-1]["detail"].get("state") or state)
    stop, paused = _stop(evidence), _paused(evidence)
    orphaned = evidence.now.supervisor_alive is False
    found = verdict(evidence) if orphaned or state not in LIVING else None
    sentence = _living_sentence(evidence, state, shot, stop, paused)
    if found is not None and state not in LIVING:
        sentence = found.sentence
    if elsewhere(evidence):
        sentence = f"on {_host(evidence)}, last sign of life {_ago(last_sign_s(evidence))}: {sentence}"
    rank = found.ranks[0] if found and found.ranks else _interesting(ranks)
    lines = evidence.logs.get(f"{evidence.role}-{rank}.log", ())[-(_LIVING_LINES if state in LIVING else _LOST_LINES) :]
    return state, sentence, RunPicture(
        run_id=str(evidence.run["run_id"]),
        host=_host(evidence),
        phase=shot.phase if shot else "",
        done=shot.done if shot else None,
        total=shot.total if shot else None,
        unit=shot.unit if shot else "",
        rate=shot.rate if shot and found is None else None,
        eta_s=shot.eta_s if shot and found is None else None,
        attempt=max((beat.attempt for beat in evidence.beats.values()), default=0),
        restarts=len(evidence.named("restart")),
        last_sign_s=last_sign_s(evidence),
        ranks=ranks,
        stop=stop,
        paused=paused if state == "paused" else None,
        verdict=found.as_dict() if found else None,
        log_rank=rank if lines else None,
        log_lines=lines,
        uses_gpus=_detail(evidence, "config").get("device") != "cpu",
        gaps=evidence.gaps,
    )  # fmt: skip


def judged_run(evidence: Evidence) -> tuple[str, RunPicture]:
    """(sentence, picture) of a run that has an ending on record, judged from its evidence."""
    assert evidence.run is not None
    found = verdict(evidence)
    return found.sentence, RunPicture(
        run_id=str(evidence.run["run_id"]),
        host=_host(evidence),
        exit_code=(evidence.ended or {}).get("exit_code"),
        restarts=len(evidence.named("restart")),
        verdict=found.as_dict(),
        gaps=evidence.gaps,
    )


def state_of(evidence: Evidence) -> str:
    """Whether an unended run lives: by the folder's lock, its processes and, on another host, its signs of life."""
    now = evidence.now
    if not (now.owned or now.alive_ranks or is_running(evidence)):
        return "unknown" if elsewhere(evidence) else "lost"
    if now.supervisor_alive is False or _stop(evidence) is not None:
        return "stopping"
    return "paused" if _paused(evidence) is not None else "running"


def last_sign_s(evidence: Evidence) -> float | None:
    """Seconds since the newest thing that the run wrote; by the monotonic clock where that can be compared."""
    if _same_boot(evidence):
        times = [beat.alive for beat in evidence.beats.values()] + [evidence.last_mono or 0.0]
        return max(0.0, evidence.now.mono - max(times))
    last = evidence.last_time
    return None if last is None else max(0.0, evidence.now.time - last)


def _same_boot(evidence: Evidence) -> bool:
    """Whether monotonic times of the run can be compared with now."""
    return evidence.now.boot_id is not None and (evidence.supervisor or {}).get("boot") == evidence.now.boot_id


def _ranks(evidence: Evidence) -> tuple[RankPicture, ...]:
    same_boot = _same_boot(evidence)
    found = []
    for rank, beat in sorted(evidence.beats.items()):
        # Of several machines without a supervisor, only the clock of a rank that lives here is known to be this one's.
        comparable = same_boot or rank in evidence.now.alive_ranks
        silent = evidence.now.mono - beat.reported if comparable else evidence.now.time - beat.time
        state = evidence.now.rank_states.get(rank, "")
        counts = (beat.phase, beat.done, beat.total, beat.unit)
        found.append(RankPicture(rank, beat.pid, *counts, max(0.0, silent), state, state in ("T", "t")))
    return tuple(found)


def _interesting(ranks: Sequence[RankPicture]) -> int:
    """The rank whose log is shown: a stopped one, one that is silent for long, or the first."""
    at_work = [rank for rank in ranks if rank.phase not in (DONE, WAIT_FOR_ROOM)] or list(ranks)
    order = {
        rank.rank: (rank.stopped, rank.silent_s if rank.silent_s >= SILENT_S else 0, -rank.rank) for rank in at_work
    }
    return max(order, key=order.__getitem__, default=0)


def _living_sentence(
    evidence: Evidence,
    state: str,
    shot: Snapshot | None,
    stop: Mapping[str, Any] | None,
    paused: Mapping[str, Any] | None,
) -> str:
    at = line("", shot).removeprefix(": ") if shot else "no worker has reported yet"
    if evidence.now.supervisor_alive is False:
        ranks = ", ".join(map(str, evidence.now.alive_ranks)) or "its last"
        return f"its supervisor is gone, so rank {ranks} will save and leave; {at}"
    if state == "stopping" and stop is not None:
        return f"asked to stop by {told(dict(stop))}; {at}"
    if state == "paused" and paused is not None:
        free, needed = (_size(paused.get(name)) for name in ("free", "needed"))
        return f"the disk is full: {free} free, it goes on by itself at {needed}; {at}"
    if evidence.now.supervisor_state in ("T", "t"):
        return f"its supervisor is stopped by a signal and watches nothing; {at}"
    return at


def _stop(evidence: Evidence) -> Mapping[str, Any] | None:
    """The request that the run was asked with, also one that the supervisor has not read yet."""
    asked = evidence.named("stop asked")
    by = asked[-1]["detail"].get("by") if asked else None
    if isinstance(by, dict):
        return by
    begun = float((evidence.run or {}).get("time", 0.0))
    asked_at = number((evidence.stop or {}).get("time"))
    return evidence.stop if asked_at and asked_at > begun else None  # an older one was meant for an earlier run


def _paused(evidence: Evidence) -> Mapping[str, Any] | None:
    changes = evidence.named("paused", "continued", "attempt started")
    return changes[-1]["detail"] if changes and changes[-1]["event"] == "paused" else None


def _host(evidence: Evidence) -> str:
    return str((evidence.supervisor or {}).get("host") or _detail(evidence, "provenance").get("host") or "")


def _detail(evidence: Evidence, name: str) -> dict[str, Any]:
    """A part of the run's first record; empty where another version wrote something else."""
    detail = (evidence.run or {}).get("detail")
    found = detail.get(name) if isinstance(detail, dict) else None
    return found if isinstance(found, dict) else {}


def _size(value: Any) -> str:
    # In gigabytes alone a small disk said "0.0 GB free, it goes on by itself at 0.0 GB".
    return readable_size(value) if isinstance(value, int | float) else "an unknown amount"


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{duration(seconds)} ago"
