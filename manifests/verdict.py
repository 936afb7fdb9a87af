"""What happened to a run: one code, the ranks, when, how sure, and why; a pure function of the evidence.

    verdict(collect(run_dir))            the run: running, done, or what ended it
    verdict(collect(run_dir), attempt)   one attempt, as the supervisor asks while it decides about the next

Read in this order: verdict_root.py (root before consequence), verdict_deaths.py (one worker's end), verdict_errors.py
(exceptions), verdict_memory.py (was it memory?), verdict_hangs.py, verdict_stops.py (who asked), verdict_tree.py
(nobody is left), verdict_advice.py.
A wrong name is a bug; "unknown" is an answer. The page around it is manifests/postmortem.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict_advice import advice_on, exit_code_of
from manifests.verdict_errors import name_error
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Finding
from manifests.verdict_host import Signs
from manifests.verdict_living import is_running, running
from manifests.verdict_root import anomalies, clean, last_attempt, root_of
from manifests.verdict_stops import stopped
from manifests.verdict_tree import lost

_POLICY = ("progress.none", "storm")
_OF_THE_HOST = ("host.reboot", "container.restart")
# Classes with which a run may end by several causes.
_SAY_NOTHING = frozenset(
    {"WorkerFailed", "WorkerKilled", "WorkerHung", "OutOfMemory", "GpuFault", "CommunicationFailed", "NoProgress"}
    | {"Interrupted", "SystemExit", "Bug"}
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`code` as listed in the README; `evidence` for it, `excluded` against others, `cascade` what followed."""

    code: str
    ranks: tuple[int, ...] = ()
    time: float | None = None
    """Wall clock, seconds since 1970."""
    confidence: str = UNKNOWN
    sentence: str = ""
    evidence: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    advice: str = ""
    cascade: tuple[str, ...] = ()
    phase: str = ""
    step: float | None = None
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Verdict:
        """What `as_dict` gave, also that of another version: unknown keys are left out, lists become tuples."""
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        listed = {name: tuple(value) for name, value in known.items() if isinstance(value, list | tuple)}
        return cls(**{"code": UNKNOWN, **known, **listed})


def verdict(evidence: Evidence, attempt: int | None = None) -> Verdict:
    """The verdict on a run, or on one attempt of it. Pure: the same evidence gives the same verdict."""
    if attempt is not None:
        return _of_attempt(evidence, attempt)
    if evidence.run is None:
        sentence = "nothing was trained or extracted here, or no record of it can be read"
        return _made(evidence, Finding(code=UNKNOWN, confidence=UNKNOWN, sentence=sentence))
    if evidence.ended is not None:
        return _ended(evidence, str(evidence.ended.get("state")), evidence.ended)
    if is_running(evidence):
        return _made(evidence, running(evidence), earlier(evidence))
    if last := evidence.named("supervisor ended"):
        return _unrecorded_end(evidence, last[-1])
    return _lost(evidence)


def named(run_dir: str, finding: Finding) -> Verdict:
    """The verdict on what the supervisor itself met with and no file tells of."""
    return _made(Evidence(run_dir=run_dir), finding)


def _of_attempt(evidence: Evidence, attempt: int) -> Verdict:
    found = anomalies(evidence, attempt, gone=False)
    root, cascade = root_of(evidence, found, attempt)
    asked = [event for event in evidence.named("stop asked") if _during(evidence, attempt, event)]
    if asked and not _fault_while_stopping(root):
        return _made(evidence, stopped(evidence, asked[-1]), cascade)
    if root is not None:
        return _made(evidence, _with_request(evidence, root, asked), cascade)
    if clean(evidence, attempt):
        return _made(evidence, Finding(code="done", sentence="all ranks did their work"))
    if (stored := _stored(evidence, attempt)) is not None:
        return stored
    sentence = f"attempt {attempt} ended; nothing on record says how"
    return _made(evidence, Finding(code=UNKNOWN, confidence=UNKNOWN, sentence=sentence, evidence=evidence.gaps))


def _named(root: Finding | None) -> bool:
    """Whether something of its own, with a name, went wrong."""
    return root is not None and not root.cascade and root.code != UNKNOWN


def _fault_while_stopping(root: Finding | None) -> bool:
    """A worker that was asked to stop and was killed for its memory instead has not been stopped: it saved nothing."""
    return root is not None and _named(root) and root.grade > 0


def _with_request(evidence: Evidence, root: Finding, asked: Sequence[dict[str, Any]]) -> Finding:
    """The fault, with what it got in the way of."""
    return replace(root, evidence=(*root.evidence, *stopped(evidence, asked[-1]).evidence)) if asked else root


def _during(evidence: Evidence, attempt: int, event: dict[str, Any]) -> bool:
    """Whether an event came after an attempt began and before the next did."""
    at = number(event["detail"].get("mono")) or 0.0
    starts = [
        (number(e["detail"].get("mono")) or 0.0, e["detail"].get("attempt")) for e in evidence.named("attempt started")
    ]
    begun = [number_ for mono, number_ in starts if mono <= at]
    return not starts or (bool(begun) and begun[-1] == attempt)


def _ended(evidence: Evidence, state: str, record: dict[str, Any]) -> Verdict:
    """The run has an ending on record: what it says, and the anomaly behind it."""
    if state == "finished":
        restarts = len(evidence.named("restart"))
        after = f" after {restarts} restarts" if restarts else ""
        done = Finding(code="done", sentence=f"finished{after}", time=number(record.get("time")))
        return _made(evidence, done, earlier(evidence))
    if failed := evidence.named("supervisor failed"):
        sentence = f"the supervisor itself failed: {failed[-1]['message'][:300]}"
        return _made(evidence, Finding(code="py.exception", sentence=sentence, time=failed[-1]["time"]))
    attempt = None if evidence.independent else last_attempt(evidence)
    # A supervisor that recorded any end recorded all: a silent heartbeat counts only where its records are gone.
    gone = not evidence.named("worker ended")
    root, cascade = root_of(evidence, anomalies(evidence, attempt, gone=gone), attempt)
    asked = evidence.named("stop asked")
    if state == "interrupted" and not (_fault_while_stopping(root) if asked else _named(root)):
        noted = None if asked or evidence.stop else _by_record(record)
        if noted is None or noted.code == UNKNOWN:
            noted = stopped(evidence, asked[-1] if asked else None, record)
        return _made(evidence, noted, cascade)
    if (gave_up := _in_vain(evidence, root, record)) is not None:
        return _made(evidence, gave_up, cascade)
    if root is not None and root.code != UNKNOWN:
        return _made(evidence, _with_request(evidence, root, asked), cascade)
    if (stored := _stored(evidence, attempt)) is not None:
        return stored
    said = _by_record(record)
    return _made(
        evidence, said if said and (root is None or said.code != UNKNOWN) else root or _nothing_known(), cascade
    )


def _unrecorded_end(evidence: Evidence, event: dict[str, Any]) -> Verdict:
    """The supervisor came to its end and could not record it where records are: the ring still has it."""
    detail = event["detail"]
    record = {"time": event["time"], "message": event["message"], "exit_code": detail.get("exit_code")}
    return _ended(evidence, str(detail.get("state")), record)


def _lost(evidence: Evidence) -> Verdict:
    """No ending and nobody there: what took it away, or the anomaly after which nothing more was recorded."""
    whole_run = lost(evidence)
    attempt = None if evidence.independent else last_attempt(evidence)
    unsupervised = not evidence.supervised  # torchrun, Slurm: workers alone tell
    root, cascade = root_of(evidence, anomalies(evidence, attempt, gone=unsupervised), attempt)
    asked = evidence.named("stop asked")
    if root is None and asked and whole_run.code == "sup.killed" and _unanswered(evidence):
        unsure = replace(stopped(evidence, asked[-1]), confidence=LIKELY)
        return _made(evidence, unsure, (f"then {whole_run.sentence}",))
    if root is None or not (unsupervised or _unanswered(evidence)):
        return _made(evidence, whole_run, earlier(evidence))
    if unsupervised and (whole_run.code != UNKNOWN or asked):
        return _made(evidence, whole_run, cascade)
    if root.code == UNKNOWN and not unsupervised:
        return _made(evidence, whole_run, cascade)
    if whole_run.code in _OF_THE_HOST:
        return _made(evidence, whole_run, cascade)
    return _made(evidence, root, (*cascade, f"then {whole_run.sentence}"))


def _unanswered(evidence: Evidence) -> bool:
    """Whether a supervised run ended with a failure of its workers, none of which was left when it vanished."""
    signs = Signs.of(evidence)
    if signs.workers or signs.unseen or signs.young or evidence.now.alive_ranks:
        return False
    decided = evidence.named("attempt started", "restart", "paused", "worker ended")
    return bool(decided) and decided[-1]["event"] == "worker ended"


def earlier(evidence: Evidence) -> tuple[str, ...]:
    """The verdicts on earlier attempts: the run went on after them."""
    found = []
    for event in evidence.named("verdict"):
        said = event["detail"].get("verdict")
        if isinstance(said, dict) and said.get("sentence"):
            found.append(f"attempt {whole(event['detail'].get('attempt'))}: {said['sentence']} ({said.get('code')})")
    return tuple(found[-5:])


def _in_vain(evidence: Evidence, root: Finding | None, record: dict[str, Any]) -> Finding | None:
    """The supervisor stopped trying: the same failure again and again, or too many starts."""
    ended = evidence.named("supervisor ended")
    noted = record.get("detail")
    code = ended[-1]["detail"].get("code") if ended else noted.get("code") if isinstance(noted, dict) else None
    gave_up = evidence.named("gave up")
    reason = gave_up[-1]["message"] or str(gave_up[-1]["detail"].get("reason") or "") if gave_up else ""
    if code not in _POLICY:
        code = "progress.none" if "times the same failure" in reason else "storm" if "starts within" in reason else None
    if code is None:
        return None
    which = root.sentence if root is not None else _last_named(evidence)
    return Finding(
        code=str(code),
        ranks=root.ranks if root else (),
        time=root.time if root else number(record.get("time")),
        # A failure that nobody can name may be another each time.
        confidence=PROVED if which else LIKELY,
        sentence=f"{reason or 'stopped trying'}{'; the last time: ' + which if which else ''}",
        evidence=(*earlier(evidence), *(root.evidence if root else ())),
        excluded=root.excluded if root else (),
        phase=root.phase if root else "",
        step=root.step if root else None,
    )


def _last_named(evidence: Evidence) -> str:
    """What the supervisor said of the last failure, before it said that there were too many."""
    said = [event["detail"].get("verdict") for event in evidence.named("verdict")]
    told = [str(v.get("sentence") or "") for v in said if isinstance(v, dict) and v.get("code") not in _POLICY]
    return told[-1] if told else ""


def _by_record(record: dict[str, Any]) -> Finding | None:
    """The run's own last words: the code that the supervisor noted with them, or the class of another fault."""
    message, detail = str(record.get("message") or ""), record.get("detail")
    noted = detail.get("code") if isinstance(detail, dict) else None
    time, own = number(record.get("time")), whole(record.get("exit_code")) or None
    error, _, said = message.partition(": ")
    if isinstance(noted, str) and noted not in ("", UNKNOWN):
        facts = (f"the run's record says {noted}; what that was based on is gone",)
        sentence = (said if error in _SAY_NOTHING else message)[:500]
        return Finding(code=noted, confidence=LIKELY, sentence=sentence, time=time, exit_code=own, evidence=facts)
    if not error.isidentifier() or not error[:1].isupper():
        return None
    if error in _SAY_NOTHING:
        return Finding(code=UNKNOWN, confidence=UNKNOWN, sentence=said or message, time=time)
    named = name_error(error, said)
    if named.cascade:
        return None
    facts = ("the run's own record says so",)
    return Finding(code=named.code, confidence=LIKELY, sentence=message[:500], time=time, exit_code=own, evidence=facts)


def _nothing_known() -> Finding:
    return Finding(code=UNKNOWN, confidence=UNKNOWN, sentence="the run failed; nothing on record says how")


def _stored(evidence: Evidence, attempt: int | None) -> Verdict | None:
    """What the supervisor named at the time, when the evidence for it is gone since."""
    for event in reversed(evidence.named("verdict")):
        said = event["detail"].get("verdict")
        if isinstance(said, dict) and attempt in (None, event["detail"].get("attempt")) and said.get("code") != UNKNOWN:
            return Verdict.from_dict(said)
    return None


def _made(evidence: Evidence, finding: Finding, cascade: tuple[str, ...] = ()) -> Verdict:
    """A finding with what to do about it and the exit code that belongs to it."""
    return Verdict(
        code=finding.code,
        ranks=finding.ranks,
        time=finding.time if finding.time is not None else evidence.last_time,
        confidence=finding.confidence if finding.code != UNKNOWN else UNKNOWN,
        sentence=finding.sentence,
        evidence=finding.evidence,
        excluded=finding.excluded,
        advice=finding.advice or advice_on(evidence, finding),
        cascade=cascade,
        phase=finding.phase,
        step=finding.step,
        exit_code=exit_code_of(finding.code, finding.exit_code),
    )
