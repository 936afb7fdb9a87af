"""A worker that a signal ended: a crash in native code, a full /dev/shm, a kill from outside or for lack of memory.

Used by manifests/verdict_deaths.py; the OOM counters are judged by manifests/verdict_memory.py.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manifests.evidence import Evidence
from manifests.verdict_errors import Named, name_text
from manifests.verdict_finding import LIKELY, PROVED, Death, Finding, gib
from manifests.verdict_memory import judge_kill

_NO_SHM = 1 << 20
_REQUESTS = {int(signal.SIGTERM): "sig.term.external", int(signal.SIGINT): "sig.int.external"}


def by_signal(evidence: Evidence, death: Death, number_: int, others: Sequence[Death]) -> Finding | None:
    """The name of a death by a signal; None when it was ours. `others`: all deaths of the attempt."""
    name = signal_name(number_)
    if death.asked and number_ in (signal.SIGKILL, signal.SIGTERM):
        return None
    if number_ == signal.SIGKILL:
        return _killed(evidence, death, others)
    if number_ in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        code = _REQUESTS.get(number_, "sig.hup")
        sentence = (
            f"rank {death.rank} was ended by {name}{death.where}, before it could save; the sender is not on record"
        )
        return Finding(code=code, sentence=sentence, excluded=("a request of ours: none was sent",))
    said = name_text("\n".join((*death.last_lines, *death.fault_lines))) if number_ == signal.SIGABRT else None
    if said is not None:
        return _native_abort(death, said)
    shm = _shm_full(evidence, death) if number_ == signal.SIGBUS else ""
    stack = crash_lines(death)
    # Whose memory gave out cannot be seen afterwards: what a dead process held in /dev/shm is free again.
    unseen = number_ == signal.SIGBUS and not shm and _last_sample(evidence, death).get("shm_free") is None
    return Finding(
        confidence=LIKELY if unseen else PROVED,
        code="sig.bus.shm" if shm else f"sig.{name.removeprefix('SIG').lower()}",
        sentence=f"rank {death.rank} crashed with {name}{death.where}" + (f": {shm}" if shm else ""),
        evidence=tuple(text for text in (shm, stack, _abort_reason(death)) if text),
        excluded=("a Python exception: it wrote no ending",),
        grade=0 if death.asked else 2,
    )


def _killed(evidence: Evidence, death: Death, others: Sequence[Death]) -> Finding:
    # Two killed workers and one OOM kill between the same two readings: which of them it was cannot be told.
    together = [other for other in others if other.signal == signal.SIGKILL and not other.asked and _near(other, death)]
    before, after = _counters(together or [death], [other for other in others if _well_before(other, death)])
    death = replace(death, oom_before=before, oom_after=after)
    kill = judge_kill(evidence, death, max(1, len(together)))
    crash = "a crash in native code or an exception: SIGKILL comes from the kernel or another process"
    return Finding(
        code=kill.code,
        confidence=kill.confidence,
        sentence=f"rank {death.rank} was killed (SIGKILL){death.where}: {kill.reason}",
        evidence=kill.evidence,
        excluded=(*kill.excluded, crash),
        short="killed",
    )


def _counters(together: Sequence[Death], earlier: Sequence[Death]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The widest readings around deaths that came together, but nothing that an earlier death already accounts for."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for name in ("vmstat", "cgroup"):
        known = [d.oom_before[name] for d in together if isinstance(d.oom_before.get(name), int)]
        later = [d.oom_after[name] for d in together if isinstance(d.oom_after.get(name), int)]
        seen = [d.oom_after[name] for d in earlier if isinstance(d.oom_after.get(name), int)]
        if known:
            before[name] = max(min(known), *seen) if seen else min(known)
        if later:
            after[name] = max(later)
    return before, after


def _near(one: Death, other: Death) -> bool:
    return one.mono is not None and other.mono is not None and abs(one.mono - other.mono) <= 2.0


def _well_before(one: Death, other: Death) -> bool:
    return one.mono is not None and other.mono is not None and one.mono < other.mono - 2.0


def _native_abort(death: Death, said: Named) -> Finding:
    """A library that ends the process when another rank or the GPU failed: its log says which."""
    sentence = f"rank {death.rank} was aborted by a library{death.where}: {_telling_line(death)}"
    return Finding(
        code=said.code,
        confidence=LIKELY,
        cascade=said.cascade,
        sentence=sentence,
        evidence=(f"its log says {_telling_line(death)}",),
        grade=0 if death.asked else 1 if said.waited else 2,
    )


def signal_name(value: int) -> str:
    """SIGSEGV for 11; SIG64 for one without a name."""
    try:
        return signal.Signals(value).name
    except ValueError:
        return f"SIG{value}"


def crash_lines(death: Death) -> str:
    """The innermost Python frame of a crash, from what faulthandler wrote."""
    begun = next((i for i, line in enumerate(death.fault_lines) if line.startswith("Fatal Python error")), None)
    if begun is None:
        return ""
    after = death.fault_lines[begun:]
    current = next((i for i, line in enumerate(after) if line.startswith("Current thread")), 0)
    frame = next((line.strip() for line in after[current:] if line.lstrip().startswith("File ")), "")
    return f"its fault file: {after[0]}{', in ' + frame if frame else ''}"


def _telling_line(death: Death) -> str:
    lines = [*death.last_lines, *death.fault_lines]
    found = next((line.strip() for line in lines if name_text(line) is not None), lines[-1].strip() if lines else "")
    return found[:300]


def _abort_reason(death: Death) -> str:
    telling = ("terminate called", "what():", "free():", "malloc", "corrupted", "Assertion", "double free")
    found = next((line.strip() for line in reversed(death.last_lines) if any(word in line for word in telling)), "")
    return f"its log: {found[:300]}" if found else ""


def _shm_full(evidence: Evidence, death: Death) -> str:
    """What /dev/shm had left around a SIGBUS, "" unless it was nothing: the dead give theirs back at once."""
    last = _last_sample(evidence, death)
    known = [free for free in (death.shm_free, last.get("shm_free")) if isinstance(free, int)]
    total = last.get("shm_total")
    if not known or min(known) > max(_NO_SHM, (total if isinstance(total, int) else 0) // 100):
        return ""
    of = f" of {gib(total)}" if isinstance(total, int) else ""
    return f"/dev/shm had {gib(min(known))}{of} left"


def disk_free(evidence: Evidence, death: Death) -> int | None:
    free = _last_sample(evidence, death).get("disk_free")
    return free if isinstance(free, int) else None


def _last_sample(evidence: Evidence, death: Death) -> dict[str, Any]:
    """The newest sample before a death, none when it is older than five seconds."""
    if death.mono is None:
        return evidence.samples[-1] if evidence.samples else {}
    before = [sample for sample in evidence.samples if sample["mono"] <= death.mono + 0.1]
    return before[-1] if before and before[-1]["mono"] > death.mono - 5.0 else {}
