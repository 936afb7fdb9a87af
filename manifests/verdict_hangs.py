"""Which rank hung, when several stand still: the one that does not wait for the others.

The supervisor names a rank and says what each was seen doing ("hang", manifests/hang.py) and saves all stacks ("stacks
saved"). Ranks in a collective are victims; whoever is outside is the suspect, and whoever is in another collective, or
further on than the others, has missed one. Used by manifests/verdict_root.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from manifests.evidence import Evidence
from manifests.evidence_files import number, whole
from manifests.verdict_finding import LIKELY, PROVED, Finding, ranks_text, where

_STOPPED = "hang.stopped"
# What a rank looks like that waits for its peers. "wait_stream" or "cond.wait" alone are no sign of it.
_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_scatter|broadcast|\bbarrier|all_to_all|wait_tensor|distributed_c10d|"
    r"process_?group|\b(?:i?send|i?recv)\b|\bgather\b|\bscatter\b|_store_based_barrier|rendezvous|init_process_group",
    re.IGNORECASE,
)
# Percent of NVML's last sample: a kernel that does not end gives 100, one that pauses between launches less.
_GPU_BUSY = 95
_DOES = {
    "hang.stopped": "is stopped (SIGSTOP or a debugger), not hung",
    "hang.gil": "holds the GIL in native code",
    "hang.wait": "waits, with the GIL free and no CPU used",
    "hang.busy": "spins",
    "hang.io": "is in the kernel (disk, NFS or driver) and cannot be woken",
    "hang.startup": "never came to its own work",
}


def hang_finding(evidence: Evidence, attempt: int | None) -> Finding | None:
    """The hang that ended an attempt, None when none did; one that was only named and went on again is none."""
    hangs = [e for e in evidence.named("hang") if attempt is None or whole(e["detail"].get("attempt")) == attempt]
    kills = [event for event in hangs if event["detail"].get("action") == "kill"]
    if not kills:
        return None
    event = kills[-1]
    detail, of = event["detail"], whole(event["detail"].get("attempt"))
    first = [e["detail"] for e in hangs if e["detail"].get("code") == _STOPPED and _same_rank(e, event)]
    stacks = _stacks(evidence, of, float(detail["mono"]) if "mono" in detail else 0.0)
    ranks, code, reason, confidence = _suspects(evidence, detail, of, stacks)
    silent = number(detail.get("silent_s"))
    at = _progress(evidence, of, ranks[0] if ranks else whole(detail.get("rank")))
    place = where(at[0] or str(detail.get("phase") or ""), at[1], at[2], at[3])
    who = ranks_text(ranks) if ranks else "one of the ranks"
    does = (
        "missed a collective or went into another one"
        if code == "comm.mismatch"
        else _DOES.get(code, "made no progress")
    )
    start = number((first[0] if first else detail).get("mono"))
    # Ranks in step die of it before it is named; of independent workers the newest end counts, and that is now.
    begun = None if start is None else start if evidence.independent else start - (silent or 0.0)
    return Finding(
        code=code,
        ranks=ranks,
        span=None if begun is None else (begun, begun),
        time=number(detail.get("t")) or event["time"],
        confidence=confidence,
        sentence=f"{who} {does}{place}; no progress for {silent or 0.0:,.0f} s",
        evidence=tuple(text for text in (_seen(detail), _gpus(detail), *reason, *_stack_lines(stacks)) if text),
        excluded=("a death: all processes lived when they were looked at",),
        phase=at[0] or str(detail.get("phase") or ""),
        step=at[1],
        short="made no progress",
    )


def _same_rank(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["detail"].get("rank") == other["detail"].get("rank"))


Suspects = tuple[tuple[int, ...], str, tuple[str, ...], str]


def _suspects(evidence: Evidence, detail: dict[str, Any], attempt: int, stacks: Mapping[int, str]) -> Suspects:
    """(ranks, code, why these, confidence)."""
    rank, code = whole(detail.get("rank")), str(detail.get("code") or "hang.wait")
    names = detail.get("names")
    codes = {int(r): str(c) for r, c in names.items() if str(r).isdecimal()} if isinstance(names, dict) else {}
    codes.setdefault(rank, code)
    if evidence.independent or evidence.num_workers <= 1 or code not in ("hang.wait", "hang.busy"):
        return (rank,), code, (), PROVED
    places = {r: at for r in stacks.keys() | codes.keys() if (at := _progress(evidence, attempt, r))[1] is not None}
    # Regions compiled and steps done are no two points of one way.
    done = {r: at[1] for r, at in places.items()} if len({at[3] for at in places.values()}) == 1 else {}
    waiting = sorted(r for r, stack in stacks.items() if _COLLECTIVE.search(stack))
    outside = sorted(set(stacks) - set(waiting))
    # The innermost frames may not show the collective: who is at the same thing as those in one waits for them, too.
    shared = {places[r][0] for r in waiting if r in places}
    outside = [r for r in outside if r in places and places[r][0] not in shared] or outside
    ahead = _ahead(done)
    if waiting and outside:
        seen = (f"in a collective: {ranks_text(tuple(waiting))}; not in one: {ranks_text(tuple(outside))}",)
        if len(outside) == 1 and outside[0] in ahead:
            return tuple(outside), "comm.mismatch", (*seen, _ahead_text(done)), LIKELY
        # Where each stood tells a rank that hangs from one that missed a collective.
        return tuple(outside), codes.get(outside[0], code), seen, PROVED if len(places) == len(stacks) else LIKELY
    if ahead:
        return ahead, "comm.mismatch", (_ahead_text(done),), LIKELY
    if waiting and len(set(stacks.values())) > 1:
        odd = _minority(stacks)
        return (
            odd or tuple(waiting),
            "comm.mismatch",
            ("all ranks are in collectives, but not in the same one",),
            LIKELY,
        )
    odd = _minority(codes) if len(codes) > 2 else ()
    if odd:
        return odd, codes[odd[0]], ("the other ranks were all seen doing something else",), LIKELY
    if odd := _minority(stacks):
        return odd, codes.get(odd[0], code), ("the other ranks all stand at another place",), LIKELY
    if len(set(codes.values())) > 1:
        return (rank,), code, ("it is the one that does not wait",), LIKELY
    if stacks and len(codes) > 1:
        return tuple(sorted(codes)), code, ("all are alike: none is the one that the others wait for",), LIKELY
    return (), code, ("which rank the others wait for cannot be told without stacks",), LIKELY


def _minority(by_rank: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that differ from the largest group, empty when no group is the largest."""
    counts = Counter(by_rank.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return ()
    return tuple(sorted(rank for rank, value in by_rank.items() if value != counts[0][0]))


def _ahead(done: Mapping[int, float | None]) -> tuple[int, ...]:
    """The ranks that are further on than the rest, when the rest agrees and they are fewer than it, or one of two."""
    counts = Counter(value for value in done.values() if value is not None)
    if len(counts) != 2:
        return ()
    furthest = max(counts)
    return (
        tuple(sorted(r for r, value in done.items() if value == furthest)) if counts[furthest] * 2 <= len(done) else ()
    )


def _ahead_text(done: Mapping[int, float | None]) -> str:
    return "steps: " + ", ".join(
        f"rank {rank} at {value:,.0f}" for rank, value in sorted(done.items()) if value is not None
    )


def _progress(evidence: Evidence, attempt: int, rank: int) -> tuple[str, float | None, float | None, str]:
    """(phase, done, total, unit) at which a rank of an attempt stood, from its end or its heartbeat."""
    for event in evidence.named("worker ended"):
        detail = event["detail"]
        if detail.get("rank") == rank and whole(detail.get("attempt")) == attempt and detail.get("phase"):
            count, total = number(detail.get("done")), number(detail.get("total"))
            return str(detail["phase"]), count, total, str(detail.get("unit") or "")
    beat = evidence.beats.get(rank)
    if beat is None or beat.attempt != attempt:
        return "", None, None, ""
    return beat.phase, beat.done, beat.total, beat.unit


def _stacks(evidence: Evidence, attempt: int, since: float) -> dict[int, str]:
    """Each rank's main thread as the supervisor summed it up, of the first dump after the hang."""
    for event in evidence.named("stacks saved"):
        detail = event["detail"]
        groups = detail.get("groups")
        if whole(detail.get("attempt")) != attempt or (number(detail.get("mono")) or 0.0) < since:
            continue
        if isinstance(groups, dict):
            listed = {str(summary): ranks for summary, ranks in groups.items() if isinstance(ranks, list)}
            found = {r: summary for summary, ranks in listed.items() for r in ranks if isinstance(r, int)}
            return {rank: stack for rank, stack in found.items() if stack and "no Python stack" not in stack}
    return {}


def _stack_lines(stacks: Mapping[int, str]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(stack, []).append(rank)
    return [f"{ranks_text(tuple(ranks))}: {stack[:300]}" for stack, ranks in sorted(groups.items(), key=lambda g: g[1])]


def _seen(detail: dict[str, Any]) -> str:
    limit, cpu, age = (number(detail.get(name)) for name in ("limit_s", "cpu_share", "alive_age"))
    parts = [f"no progress for {number(detail.get('silent_s')) or 0.0:,.1f} s"]
    if limit is not None:
        parts[0] += f", the limit of phase {detail.get('phase')} is {limit:,.1f} s"
    parts += [f"state {detail['state']}"] if detail.get("state") else []
    parts += [f"{cpu:.0%} of a core"] if cpu is not None else []
    parts += [f"Python's liveness thread beat {age:,.1f} s ago"] if age is not None else []
    return f"rank {detail.get('rank')}: {', '.join(parts)}"


def _gpus(detail: dict[str, Any]) -> str:
    """What the GPUs did when the hang was named; "" when nobody could say. A wait for a collective is a kernel, too."""
    listed = detail.get("gpus")
    said = []
    for gpu in listed if isinstance(listed, list) else []:
        busy = number(gpu.get("utilisation")) if isinstance(gpu, dict) else None
        if busy is not None:
            still = " (a kernel ran there, or a collective waited)" if busy >= _GPU_BUSY else ""
            said.append(f"GPU {whole(gpu.get('index'))} {busy:.0f} % busy{still}")
    return f"when it was named: {', '.join(said)}" if said else ""
