"""Was it memory? The last samples before a death and the kernel's counts of OOM kills, and what may be said from them.

The kernel counts an OOM kill before it sends the SIGKILL, in the victim's cgroup and on the host, also when it was the
host that had no memory left. So a count that can be read and did not move excludes it, and one that moved does not yet
say who the victim was. Used by manifests/verdict_deaths.py and manifests/verdict_tree.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from manifests.evidence import Evidence
from manifests.evidence_files import number
from manifests.verdict_finding import LIKELY, PROVED, UNKNOWN, Death, gib

HIGH = 0.8
"""Of the cgroup's limit: with a count that moved this proves an OOM kill in it."""
VERY_HIGH = 0.9
"""Without a count: makes an OOM kill likely when everything vanished."""
LOW = 0.5
"""Below this no second of allocation on a real host reaches the limit: it speaks against OOM by itself."""
HOST_OUT = 0.05
"""Of the host's memory still available."""
TREE_OUT = 0.1
"""Of the host's memory still available: systemd-oomd kills a whole scope here, and no count of the kernel moves."""
PRESSED = 50.0
"""Percent of ten seconds in which every task waited for memory: systemd-oomd kills at 60."""
_WINDOW_S = 5.0
# A sample this much older than the last heartbeat says nothing about the end.
STALE_S = 3.0


class Memory(NamedTuple):
    """The worst of the last seconds: share of the cgroup's limit, available share of the host, pressure in percent."""

    used: float | None = None
    available: float | None = None
    pressure: float | None = None
    text: str = ""
    """All of it, for the list of evidence."""
    biggest: str = ""

    @property
    def known(self) -> bool:
        """Whether there is anything to judge by."""
        return self.used is not None or self.available is not None

    @property
    def low(self) -> bool:
        """Far from any limit that is visible from here."""
        return self.known and (self.used or 0.0) < LOW and (self.available is None or self.available > 1.0 - HIGH)

    @property
    def short(self) -> str:
        """What was nearly used up, in a few words."""
        if (self.used or 0.0) >= VERY_HIGH:
            return f"its cgroup used {self.used:.1%} of its limit"
        if self.available is not None and self.available < TREE_OUT:
            return f"the host had {self.available:.1%} of its memory left"
        return f"all tasks waited for memory {self.pressure or 0.0:.0f} % of the time"

    @property
    def very_high(self) -> bool:
        """So high that a kill for lack of memory is the likely reason for a tree that vanished."""
        host_out = self.available is not None and self.available < HOST_OUT
        return (self.used or 0.0) >= VERY_HIGH or host_out or (self.pressure or 0.0) >= PRESSED

    @property
    def short_for_all(self) -> bool:
        """The same for everything that vanished at once: a guard in user space acts before the kernel must."""
        return self.very_high or (self.available is not None and self.available < TREE_OUT)

    @property
    def plenty(self) -> bool:
        """So much was left, in the cgroup and on the host where that is known, that memory was not the reason."""
        return (self.used or 0.0) < HIGH and (self.available is None or self.available > 1.0 - HIGH)


def memory_before(
    evidence: Evidence, end: float | None, beat: float | None, after: dict[str, Any] | None = None
) -> Memory:
    """Memory in the last seconds before monotonic time `end`; `beat` is the last heartbeat, `after` a later reading.

    Only samples of the last five seconds count, and none that is older than the last heartbeat by three: a supervisor
    that had stalled says nothing about the end.
    """
    known = [sample for sample in evidence.samples if end is None or sample["mono"] <= end + 0.5]
    newest = known[-1]["mono"] if known else 0.0
    reference = max([value for value in (beat, end, newest if end is None else None) if value is not None], default=0.0)
    last = [s for s in known if s["mono"] >= newest - _WINDOW_S and s["mono"] >= reference - _WINDOW_S]
    if beat is not None and newest < beat - STALE_S:
        last = []
    readings = [_object(sample.get("memory")) for sample in last] + ([after] if after else [])
    used = [(share, r) for r in readings if (share := _share(r.get("current"), r.get("max"))) is not None]
    free = [(share, r) for r in readings if (share := _share(r.get("available"), r.get("total"))) is not None]
    pressures = [value for s in last if (value := number(_object(s.get("pressure")).get("memory"))) is not None]
    top = max(used, key=lambda pair: pair[0], default=None)
    least = min(free, key=lambda pair: pair[0], default=None)
    return Memory(
        used=top[0] if top else None,
        available=least[0] if least else None,
        pressure=max(pressures, default=None),
        text=_text(top, least, max(pressures, default=0.0)),
        biggest=_biggest(last),
    )


def moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int | None]:
    """How many OOM kills were counted between two readings; None where either is missing or the count began anew."""
    found: dict[str, int | None] = {}
    for name in ("vmstat", "cgroup"):
        first, last = before.get(name), after.get(name)
        known = isinstance(first, int) and isinstance(last, int) and last >= first
        found[name] = last - first if known and isinstance(first, int) and isinstance(last, int) else None
    return found


class Kill(NamedTuple):
    """What a SIGKILL is called."""

    code: str
    confidence: str
    reason: str
    evidence: tuple[str, ...]
    excluded: tuple[str, ...]


def judge_kill(evidence: Evidence, death: Death, victims: int) -> Kill:
    """Whose SIGKILL it was. `victims`: how many workers were killed between the same two readings of the counters."""
    before, after = death.oom_before or _oom_at(evidence, death, -1), death.oom_after or _oom_at(evidence, death, 1)
    delta = moved(before, after)
    host, own = delta["vmstat"], delta["cgroup"]
    beat = death.mono - death.beat_age if death.mono is not None and death.beat_age is not None else None
    memory = memory_before(evidence, death.mono, beat, death.memory)
    counters = _counters_text(before, after)
    facts = tuple(text for text in (counters, memory.text, memory.biggest) if text)
    host_out = memory.available is not None and memory.available < HOST_OUT
    full = (memory.used or 0.0) >= HIGH
    if own:
        sure = PROVED if own >= victims else LIKELY
        if full:
            return Kill("sig.kill.oom_cgroup", sure, "by the kernel's OOM killer: its cgroup was full", facts, ())
        if host_out:
            return Kill("sig.kill.oom_host", sure, "by the kernel's OOM killer: the host was out of memory", facts, ())
        if not memory.known:
            reason = "by the kernel's OOM killer; whether its cgroup or the host was full is not on record"
            return Kill("unknown", UNKNOWN, reason, facts, ())
        unsure = "the samples did not see the cgroup full, another process of it may have been the victim"
        return Kill("sig.kill.oom_cgroup", LIKELY, "probably by the kernel's OOM killer", (*facts, unsure), ())
    if host and own == 0 and not memory.known:
        reason = "an OOM kill was counted on this host, not in its cgroup; how much memory was left is not on record"
        return Kill("unknown", UNKNOWN, reason, facts, ())
    if host and own == 0 and memory.plenty:
        # The kernel counts a victim in its cgroup too, whatever limit was reached, and before it sends the signal.
        reason = "probably from outside: the OOM kill counted on this host was another process's"
        other = "an OOM kill of this process: the count of its own cgroup did not move, and memory was plentiful"
        return Kill("sig.kill.external", LIKELY, reason, facts, (other,))
    if host:
        sure = PROVED if host_out and own is None and host >= victims else LIKELY
        doubt = () if own is None else ("the count of our own cgroup did not move: the victim may have been another",)
        reason = "by the OOM killer: the host was out of memory" if host_out else "by the OOM killer of this host"
        return Kill("sig.kill.oom_host", sure, reason if sure == PROVED else f"probably {reason}", (*facts, *doubt), ())
    if host == 0 or own == 0:
        excluded = (f"the kernel's OOM killer: {counters}",)
        hint = ("memory was nearly used up: a user-space OOM killer (earlyoom, systemd-oomd) would leave these traces",)
        return Kill(
            "sig.kill.external",
            PROVED,
            "from outside; who sent it cannot be known without root",
            (*facts, *(hint if memory.very_high else ())),
            excluded,
        )
    unread = "the kernel's counts of OOM kills could not be read"
    if memory.low:
        reason = "probably from outside: memory was far from any limit"
        return Kill("sig.kill.external", LIKELY, reason, (*facts, unread), ())
    return Kill("unknown", UNKNOWN, "the cause is not established", (*facts, unread), ())


def _oom_at(evidence: Evidence, death: Death, side: int) -> dict[str, Any]:
    """The nearest sample's counters before (-1) or after (1) a death."""
    if death.mono is None:
        return {}
    start = death.mono - 0.2
    before = [sample for sample in evidence.samples if sample["mono"] <= start]
    later = [sample for sample in evidence.samples if sample["mono"] > death.mono]
    chosen = (before[-1:] if side < 0 else later[:1]) or [{}]
    return _object(chosen[0].get("oom"))


def _counters_text(before: dict[str, Any], after: dict[str, Any]) -> str:
    names = {"vmstat": "on this host", "cgroup": "in this cgroup"}
    known = [
        f"{where} {before[name]} -> {after[name]}"
        for name, where in names.items()
        if isinstance(before.get(name), int) and isinstance(after.get(name), int)
    ]
    return f"OOM kills {', '.join(known)}" if known else ""


def _share(part: Any, whole: Any) -> float | None:
    part, whole = number(part), number(whole)
    return part / whole if part is not None and whole else None


def _text(top: tuple[float, dict[str, Any]] | None, least: tuple[float, dict[str, Any]] | None, pressure: float) -> str:
    parts = []
    if top:
        current, limit = float(top[1]["current"]), float(top[1]["max"])
        parts.append(f"memory of the cgroup {gib(current)} of {gib(limit)} ({top[0]:.0%}) before the end")
    if least:
        available, total = float(least[1]["available"]), float(least[1]["total"])
        parts.append(f"{gib(available)} of the host's {gib(total)} available ({least[0]:.0%})")
    if pressure >= PRESSED / 2:
        parts.append(f"all tasks waited for memory {pressure:.0f} % of ten seconds")
    return ", ".join(parts)


def _biggest(samples: list[dict[str, Any]]) -> str:
    """The workers that held most memory in the last sample that saw any."""
    for sample in reversed(samples):
        held = [
            (float(seen[2]), rank)
            for rank, seen in _object(sample.get("ranks")).items()
            if isinstance(seen, list) and len(seen) > 2 and number(seen[2])
        ]
        if held:
            top = sorted(held, reverse=True)[:3]
            return "resident memory: " + ", ".join(f"rank {rank} {gib(size)}" for size, rank in top)
    return ""


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
