"""Nobody is left and nobody said why: reboot, container restart, supervisor killed, or everything at once.

Computed from the last samples and heartbeats and from what the kernel says now, by whoever asks, later. Times are
compared within one boot by the monotonic clock; wall time is only for people. Used by manifests/verdict.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Finding, log_of, ranks_text
from manifests.verdict_host import AGREE_S, Signs, other_host, place_of, rebooted, restarted, run_finding, same_host
from manifests.verdict_memory import memory_before, moved
from shared.phases import DONE, DRAIN

# Counts of a container that lives on go on moving: this long after the end they say nothing about it by themselves.
_COUNTS_S = 60.0


def lost(evidence: Evidence) -> Finding:
    """What took a whole run away: no ending on record, no process of it here."""
    last = Signs.of(evidence)
    if (finding := _supervisor_first(evidence, last)) is not None:
        # It ended then, not when the last of its workers did: that moment is later each time somebody asks.
        return replace(finding, time=evidence.supervisor_time or finding.time)
    for judge in (_ended_by_itself, other_host, rebooted, restarted):
        if (finding := judge(evidence, last)) is not None:
            return finding
    if not evidence.supervised:
        return _unsupervised(evidence, last)
    return _vanished(evidence, last)


def _supervisor_first(evidence: Evidence, last: Signs) -> Finding | None:
    """Workers outlived the supervisor: they live, wrote that it was gone, or their hearts beat on after it."""
    now = evidence.now
    told = sorted(rank for rank in range(evidence.num_workers) if _left_alone(evidence, rank))
    # Only samples beat once a second: without them the last event may be an hour older than the supervisor's end.
    end = last.supervisor if evidence.samples else None
    later = sorted(rank for rank, at in last.workers.items() if end is not None and at > end + AGREE_S)
    phase, step, place = place_of(evidence)
    own = _own_failure(evidence)
    if own and (told or now.alive_ranks or later or last.supervisor is not None):
        sentence = f"the supervisor itself failed{place}: {own}"
        return run_finding(evidence, "py.exception", PROVED, sentence, (f"its log ends with {own}",), phase, step)
    if now.alive_ranks:
        sentence = f"the supervisor was killed; {ranks_text(now.alive_ranks)} still live and will save and leave{place}"
        gone = now.supervisor_alive is False
        fact = "its process is gone, workers of it live" if gone else "its samples ended, workers of it live"
        return run_finding(evidence, "sup.killed", PROVED if gone else LIKELY, sentence, (fact,), phase, step)
    if told:
        sentence = f"the supervisor was killed; {ranks_text(tuple(told))} noticed it and left{place}"
        fact = f"{ranks_text(tuple(told))} wrote that the supervisor was gone"
        return run_finding(evidence, "sup.killed", PROVED, sentence, (fact,), phase, step)
    if later and last.supervisor is not None:
        longer = max(last.workers[rank] for rank in later) - last.supervisor
        who = ranks_text(tuple(later))
        sentence = f"the supervisor was killed{place}; {who} outlived it by {longer:,.0f} s, then ended too"
        fact = f"last sample or event at {last.supervisor:,.1f} s after boot, heartbeats until {longer:,.1f} s later"
        return run_finding(evidence, "sup.killed", LIKELY, sentence, (fact,), phase, step)
    return None


def _ended_by_itself(evidence: Evidence, last: Signs) -> Finding | None:
    """The supervisor's log, open when the disk still took writes, has its last line; all that it said of it is gone."""
    for line in reversed(evidence.logs.get(f"{evidence.role}-supervisor.log", ())):
        if " supervisor started" in line:
            return None
        if " supervisor ended" in line:
            phase, step, place = place_of(evidence)
            sentence = f"the run came to its end{place}, and the record of it is gone: {line[:300]}"
            fact = "the supervisor's log says that it ended by itself"
            return run_finding(evidence, "unknown", UNKNOWN, sentence, (fact,), phase, step)
    return None


def _left_alone(evidence: Evidence, rank: int) -> bool:
    """Whether a worker wrote, in its ending or its log, that it left because the supervisor was gone."""
    if evidence.endings.get(rank, {}).get("error") == "SupervisorGone":
        return True
    return any("ended by SupervisorGone" in line for line in log_of(evidence, rank)[-5:])


def _own_failure(evidence: Evidence) -> str:
    """The supervisor's own exception, from its event or the traceback at the end of its log."""
    failed = evidence.named("supervisor failed")
    if failed:
        return failed[-1]["message"][:300]
    lines = evidence.logs.get(f"{evidence.role}-supervisor.log", ())
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("Traceback (most recent")), None)
    if start is None:
        return ""
    after = [line for line in lines[start + 1 :] if line and not line.startswith(" ")]
    return after[0][:300] if len(after) == 1 else ""


def _vanished(evidence: Evidence, last: Signs) -> Finding:
    """Same boot, same container, no survivor: everything was killed together. For lack of memory?"""
    phase, step, place = place_of(evidence)
    memory = memory_before(evidence, None, max(last.workers.values(), default=None), _memory_at_deaths(evidence, last))
    counts = _moved_at_the_end(evidence, last)
    known, excluded = same_host(evidence)
    facts = [f"{len(last.workers)} heartbeats and the samples end within {last.spread:,.1f} s of each other"]
    facts += [memory.text or "no sample of memory from the last seconds"]
    facts += [_counts_text(counts) or "the kernel's counts of OOM kills could not be compared"]
    facts += [f"{ranks_text((rank,))} had just written: {text}" for rank, text in _last_words(evidence)]
    many = len(last.workers) + len(last.young)
    everything = f"all {many + 1} processes vanished at once" if many else "the supervisor vanished"

    def found(code: str, confidence: str, sentence: str, more: tuple[str, ...] = excluded) -> Finding:
        return run_finding(evidence, code, confidence, f"{everything}{place}{sentence}", facts, phase, step, more)

    if last.did_their_work:
        return found("unknown", UNKNOWN, "; all ranks had done their work, the end of the run is not on record")
    if last.ended:
        return found("unknown", UNKNOWN, f"; before, {ranks_text(last.ended)} ended, and the record of it is gone")
    if last.unseen:
        missing = ranks_text(last.unseen)
        return found("unknown", UNKNOWN, f"; without the heartbeats of {missing} it cannot be told what ended first")
    if not known:
        return found("unknown", UNKNOWN, "; whether the host, the container or only the run ended is not on record")
    own, host = counts["cgroup"], counts["vmstat"]
    if own and memory.low and evidence.now.mono - (last.newest or 0.0) > _COUNTS_S:
        facts.append("those kills may be of others, later: memory was low at the end, and that is long ago")
        own = None
    # The host's count goes on moving for others; it counts where our own cgroup's cannot be read and memory was short.
    if memory.short_for_all or own or (host and own is None and memory.known and not memory.low):
        if not own and not host:
            facts.append("counts that stood still do not exclude systemd-oomd or a kill by group policy")
        short = memory.short if memory.short_for_all else _counts_text(counts)
        return found("tree.oom_group", LIKELY, f", killed together for lack of memory: {short}")
    still = own == 0 or host == 0
    if not memory.known or not (still or memory.low):
        return found("unknown", UNKNOWN, "; whether memory ran out or somebody killed them is not on record")
    plenty = memory.plenty
    out = (*excluded, f"lack of memory: {memory.text}") if plenty else excluded
    reason = "memory was not the reason" if plenty else "that memory was short is not excluded"
    if not many:
        return found("sup.killed", LIKELY, f", killed from outside while no worker ran: {reason}", out)
    leaving = any(beat.phase in (DRAIN, DONE) for beat in evidence.beats.values())
    complete = len(last.workers) == evidence.num_workers and last.spread <= AGREE_S and not leaving
    sure = PROVED if still and not host and plenty and complete else LIKELY
    why = f", killed together from outside (session, cgroup or admin): {reason}"
    return found("tree.killed", sure, why, out)


def _last_words(evidence: Evidence) -> list[tuple[int, str]]:
    """What workers wrote about their end that the supervisor did not come to record."""
    recorded = {(whole(e["detail"].get("rank")), whole(e["detail"].get("pid"))) for e in evidence.named("worker ended")}
    words = [(rank, e) for rank, e in sorted(evidence.endings.items()) if (rank, whole(e.get("pid"))) not in recorded]
    return [
        (rank, str(ending.get("message") or ending["error"])[:200]) for rank, ending in words if ending.get("error")
    ]


def _memory_at_deaths(evidence: Evidence, last: Signs) -> dict[str, Any] | None:
    """The reading that the supervisor took at a worker's end, when it was killed right after it."""
    for event in reversed(evidence.named("worker ended")):
        if last.supervisor is not None and (number(event["detail"].get("mono")) or 0.0) > last.supervisor - AGREE_S:
            memory = event["detail"].get("memory")
            return memory if isinstance(memory, dict) else None
    return None


def _moved_at_the_end(evidence: Evidence, last: Signs) -> dict[str, int | None]:
    """OOM kills counted from three seconds before the last sample until now (or until the supervisor's last event).

    The count of a cgroup lives as long as it does; that of the host goes on moving for others, so alone it is weak.
    """
    samples = [s for s in evidence.samples if isinstance(s.get("oom"), dict)]
    if not samples:
        return {"vmstat": None, "cgroup": None}
    end = samples[-1]["mono"]
    before = [sample for sample in samples if sample["mono"] <= end - AGREE_S] or samples[:1]
    found = moved(before[-1]["oom"], evidence.now.oom)
    for event in evidence.named("worker ended"):
        after = event["detail"].get("oom_after")
        if isinstance(after, dict) and (number(event["detail"].get("mono")) or 0.0) > end - AGREE_S:
            seen = moved(before[-1]["oom"], after)
            for name, value in seen.items():
                known = found[name]
                found[name] = value if known is None else known if value is None else max(known, value)
    return found


def _counts_text(counts: dict[str, int | None]) -> str:
    names = {"vmstat": "on this host", "cgroup": "in its cgroup"}
    known = [f"{counts[name]} {where_}" for name, where_ in names.items() if counts[name] is not None]
    return f"OOM kills counted since: {', '.join(known)}" if known else ""


def _unsupervised(evidence: Evidence, last: Signs) -> Finding:
    """No supervisor (torchrun, Slurm) or nothing left of it: only heartbeats and endings, judged by the caller."""
    phase, step, place = place_of(evidence)
    sentence = f"the run is gone{place}; without a supervisor's record nothing says how its processes ended"
    facts = ("no samples, no exit codes, no signals: only heartbeats and what workers wrote themselves",)
    return run_finding(evidence, "unknown", UNKNOWN, sentence, facts, phase, step)
