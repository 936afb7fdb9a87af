"""The verdict on a failed attempt, and the sentence and exit code that a run ends with.

`judge` asks manifests/verdict.py, which knows the whole evidence; should that fail, or where nothing is recorded
(`prepare --regenerate`), what the worker said of itself must do. Used by manifests/supervise.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.event_log import print_line
from manifests.hang import Hang
from manifests.launch_spec import LaunchSpec, log_path
from manifests.verdict_errors import Named, name_error
from manifests.worker_process import Exit
from shared.atomic import free_bytes
from shared.errors import (
    DflashError,
    DiskFull,
    Interrupted,
    NoProgress,
    PathNotWritable,
    SupervisorGone,
    WorkerFailed,
    WorkerHung,
    WorkerKilled,
    error_classes,
)

if TYPE_CHECKING:
    from manifests.evidence import Evidence
    from manifests.verdict import Verdict

_CODES = {
    "DiskFull": "disk.full",
    "NonFinite": "data.nonfinite",
    "CompileContract": "compile.contract",
    "StoreDamaged": "data.corrupt",
    "Interrupted": "sig.term.external",
    "SupervisorGone": "sup.killed",
}
AGAIN = "run the same command again to continue from what is finished"


@dataclass(frozen=True)
class Judged:
    """A verdict as far as the supervisor needs it."""

    code: str
    rank: int | None
    exit_code: int
    sentence: str = ""
    confidence: str = "unknown"
    verdict: dict[str, Any] | None = None
    """The whole of it, for the event."""

    def as_policy(self, code: str, reason: str) -> Judged:
        """The same failure, once too often: `code` is restart.py's, who counted: that is sure, whatever the cause."""
        sentence, sure = (f"{reason}: {self.sentence}", "proved") if self.sentence else (reason, self.confidence)
        found = {"code": code, "exit_code": NoProgress.exit_code, "sentence": sentence, "confidence": sure}
        verdict = None if self.verdict is None else self.verdict | found
        return dataclasses.replace(
            self, code=code, exit_code=NoProgress.exit_code, sentence=sentence, confidence=sure, verdict=verdict
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended: state finished, failed or interrupted; `error` is a class of shared/errors.py or "Bug"."""

    state: str
    exit_code: int = 0
    error: str = ""
    message: str = ""
    code: str = ""
    verdict: dict[str, Any] | None = None

    def exception(self) -> DflashError:
        """What a command raises for it."""
        kind = error_classes().get(self.error, DflashError)
        fault = kind(self.message)
        if fault.exit_code != self.exit_code:
            fault.exit_code = self.exit_code
        return fault


def judge(run_dir: Path, exits: Sequence[Exit], hang: Hang | None, attempt: int, ranks: Sequence[int] | None) -> Judged:
    """The verdict on an attempt by all evidence; `ranks`: of these only (independent workers). Never raises."""
    try:
        from manifests.evidence import collect
        from manifests.verdict import verdict

        evidence = _with_exits(collect(run_dir), exits)
        if ranks is not None:
            evidence = dataclasses.replace(
                evidence,
                events=tuple(event for event in evidence.events if event["detail"].get("rank") in (None, *ranks)),
                endings={rank: ending for rank, ending in evidence.endings.items() if rank in ranks},
            )
        if hang is not None and not evidence.named("hang"):
            return plain(exits, hang)
        return _judged(verdict(evidence, attempt))
    except Exception as error:  # noqa: BLE001 - a fault of the judge must not become the run's
        print_line(f"no verdict: {type(error).__name__}: {error}")
        return plain(exits, hang)


def _with_exits(evidence: Evidence, exits: Sequence[Exit]) -> Evidence:
    """The evidence with what this process saw itself: a folder that was moved or unmounted gives nothing of it back.

    Without, a SIGKILL that the supervisor had seen was "nothing on record says how".
    """
    known = {(event["detail"].get("rank"), event["detail"].get("pid")) for event in evidence.named("worker ended")}
    unread = [_event_of(exit) for exit in exits if (exit.rank, exit.pid) not in known]
    events = sorted((*evidence.events, *unread), key=lambda event: event["detail"].get("mono", math.inf))
    return dataclasses.replace(evidence, events=tuple(events)) if unread else evidence


def _event_of(exit: Exit) -> dict[str, Any]:
    """A worker's end as manifests/crew.py writes it down, without what it asks of the host."""
    seen = ("phase", "done", "total", "unit", "saved")
    detail = {name: getattr(exit.beat, name) for name in seen} if exit.beat is not None else {}
    detail |= {"attempt": exit.attempt, "rank": exit.rank, "pid": exit.pid, "exit_code": exit.code}
    detail |= {"signal": exit.signal, "mono": exit.mono, "ending": exit.ending, "asked": exit.asked}
    return {"event": "worker ended", "message": "", "time": time.time(), "detail": detail}


def not_started(run_dir: Path, rank: int, error: OSError | DflashError, said: str) -> Judged:
    """The verdict on a worker that could not be started: what the supervisor itself met with."""
    from manifests.verdict import named
    from manifests.verdict_finding import PROVED, UNKNOWN, Finding

    full = isinstance(error, DiskFull)
    code, confidence = ("disk.full", PROVED) if full else (UNKNOWN, UNKNOWN)
    own = error.exit_code if isinstance(error, DflashError) else WorkerFailed.exit_code
    finding = Finding(
        code=code, confidence=confidence, ranks=(rank,), sentence=said, time=time.time(), evidence=(said,)
    )
    found = dataclasses.replace(named(str(run_dir), finding), exit_code=own)
    return _judged(found)


def _judged(found: Verdict) -> Judged:
    return Judged(
        code=found.code,
        rank=found.ranks[0] if found.ranks else None,
        exit_code=found.exit_code,
        sentence=found.sentence,
        confidence=found.confidence,
        verdict=found.as_dict(),
    )


def plain(exits: Sequence[Exit], hang: Hang | None = None) -> Judged:
    """What the first bad ending, or the hang, alone says."""
    if hang is not None:
        sentence = f"worker {hang.rank} made no progress for longer than its phase allows"
        return Judged(hang.code, hang.rank, WorkerHung.exit_code, sentence)
    first = first_bad(exits)
    if first is None:
        return Judged("unknown", None, WorkerFailed.exit_code)
    kind = _kind_of(first)
    if kind is not None:
        code = _CODES.get(kind.__name__) or "refused." + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
        return Judged(code, first.rank, kind.exit_code, first.message, "proved")
    if first.signal is not None:
        return Judged(f"sig.{first.signal}", first.rank, WorkerKilled.exit_code)
    code = "py.exception" if first.error else "py.exit0_undone" if first.code == 0 else "py.exit_code"
    return Judged(code, first.rank, WorkerFailed.exit_code, first.message)


def _kind_of(exit: Exit) -> type[DflashError] | None:
    """The class of the user's fault that a worker ended with, if it was one."""
    if exit.error in error_classes():
        return error_classes()[exit.error]
    if exit.ending is None:  # it had no place to write its sentence: the code alone carries the class
        return next((kind for kind in (DiskFull, PathNotWritable) if exit.code == kind.exit_code), None)
    return None


def only_lost_peers(exits: Sequence[Exit]) -> bool:
    """Whether all that failed so far lost a peer: the one that failed first is still on its way out.

    A killed process closes its connections first; giving a GPU's memory back, or 200 GB, then takes it seconds.
    """
    bad = [exit for exit in exits if not exit.well]
    return bool(bad) and all(exit.error and _named(exit).cascade for exit in bad)


def failed_to_stop(exits: Sequence[Exit]) -> Exit | None:
    """Who failed when it was asked to save and leave; not who left, was killed by us, or lost such a peer."""
    for exit in sorted(exits, key=lambda exit: exit.mono):
        ours = exit.asked and exit.signal in (signal.SIGTERM, signal.SIGKILL)
        # By the code alone where a full disk took no sentence of it.
        mute = not exit.error and exit.code == Interrupted.exit_code
        left = exit.well or mute or exit.error in (Interrupted.__name__, SupervisorGone.__name__)
        if not (ours or left or (exit.error and _named(exit).cascade)):
            return exit
    return None


def _named(exit: Exit) -> Named:
    return name_error(exit.error, exit.message, str((exit.ending or {}).get("traceback") or ""))


def first_bad(exits: Sequence[Exit]) -> Exit | None:
    """The earliest bad ending that was not of our making; else the earliest bad one."""
    bad = sorted((exit for exit in exits if not exit.well), key=lambda exit: exit.mono)
    return next((exit for exit in bad if not exit.asked), bad[0] if bad else None)


def failure(spec: LaunchSpec, exits: Sequence[Exit], judged: Judged, reason: str = "") -> Outcome:
    """The end of a run by a fault: the worker's own sentence where it has one, else what is known of its end."""
    named = next((exit for exit in exits if exit.rank == judged.rank and not exit.well), None) or first_bad(exits)
    kind = _kind_of(named) if named is not None else None
    said = f" ({reason})" if reason else ""
    if named is not None and kind is not None and judged.exit_code in (kind.exit_code, WorkerFailed.exit_code):
        message = named.message or _without_sentence(spec, named)
        state = "interrupted" if issubclass(kind, Interrupted) else "failed"
        return Outcome(state, kind.exit_code, kind.__name__, message + said, judged.code, judged.verdict)
    classes = {kind.exit_code: name for name, kind in sorted(error_classes().items()) if name != "SupervisorGone"}
    error = classes.get(judged.exit_code, "WorkerFailed")
    message = f"{_what(spec, named, judged)}{said}; {_where(spec, named)}{AGAIN}"
    return Outcome("failed", judged.exit_code or WorkerFailed.exit_code, error, message, judged.code, judged.verdict)


def _what(spec: LaunchSpec, named: Exit | None, judged: Judged) -> str:
    if judged.verdict is not None and judged.sentence:
        sure = "" if judged.code == "unknown" else f" ({judged.code}, {judged.confidence})"
        return f"{spec.role}: {judged.sentence}{sure}"
    if named is None or (named.asked and judged.sentence):
        return f"{spec.role}: {judged.sentence or 'failed'}"
    said = f": {named.message}" if named.message else ""
    return f"{spec.role} worker {named.rank} of {spec.num_workers} ended by {named.how()}{said}"


def _where(spec: LaunchSpec, named: Exit | None) -> str:
    log = f"its log: {log_path(spec.run_dir, spec.role, named.rank)}; " if named is not None else ""
    return log + (f"`dflash why {spec.run_dir}` tells more; " if spec.run_id else "")


def _without_sentence(spec: LaunchSpec, named: Exit) -> str:
    return (
        f"{spec.role} worker {named.rank} could not write in {spec.run_dir} ({free_bytes(spec.run_dir):,} bytes "
        "free); make room or change its permissions, then run the same command again"
    )
