"""A run that stopped because somebody asked: who that was, and what of its work was saved by then.

A person asks by a file that says who it is, or by `dflash stop`'s signal where the folder takes no file; all other
signals are from outside. Used by manifests/verdict.py.
"""

from __future__ import annotations

from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.stop_requests import code_of, is_stop_command
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Finding
from manifests.verdict_host import place_of
from manifests.verdict_root import last_attempt
from shared.errors import Interrupted

# shared/kernel.py keeps 200 characters of a command line: an interpreter and a script of long paths fill them.
_CUT_AT, _PATHS = 200, 2


def stopped(evidence: Evidence, event: dict[str, Any] | None, record: dict[str, Any] | None = None) -> Finding:
    """Somebody asked for it: a person by the command, or a signal to the supervisor."""
    by = event["detail"].get("by") if event is not None else evidence.stop
    by = by if isinstance(by, dict) else {}
    how, kept = _kept(evidence)
    if by.get("now") or (event is not None and event["detail"].get("now") is True):
        how = "stopped at once"
    phase, step, place = place_of(evidence)
    if by:
        code, confidence, sentence, facts = _asked(by, how)
    else:
        message = str((record or {}).get("message") or "")
        # By a person, a scheduler, a signal: the state of the record says no more.
        code, confidence, facts = UNKNOWN, UNKNOWN, ()
        sentence, kept = "stopped on request; who asked is not on record", f": {message}" if message else kept
    return Finding(
        code=code,
        confidence=confidence,
        sentence=f"{sentence}{place}{kept}",
        time=event["time"] if event is not None else number((record or {}).get("time")),
        phase=phase,
        step=step,
        evidence=facts,
        exit_code=Interrupted.exit_code,
    )


def _asked(by: dict[str, Any], how: str) -> tuple[str, str, str, tuple[str, ...]]:
    """(code, confidence, sentence, evidence) of one request."""
    signal = str(by.get("signal") or "")
    if not signal:
        at = f"{by.get('user') or 'somebody'}@{by.get('host') or 'unknown'}" + (
            f" on {by['tty']}" if by.get("tty") else ""
        )
        facts = (f"a request to stop by {at}, process {by.get('pid')}",)
        return "user.stop", PROVED, f"{how} by {at} ({by.get('via') or 'a request'})", facts
    sender, command = by.get("sender_pid"), str(by.get("sender_command") or "")
    who = f" from process {sender} ({command or 'gone since'})" if sender else "; its sender is not on record"
    facts = (f"the supervisor noted {signal}{who}",)
    if is_stop_command(command):
        user = f", user {by['sender_uid']}" if by.get("sender_uid") is not None else ""
        sentence = f"{how} by `dflash stop` (process {sender}{user}; by {signal}, for the folder took no request)"
        return "user.stop", PROVED, sentence, facts
    # Without the sender's whole command it may have been a person's `dflash stop` on a disk that took no request.
    known = bool(command) and not (len(command) >= _CUT_AT and len(command.split()) <= _PATHS)
    code = code_of(by) if signal in ("SIGTERM", "SIGINT") else "sig.term.external"
    return code, PROVED if known else LIKELY, f"the supervisor got {signal}{who}; the run {how}", facts


def _kept(evidence: Evidence) -> tuple[str, str]:
    """("stopped" or "stopped after saving", the end of a sentence): only what heartbeats say, seen by one or another.

    A run that was stopped in its imports, or while it waited for room at step 59 with a checkpoint of step 40, was said
    to have saved.
    """
    seen = _reports(evidence)
    saved = _saved_by_rank(seen)
    newest = max(saved.values(), default=None)
    if evidence.independent:
        blocks = sum(saved.values())
        if blocks:
            return "stopped", f"; {blocks:,.0f} finished blocks are saved"
        complete = evidence.num_workers > 0 and {rank for rank, *_ in seen} >= set(range(evidence.num_workers))
        return "stopped", "; no finished block is on record" if complete else ""
    attempt = last_attempt(evidence)
    steps = [done for _, number_, unit, done, _ in seen if unit == "steps" and number_ == attempt]
    if newest and steps and newest >= max(steps):
        return "stopped after saving", ""
    if newest:
        return "stopped", f"; the newest save on record is that of step {newest:,.0f}"
    # Rank 0 saves: without its reports nothing can be said against it.
    return "stopped", "; no save is on record" if any(rank == 0 for rank, *_ in seen) else ""


def _reports(evidence: Evidence) -> list[tuple[int, int, str, float, float | None]]:
    """(rank, attempt, unit, done, saved) from each heartbeat, and from those that the supervisor read at an end."""
    seen = [(rank, b.attempt, b.unit, b.done, b.saved) for rank, b in sorted(evidence.beats.items())]
    for event in evidence.named("worker ended"):
        detail = event["detail"]
        if isinstance(detail.get("phase"), str) and (done := number(detail.get("done"))) is not None:
            report = (str(detail.get("unit") or ""), done, number(detail.get("saved")))
            seen.append((whole(detail.get("rank")), whole(detail.get("attempt")), *report))
    return seen


def _saved_by_rank(seen: list[tuple[int, int, str, float, float | None]]) -> dict[int, float]:
    """The most that each rank ever reported as durable."""
    most: dict[int, float] = {}
    for rank, _, _, _, saved in seen:
        if saved is not None:
            most[rank] = max(saved, most.get(rank, 0.0))
    return most
