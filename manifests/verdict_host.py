"""Another host, another boot, another container: whether what is true now says anything about the run, and what.

Also the last signs of life, which all judgement about a run without survivors begins with. Used by
manifests/verdict_tree.py and manifests/verdict_living.py.
"""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Death, Finding, deaths, where
from manifests.verdict_memory import memory_before
from shared.kernel import TICKS_PER_S

AGREE_S = 3.0
"""Last samples, counters and heartbeats must end within this for "everything at once"."""
# A reboot takes minutes; a run whose last sign is older than this when the boot began may have died before it.
_REBOOT_S = 1200.0
# A container comes back within seconds, after several failures within five minutes; later it may be one of another day.
_RESTART_S = 600.0
# Wall clocks of two hosts, and what the kernel says of a boot's beginning, agree to this.
_CLOCKS_S = 60.0
# The kernel's own number of the namespace in which a host's processes are when they are in no container.
_HOST_NAMESPACE = "pid:[4026531836]"
# A worker that was started this long ago has opened its heartbeat, also on a slow disk.
_BEGINS_S = 15.0


class Signs(NamedTuple):
    """Last signs of life, monotonic seconds: the supervisor's, and each worker's that was not seen to end before."""

    supervisor: float | None
    workers: dict[int, float]
    unseen: tuple[int, ...] = ()
    """Workers that lived then, and had long begun, of which there is no heartbeat."""
    young: tuple[int, ...] = ()
    """Workers that lived then and were started moments before: none is needed."""
    ended: tuple[int, ...] = ()
    """Workers that the supervisor had seen to end, for it sampled them no more, and whose end is not on record."""
    did_their_work: bool = False
    """All workers had ended well."""

    @classmethod
    def of(cls, evidence: Evidence) -> Signs:
        """From heartbeats, samples and events."""
        end = evidence.last_mono
        newest: dict[int, tuple[int, float]] = {}
        for event in evidence.named("worker spawned"):
            detail = event["detail"]
            newest[whole(detail.get("rank"))] = whole(detail.get("pid")), number(detail.get("mono")) or 0.0
        ends = {(death.rank, death.pid): death for death in deaths(evidence, None)}
        before = {key for key, death in ends.items() if not _died_with(death, end, _last_reaction(evidence))}
        living = {rank: beat for rank, beat in evidence.beats.items() if (rank, beat.pid) not in before}
        silent = {r: since for r, (pid, since) in newest.items() if r not in living and (r, pid) not in before}
        young = tuple(rank for rank, since in silent.items() if since >= (end or 0.0) - _BEGINS_S)
        unseen = tuple(rank for rank in silent if rank not in young)
        sampled = evidence.samples[-1].get("ranks") if evidence.samples else None
        looked = evidence.samples[-1]["mono"] if evidence.samples else 0.0
        ended = tuple(
            rank
            for rank, (pid, since) in newest.items()
            if isinstance(sampled, dict) and str(rank) not in sampled and since < looked and (rank, pid) not in ends
        )
        last = [ends.get((rank, pid)) for rank, (pid, _) in newest.items()]
        well = bool(last) and all(death is not None and death.clean for death in last)
        return cls(end, {r: beat.alive or beat.reported for r, beat in living.items()}, unseen, young, ended, well)

    @property
    def newest(self) -> float | None:
        """The last of all."""
        return max([*self.workers.values(), *([self.supervisor] if self.supervisor is not None else [])], default=None)

    @property
    def spread(self) -> float:
        """Seconds between the supervisor's last sign and the worker's that is farthest from it."""
        return max((abs(at - (self.supervisor or at)) for at in self.workers.values()), default=0.0)


def _last_reaction(evidence: Evidence) -> float:
    """When the supervisor last did something about a death: it lived on after that one."""
    events = evidence.named("verdict", "restart", "gave up", "paused", "stop asked", "hang")
    events += [event for event in evidence.named("worker ended") if event["detail"].get("asked") is True]
    return max((number(event["detail"].get("mono")) or 0.0 for event in events), default=0.0)


def _died_with(death: Death, end: float | None, reaction: float) -> bool:
    """Whether a worker's end belongs to that of everything: killed, within moments, with no time to react."""
    if death.seen != "supervisor" or end is None:
        return False  # it wrote an ending itself
    at = death.mono or 0.0
    return death.signal == signal.SIGKILL and not death.asked and at > end - AGREE_S and at > reaction


def unwatched(evidence: Evidence) -> bool:
    """Whether the supervisor's samples, one a second, ended while this boot went on; False for a run without any."""
    last = evidence.samples[-1]["mono"] if evidence.samples else None
    return last is not None and evidence.now.mono - last > 2 * AGREE_S


def place_of(evidence: Evidence) -> tuple[str, float | None, str]:
    """(phase, done, words) of the rank that was furthest behind, from the heartbeats."""
    at = min(evidence.beats.items(), key=lambda item: (item[1].phase == "done", item[1].done, item[0]), default=None)
    if at is None:
        return "", None, ""
    beat = at[1]
    return beat.phase, beat.done, where(beat.phase, beat.done, beat.total, beat.unit)


def elsewhere(evidence: Evidence) -> bool:
    """Whether the run was on another host than this one: what is true now says nothing about it then."""
    then, now = _identity(evidence), evidence.now
    if then["boot"] is not None and then["boot"] == now.boot_id:
        return False
    if then["host"] not in (None, "", now.host):
        return True
    # Another host of the same name, whose boot ran while the run still did: a pod that was moved keeps its name, so
    # does `docker --hostname`, and many hosts are "localhost".
    return then["boot"] is not None and now.boot_id is not None and _booted_before_the_end(evidence)


def _booted_before_the_end(evidence: Evidence) -> bool:
    """Whether this boot began well before the run's last sign: then it is no reboot after it."""
    began, last = evidence.now.boot_time, evidence.last_time
    return began is not None and last is not None and began < last - _CLOCKS_S


def _identity(evidence: Evidence) -> dict[str, Any]:
    """Host, boot, and container of the run, from the supervisor's first event, any other, or the run's record."""
    facts = evidence.supervisor or {}
    boots = [event["detail"]["boot"] for event in evidence.events if isinstance(event["detail"].get("boot"), str)]
    recorded = (evidence.run or {}).get("detail")
    provenance = recorded.get("provenance") if isinstance(recorded, dict) else None
    host = facts.get("host") or (provenance.get("host") if isinstance(provenance, dict) else None)
    return {
        "host": host,
        "boot": facts.get("boot") or (boots[-1] if boots else None),
        "pid1_start": facts.get("pid1_start"),
        "pid_ns": facts.get("pid_ns"),
        "start_ticks": facts.get("start_ticks"),
    }


def other_host(evidence: Evidence, last: Signs) -> Finding | None:
    if not elsewhere(evidence):
        return None
    host, here = _identity(evidence)["host"] or "another host", evidence.now.host
    phase, step, place = place_of(evidence)
    if host == here:
        host, here = f"another host with the name {host}", "this one"
    sentence = f"no sign of life since then{place}; the run was on {host}: from {here} its end cannot be told"
    fact = f"the run's boot and processes are those of {host}; ask there: `dflash why {evidence.run_dir}`"
    return run_finding(evidence, "unknown", UNKNOWN, sentence, (fact,), phase, step)


def rebooted(evidence: Evidence, last: Signs) -> Finding | None:
    then, now = _identity(evidence), evidence.now
    phase, step, place = place_of(evidence)
    if then["boot"] is None or now.boot_id is None:
        # Without identities the clock still tells: a monotonic time that is yet to come was another boot's.
        # Not where several machines wrote without a supervisor: the clock of an older one is ahead of this one's.
        if last.newest is None or now.mono >= last.newest - 1.0 or then["host"] not in (now.host, None):
            return None
        if now.boot_time is None or evidence.last_time is None or _booted_before_the_end(evidence):
            return None
        fact = f"its last sign was {last.newest:,.0f} s after boot, this boot is {now.mono:,.0f} s old"
        return run_finding(evidence, "host.reboot", PROVED, f"the host rebooted{place}", (fact,), phase, step)
    if then["boot"] == now.boot_id:
        return None
    fact = f"boot {then['boot']} then, {now.boot_id} now, on the same host {now.host}"
    gap = now.boot_time - evidence.last_time if now.boot_time is not None and evidence.last_time is not None else None
    if gap is not None and gap > _REBOOT_S:
        sentence = f"the host rebooted{place}: it came up {gap / 60:,.0f} minutes after the run's last sign of life"
        doubt = "the run may have ended before the host did: nothing in between is on record"
        return run_finding(evidence, "host.reboot", LIKELY, sentence, (fact, doubt), phase, step)
    before = memory_before(evidence, None, last.newest).text
    return run_finding(
        evidence, "host.reboot", PROVED, f"the host rebooted{place}", (fact, *filter(None, [before])), phase, step
    )


def restarted(evidence: Evidence, last: Signs) -> Finding | None:
    """Another process 1 or PID namespace in the same boot; one that began after the run's end came in its place."""
    then, now = _identity(evidence), evidence.now
    changed = [
        name
        for name in ("pid1_start", "pid_ns")
        if then[name] is not None and getattr(now, name) is not None and then[name] != getattr(now, name)
    ]
    if not changed or then["boot"] is None or then["boot"] != now.boot_id:
        return None
    phase, step, place = place_of(evidence)
    facts = [f"{name} {then[name]} then, {getattr(now, name)} now, in the same boot" for name in changed]
    begun = None if now.pid1_start is None else now.pid1_start / TICKS_PER_S
    if then["pid_ns"] == _HOST_NAMESPACE and "pid_ns" in changed:
        sentence = f"the run is gone{place}; it was on the host itself, this shell is in a container of it"
        sentence += " and cannot see its end"
        facts.append(f"{_HOST_NAMESPACE} is the host's own: no container can have been restarted under the run")
        return run_finding(evidence, "unknown", UNKNOWN, sentence, facts, phase, step)
    # Times since boot: an older process 1 was there while the run still lived, so this is another container.
    end = max(whole(then["start_ticks"]) / TICKS_PER_S, (last.newest or 0.0) - AGREE_S)
    if begun is not None and end > 0 and begun < end:
        sentence = f"the run is gone{place}; it was in another container than this shell, which cannot see its end"
        facts.append(f"process 1 here began {begun:,.0f} s after boot, the run still lived at {end:,.0f} s")
        return run_finding(evidence, "unknown", UNKNOWN, sentence, facts, phase, step)
    memory = memory_before(evidence, None, last.newest)
    facts += [memory.text] if memory.text else []
    why = "; memory was nearly used up before, an OOM kill of the container fits" if memory.very_high else ""
    same = then["host"] in (now.host, None)
    facts += [] if same else [f"the host name was {then['host']}, it is {now.host} now"]
    sentence = f"the container was restarted{place}{why}"
    soon = begun is not None and begun - end <= _RESTART_S
    if begun is not None and not soon:
        facts.append(f"it began {(begun - end) / 60:,.0f} minutes after: the run may have ended before its own did")
    sure = PROVED if same and soon else LIKELY
    return run_finding(evidence, "container.restart", sure, sentence, facts, phase, step)


def same_host(evidence: Evidence) -> tuple[bool, tuple[str, ...]]:
    """(whether boot and container are known to be the run's, what that excludes)."""
    then, now = _identity(evidence), evidence.now
    boot = then["boot"] is not None and then["boot"] == now.boot_id
    same = [name for name in ("pid1_start", "pid_ns") if then[name] is not None and then[name] == getattr(now, name)]
    excluded: tuple[str, ...] = ("a reboot: the boot is the same",) if boot else ()
    if boot and same:
        excluded += ("a restart of the container: process 1 and its namespace are the same",)
    return boot and bool(same), excluded


def run_finding(
    evidence: Evidence,
    code: str,
    confidence: str,
    sentence: str,
    facts: Any,
    phase: str,
    step: float | None,
    excluded: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        code=code,
        confidence=confidence,
        sentence=sentence,
        evidence=tuple(facts),
        excluded=excluded,
        time=evidence.last_time,
        phase=phase,
        step=step,
    )
