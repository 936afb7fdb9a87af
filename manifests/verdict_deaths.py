"""What one worker's end is called, judged by itself: signal, exit code, the ending it wrote, its fault file, its log.

Which of several is the root is decided by manifests/verdict_root.py. Texts of exceptions are judged by
manifests/verdict_errors.py, SIGKILLs by manifests/verdict_memory.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict_errors import from_log, name_error
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Death, Finding, gib
from manifests.verdict_host import elsewhere
from manifests.verdict_signals import by_signal, crash_lines, disk_free, signal_name
from shared.ending import KEYBOARD_CODE
from shared.errors import DiskFull, Interrupted, PathNotWritable, error_classes

# With these a worker leaves after writing an ending: one that is not there may have been lost.
_OF_ENDINGS = {1, KEYBOARD_CODE} | {kind.exit_code for kind in error_classes().values()}
_SUPERVISOR = "manifests.supervisor"
_LAUNCHERS = ("torchrun", "torch.distributed", "torch/distributed", "slurmstepd", "srun", "mpirun", "accelerate")
_NO_ROOM = 64 << 20
_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
}


def judge(evidence: Evidence, death: Death, others: Sequence[Death] = ()) -> Finding | None:
    """The name of one death; None for a worker that did its work, or that we had told to leave."""
    if death.clean:
        return None
    finding = _named(evidence, death, others)
    if finding is None:
        return None
    return replace(
        finding,
        ranks=(death.rank,),
        span=death.span,
        time=number(death.ending.get("ended")) or death.time,
        phase=death.phase,
        step=death.done,
        evidence=(_seen(evidence, death), *finding.evidence),
        short=finding.short or _how(death),
    )


def not_started(evidence: Evidence, attempt: int | None) -> list[Finding]:
    """Workers that never came to be: no log to be had for one, or no process. Nothing else tells of them."""
    found = []
    for event in evidence.named("worker not started"):
        detail, mono = event["detail"], number(event["detail"].get("mono"))
        if attempt not in (None, whole(detail.get("attempt"))):
            continue
        rank, error = whole(detail.get("rank")), str(detail.get("error") or "")
        full = error == DiskFull.__name__
        said = event["message"] or f"worker {rank} could not be started{': ' + error if error else ''}"
        finding = Finding(
            code="disk.full" if full else "unknown",
            ranks=(rank,),
            span=None if mono is None else (mono, mono),
            time=number(detail.get("t")) or event["time"],
            confidence=PROVED if full else UNKNOWN,
            sentence=said,
            evidence=("the supervisor could not start it",),
            exit_code=DiskFull.exit_code if full else None,
            short="could not be started",
        )
        found.append(finding)
    return found


def _named(evidence: Evidence, death: Death, others: Sequence[Death]) -> Finding | None:
    if death.error:
        return _by_ending(evidence, death)
    if death.signal is not None:
        return by_signal(evidence, death, death.signal, others)
    if death.seen == "silence":
        return _by_silence(evidence, death)
    return _by_exit_code(evidence, death)


def _by_ending(evidence: Evidence, death: Death) -> Finding | None:
    """It wrote how it ended: its own words, which nobody else could have made."""
    if death.error == "SupervisorGone":
        sentence = f"rank {death.rank} left because its supervisor was gone"
        return Finding(code="sup.killed", sentence=sentence, cascade=True, short="left without its supervisor")
    if death.error == "Interrupted":
        return _interrupted(evidence, death)
    if death.error == "SystemExit":
        return _system_exit(death)
    named = name_error(death.error, death.message, str(death.ending.get("traceback") or ""))
    thread = death.ending.get("thread")
    code, said = named.code, _first_line(death)
    if thread and code == "py.exception":
        code = "py.thread_lost"
    who = f"rank {death.rank}" if not thread else f"thread {thread} of rank {death.rank}"
    facts = [f"its ending says {said}"]
    if line := _raised_at(str(death.ending.get("traceback") or "")):
        facts.append(f"raised at {line}")
    if code == "disk.full" and (free := disk_free(evidence, death)) is not None:
        facts.append(f"the run folder's disk had {gib(free)} free in the last sample")
    return Finding(
        code=code,
        cascade=named.cascade,
        confidence=PROVED,
        sentence=f"{who} raised {said}{death.where}",
        evidence=tuple(facts),
        grade=0 if death.asked or _asked_by_us(evidence, death) else 1 if named.waited else 2,
        exit_code=whole(death.ending.get("code")) or None,
        short=f"raised {said}",
    )


def _interrupted(evidence: Evidence, death: Death) -> Finding | None:
    """It was asked to stop, saved and left: by us, or by a signal that somebody sent to it."""
    if death.asked or _asked_by_us(evidence, death):
        return None
    note = _note(death)
    sender = note.get("sender_pid")
    name = str(note.get("name") or "")
    code = {"SIGTERM": "sig.term.external", "SIGINT": "sig.int.external"}.get(name)
    if code is None:
        sentence = f"rank {death.rank} was asked to stop{death.where}; who asked is not on record"
        return Finding(code="unknown", confidence=UNKNOWN, sentence=sentence, cascade=True, short="stopped on request")
    command = str(note.get("sender_command") or "")
    who = f" from process {sender} ({command or 'gone since'})" if sender else ""
    user = f", user {note['sender_uid']}" if sender and note.get("sender_uid") is not None else ""
    return Finding(
        code=code,
        sentence=f"rank {death.rank} got {name}{who}{user}, saved and left{death.where}",
        evidence=(f"the worker noted the sender of {name}: {sender or 'unknown'}{user}",),
        # A launcher of others ends all ranks once one of them failed, and when it is told to: never a root by itself.
        cascade=any(word in command for word in _LAUNCHERS),
        exit_code=Interrupted.exit_code,
        short=f"left after {name}",
    )


def _note(death: Death) -> dict[str, Any]:
    """What the worker wrote down about the signal that asked it to stop."""
    note = death.ending.get("signal")
    return note if isinstance(note, dict) else {}


def _asked_by_us(evidence: Evidence, death: Death) -> bool:
    """Whether that signal came from the run's supervisor: what the worker did after it is no root."""
    note, supervisor = _note(death), (evidence.supervisor or {}).get("pid")
    sender = note.get("sender_pid")
    if sender is not None and (sender == supervisor or _SUPERVISOR in str(note.get("sender_command"))):
        return True
    # On a full disk there is no ending; the line in the log may have had room.
    return any(line.startswith("asked to stop: ") and _SUPERVISOR in line for line in death.last_lines)


def _system_exit(death: Death) -> Finding:
    said = re.search(r"SystemExit\((\d+)\)", death.message)
    undone = (said is not None and said[1] == "0") or death.ending.get("code") == 0
    if undone:
        sentence = f"rank {death.rank} called exit with code 0{death.where}, before its work was done"
        return Finding(code="py.exit0_undone", sentence=sentence, evidence=(f"its ending says {_first_line(death)}",))
    sentence = f"rank {death.rank} called exit with code {death.ending.get('code')}{death.where}"
    return Finding(code="py.exit_code", sentence=sentence, evidence=(f"its ending says {_first_line(death)}",))


def _by_exit_code(evidence: Evidence, death: Death) -> Finding | None:
    code = death.exit_code
    if code is None:
        return None
    if code == 0:
        return Finding(
            code="py.exit0_undone",
            sentence=f"rank {death.rank} exited with 0{death.where} without saying that its work was done",
            evidence=("exit code 0 and no ending that says done",),
            grade=1,
        )
    if code in (DiskFull.exit_code, PathNotWritable.exit_code) and (found := _no_place_to_write(evidence, death, code)):
        return found
    if code == Interrupted.exit_code and not death.asked:
        sentence = f"rank {death.rank} left on request{death.where}; who asked is not on record"
        return Finding(code="unknown", confidence=UNKNOWN, sentence=sentence, cascade=True)
    if code == Interrupted.exit_code:
        return None
    if (logged := from_log(death.last_lines)) is not None:
        return _by_log(evidence, death, logged)
    return Finding(
        code="py.exit_code",
        confidence=LIKELY if code in _OF_ENDINGS else PROVED,
        sentence=f"rank {death.rank} exited with code {code}{death.where} and wrote no ending",
        evidence=(f"exit code {code} and no ending",),
        excluded=("a Python exception that reached the top: it would have been written down",),
        grade=0 if death.asked else 1,
    )


def _by_log(evidence: Evidence, death: Death, logged: dict[str, str | None]) -> Finding | None:
    """The ending is gone; its log still says by which exception: the same name, less sure."""
    found = _by_ending(evidence, replace(death, ending=logged | {"code": death.exit_code}))
    if found is None:
        return None
    facts = (f"its log ends with {str(logged['message'])[:300]}", "it left no ending")
    sure = found.confidence if found.confidence == UNKNOWN else LIKELY
    return replace(found, confidence=sure, evidence=facts, grade=min(found.grade, 1))


def _no_place_to_write(evidence: Evidence, death: Death, code: int) -> Finding | None:
    """Exit 41 or 40 without an ending: our own codes for a disk that refused, whose sentence it refused too."""
    logged = from_log(death.last_lines)
    if logged is not None and logged["error"] in ("DiskFull", "PathNotWritable"):
        return _by_log(evidence, death, logged)
    free = disk_free(evidence, death)
    if code == DiskFull.exit_code and free is not None and free < _NO_ROOM:
        return Finding(
            code="disk.full",
            confidence=LIKELY,
            sentence=f"rank {death.rank} found no room on the disk{death.where}, not even for its ending",
            evidence=(f"exit code {code}, no ending, {gib(free)} free on the run folder's disk in the last sample",),
            exit_code=code,
        )
    return None


def _by_silence(evidence: Evidence, death: Death) -> Finding | None:
    """Nobody saw it end: only its heartbeat stopped. Its fault file may still tell of a crash."""
    crash = next((number_ for text, number_ in _CRASHES.items() if any(text in x for x in death.fault_lines)), None)
    fatal = any(line.startswith("Fatal Python error") for line in death.fault_lines)
    if fatal and crash is not None:
        name = signal_name(crash)
        return Finding(
            code=f"sig.{name.removeprefix('SIG').lower()}",
            confidence=LIKELY,
            sentence=f"rank {death.rank} crashed with {name}{death.where}",
            evidence=(crash_lines(death),),
            grade=1,
        )
    if (logged := from_log(death.last_lines)) is not None:
        return _by_log(evidence, death, logged)
    sentence, fact = f"rank {death.rank} is gone{death.where} without a word: nothing says how it ended", "stopped"
    if elsewhere(evidence):
        sentence = f"rank {death.rank} was last seen{death.where}; from {evidence.now.host} its end cannot be told"
        fact = "is old"
    return Finding(
        code="unknown",
        confidence=UNKNOWN,
        sentence=sentence,
        evidence=(f"its heartbeat {fact}, and it left no ending",),
        grade=1,
    )


def _seen(evidence: Evidence, death: Death) -> str:
    pid = f" (pid {death.pid})" if death.pid else ""
    if death.seen == "supervisor":
        return f"the supervisor saw rank {death.rank}{pid} end: {_how(death)}"
    if death.seen == "itself":
        return f"rank {death.rank}{pid} wrote its own ending; nobody saw its exit code or signal"
    lives = "may live, unseen from here" if elsewhere(evidence) else "lives no more"
    return f"rank {death.rank}{pid} {lives}; its last heartbeat was its last sign"


def _how(death: Death) -> str:
    if death.signal is not None:
        return f"signal {death.signal} ({signal_name(death.signal)})"
    return f"exit code {death.exit_code}" if death.exit_code is not None else "unseen"


def _first_line(death: Death) -> str:
    lines = [text.strip() for text in death.message.splitlines() if text.strip()]
    line = (lines[0] if lines else "")[:300]
    # NCCL says in its first line what failed, and why in the one after "Last error:".
    told = next((i for i, text in enumerate(lines) if i and text.startswith("Last error:")), None)
    if told is not None and (reason := " ".join(lines[told : told + 2]).removeprefix("Last error:").strip()):
        line += f"; last error: {reason[:300]}"
    return line if line.startswith(death.error) else f"{death.error}: {line}" if line else death.error


def _raised_at(traceback: str) -> str:
    """File, line and function of the innermost frame."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in (\S+)', traceback, re.MULTILINE)
    return f"{frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}" if frames else ""
