"""Memory as `dflash doctor` sees it: our cgroup and its limit, who dies when it is full, and who could tell afterwards.

`read_memory` gathers, `judge_memory` is pure. Called by manifests/doctor_machine.py. Next: manifests/doctor_session.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manifests.doctor_finding import Finding, size
from manifests.doctor_sources import text_of
from shared.kernel import Kernel

# A worker that is starting takes gigabytes within seconds: less than this part free is close to the edge.
_CLOSE = 0.1
# Fewer processes and threads than one training on eight GPUs starts, compile workers included.
_FEW_TASKS = 2000


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes; None where this process may not read it."""

    version: str
    """ "v1", "v2", or "" without a memory cgroup."""
    path: str
    """Of our memory cgroup, as this process sees it."""
    current: int | None
    limit: int | None
    available: int | None
    total: int | None
    group_kill: tuple[str, ...]
    """Cgroups, ours first, whose processes the kernel kills together."""
    group_levels: int
    """How many of them say whether they do."""
    vmstat: int | None
    """OOM kills of this boot on the whole host."""
    in_cgroup: int | None
    """OOM kills of members of our cgroup."""
    oomd: bool | None
    """Whether systemd-oomd runs; None when this container hides the host's processes."""
    tasks: int | None
    tasks_limit: int | None


def read_memory(kernel: Kernel, container: str) -> MemoryFacts:
    """Gather the facts below `kernel.root`; `container` is what kind of container this is, "" for none."""
    own = kernel.cgroup()
    levels = [] if own is None else [Path(own), *Path(own).parents]
    levels = [level for level in levels if (level / "cgroup.procs").exists()]
    version = "" if own is None else "v2" if (Path(own) / "cgroup.controllers").exists() else "v1"
    flags = [(level, text) for level in levels if (text := text_of(level / "memory.oom.group"))]
    memory, counts = kernel.memory(), kernel.oom_counts()
    tasks, tasks_limit = _tasks(kernel.root, levels if version == "v2" else [])
    return MemoryFacts(
        version=version,
        path="" if own is None else _shown(Path(own), levels),
        current=memory["current"],
        limit=memory["max"],
        available=memory["available"],
        total=memory["total"],
        group_kill=tuple(_shown(level, levels) for level, text in flags if text == "1"),
        group_levels=len(flags),
        vmstat=counts["vmstat"],
        in_cgroup=counts["cgroup"],
        oomd=None if container else "systemd-oomd" in set(_process_names(kernel.root)),
        tasks=tasks,
        tasks_limit=tasks_limit,
    )


def judge_memory(facts: MemoryFacts) -> list[Finding]:
    """The findings of the part "memory"."""
    return [_cgroup(facts), _limit(facts), group_kill(facts), counters(facts), _oomd(facts), _tasks_left(facts)]


def _cgroup(facts: MemoryFacts) -> Finding:
    if facts.version:
        return Finding("memory", "cgroup", "ok", f"{facts.version}, {facts.path}")
    return Finding(
        "memory", "cgroup", "limited", "no memory cgroup is visible here",
        "an OOM kill can only be told from the host's counters; mount /sys/fs/cgroup into the container",
    )  # fmt: skip


def _limit(facts: MemoryFacts) -> Finding:
    host = f"{size(facts.available)} of {size(facts.total)} available on the host"
    if facts.limit is None:
        found, free, of = f"no limit for this cgroup, {host}", facts.available, facts.total
    else:
        found = f"{size(facts.current)} of {size(facts.limit)} used in this cgroup, {host}"
        room = facts.limit - (facts.current or 0)
        free, of = (room, facts.limit) if facts.available is None else (min(room, facts.available), facts.limit)
    if free is None or of is None:
        return Finding("memory", "room", "limited", found, "read `free -h`; samples before a death will have no number")
    if free < _CLOSE * of:
        advice = "end what uses it, or raise the container's limit, before anything large is loaded"
        return Finding("memory", "room", "limited", found, advice)
    return Finding("memory", "room", "ok", found)


def group_kill(facts: MemoryFacts) -> Finding:
    """Whether one process over the limit takes everything with it, the supervisor too."""
    if facts.group_kill:
        return Finding(
            "memory", "OOM kills a group", "limited",
            f"memory.oom.group is 1 at {', '.join(facts.group_kill)}: one process over the limit, and every process in "
            "there gets SIGKILL, supervisor and shell too; `dflash status` can only say afterwards that it is likely",
            "give the container more memory than the peak, or run the kubelet with singleProcessOOMKill: true",
        )  # fmt: skip
    if facts.version == "v2":
        found = f"no: memory.oom.group is 0 at the {facts.group_levels} levels that can be read"
        return Finding("memory", "OOM kills a group", "ok", found)
    if facts.version == "v1":
        return Finding("memory", "OOM kills a group", "ok", "no: cgroup v1 kills single processes")
    return Finding("memory", "OOM kills a group", "ok", "not seen from here")


def counters(facts: MemoryFacts) -> Finding:
    """Whether a SIGKILL can be told from the OOM killer's."""
    if facts.vmstat is not None and facts.in_cgroup is not None:
        found = f"readable: {facts.in_cgroup} kills in this cgroup, {facts.vmstat} on the host"
        return Finding("memory", "OOM counters", "ok", found)
    missing = [
        name
        for name, value in (("the cgroup's memory.events", facts.in_cgroup), ("/proc/vmstat", facts.vmstat))
        if value is None
    ]
    what = "a SIGKILL will be called OOM at most as likely" if len(missing) == 1 else "no SIGKILL will be called OOM"
    return Finding(
        "memory", "OOM counters", "limited", f"{' and '.join(missing)} cannot be read: {what}",
        "mount /sys/fs/cgroup and an unmasked /proc into the container, read-only is enough",
    )  # fmt: skip


def _oomd(facts: MemoryFacts) -> Finding:
    if facts.oomd is None:
        return Finding("memory", "systemd-oomd", "ok", "the host's processes cannot be seen from this container")
    if not facts.oomd:
        return Finding("memory", "systemd-oomd", "ok", "does not run")
    return Finding(
        "memory", "systemd-oomd", "limited",
        "runs: under memory pressure it kills a whole cgroup, and the kernel's counters do not move",
        "see what it watches with `oomctl`; a system service outside user.slice is usually not watched: "
        "sudo systemd-run --uid=$USER -p OOMPolicy=continue dflash ...",
    )  # fmt: skip


def _tasks_left(facts: MemoryFacts) -> Finding:
    if facts.tasks is None or facts.tasks_limit is None:
        return Finding("memory", "tasks", "ok", "no limit on processes and threads in this cgroup")
    left = facts.tasks_limit - facts.tasks
    found = f"{facts.tasks:,} of {facts.tasks_limit:,} processes and threads in this cgroup"
    if left >= _FEW_TASKS:
        return Finding("memory", "tasks", "ok", found)
    advice = "raise pids.max (docker run --pids-limit, TasksMax= of the unit): each worker starts dozens of threads"
    return Finding("memory", "tasks", "limited", found, advice)


def _tasks(root: Path, levels: list[Path]) -> tuple[int | None, int | None]:
    """Tasks and their limit at the level that has the least left; `levels` of v2, none for v1."""
    if not levels:
        lines = text_of(root / "proc/self/cgroup").splitlines()
        paths = [path for line in lines for _, kind, path in [line.split(":", 2)] if "pids" in kind.split(",")]
        # In a container without a cgroup namespace the path is the host's and its own folder is what is mounted.
        levels = [root / "sys/fs/cgroup/pids" / path.strip("/") for path in (*paths, "")]
    found = [
        (int(limit) - int(now), int(now), int(limit))
        for folder in levels
        if (limit := text_of(folder / "pids.max")).isdecimal() and (now := text_of(folder / "pids.current")).isdecimal()
    ]
    return min(found)[1:] if found else (None, None)


def _shown(level: Path, levels: list[Path]) -> str:
    """A cgroup's path below the topmost one that is visible."""
    top = levels[-1] if levels else level
    return "/" + str(level.relative_to(top)) if level != top else "/"


def _process_names(root: Path) -> Iterator[str]:
    for path in (root / "proc").glob("[0-9]*/comm"):
        yield text_of(path)
