"""What the kernel tells an ordinary user about this host, its memory and its processes: no root, no external commands.

Host facts come from `root`/proc and `root`/sys, so that tests give another root; facts about processes always come
from the real /proc, because a process is started for real or not at all. Used by the supervisor (samples, counters
before and after a death), by manifests/evidence.py (what is true now) and by `dflash doctor`. Next: shared/samples.py.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shared.cgroups import limit_of, memory_levels, usage_of
from shared.kernel_files import field_of, line_of, text_of

ROOT_VARIABLE = "DFLASH_KERNEL_ROOT"
_PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Kernel:
    """Facts of one host; `root` is "/" unless DFLASH_KERNEL_ROOT or a test says otherwise. Nothing here raises.

    A fact that cannot be read is None: absent in this container, another kernel, no permission.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(os.environ.get(ROOT_VARIABLE, "/")) if root is None else root

    def boot_id(self) -> str | None:
        """The identity of this boot, the same in all its containers."""
        return text_of(self.root / "proc/sys/kernel/random/boot_id")

    def pid1_start(self) -> int | None:
        """When process 1 of this PID namespace started, in clock ticks since boot."""
        process = _parse_stat(text_of(self.root / "proc/1/stat"))
        return process.start_ticks if process else None

    def pid_namespace(self) -> str | None:
        """The identity of this PID namespace, as "pid:[4026531836]"."""
        path = self.root / "proc/self/ns/pid"
        try:
            return str(path.readlink())
        except OSError:
            return text_of(path)

    def boot_time(self) -> float | None:
        """When this boot began, wall clock seconds."""
        began = field_of(text_of(self.root / "proc/stat"), "btime")
        return None if began is None else float(began)

    def cgroup(self) -> str | None:
        """The folder of our memory cgroup, v1 or v2, as seen from here."""
        return str(self._cgroup_levels[0]) if self._cgroup_levels else None

    def oom_counts(self, cgroup: str | None = None) -> dict[str, int | None]:
        """OOM kills so far: `vmstat` on the whole host, `cgroup` of members of ours (or of the folder given).

        The kernel counts before it sends the SIGKILL, so a reading after the death includes it. The cgroup's count
        moves for every OOM kill of a member, also when it was the host that had no memory left.
        """
        folder = Path(cgroup) if cgroup else next(iter(self._cgroup_levels), None)
        counts: dict[str, int | None] = {
            "vmstat": field_of(text_of(self.root / "proc/vmstat"), "oom_kill"),
            "cgroup": None,
        }
        if folder is not None:
            events = line_of(folder / "memory.events") or line_of(folder / "memory.oom_control")
            counts["cgroup"] = field_of(events, "oom_kill")
        return counts

    def memory(self) -> dict[str, int | None]:
        """Bytes: `current` of `max` in the tightest cgroup above us, `available` of `total` on the host.

        `current` leaves the file cache out: a job that writes terabytes keeps its cgroup full of pages which the
        kernel drops before it kills anything, and that must not look like memory running out. `max` None: no limit.
        """
        info = text_of(self.root / "proc/meminfo")
        available, total = (field_of(info, name + ":") for name in ("MemAvailable", "MemTotal"))
        limited = [(folder, limit) for folder in self._cgroup_levels if (limit := limit_of(folder))]
        used = [
            (current / limit, current, limit) for folder, limit in limited if (current := usage_of(folder)) is not None
        ]
        own = usage_of(self._cgroup_levels[0]) if self._cgroup_levels and not used else None
        current, tightest = max(used)[1:] if used else (own, None)
        return {
            "current": current,
            "max": tightest,
            "available": None if available is None else available * 1024,
            "total": None if total is None else total * 1024,
        }

    def pressure(self) -> dict[str, float] | None:
        """Percent of the last 10 s in which every task waited for `memory` and for `io`; None without PSI."""
        found = {name: _full_avg10(line_of(self.root / f"proc/pressure/{name}")) for name in ("memory", "io")}
        return {name: value for name, value in found.items() if value is not None} or None

    def shm(self) -> tuple[int, int] | None:
        """(free, total) bytes of /dev/shm."""
        try:
            stat = os.statvfs(self.root / "dev/shm")
        except OSError:
            return None
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize

    def readable(self) -> dict[str, bool]:
        """Which sources of evidence this process may read: a verdict says what it could not know."""
        counts, memory = self.oom_counts(), self.memory()
        return {
            "vmstat": counts["vmstat"] is not None,
            "cgroup_oom": counts["cgroup"] is not None,
            "cgroup_memory": memory["current"] is not None,
            "pressure": self.pressure() is not None,
            "kmsg": os.access(self.root / "dev/kmsg", os.R_OK),
        }

    @cached_property
    def _cgroup_levels(self) -> list[Path]:
        return memory_levels(self.root)


def _full_avg10(text: str | None) -> float | None:
    for line in (text or "").splitlines():
        if line.startswith("full avg10="):
            try:
                return float(line.split()[1].removeprefix("avg10="))
            except (ValueError, IndexError):
                return None
    return None


class Process(NamedTuple):
    """A process as /proc/<pid>/stat shows it."""

    start_ticks: int
    """Clock ticks after boot; with the pid this is its identity, a pid alone is not."""
    state: str
    """R running, S sleeping, D in the kernel and not to be woken, T stopped, t traced, Z ended but not collected."""
    cpu_ticks: int
    rss: int
    """Bytes."""
    session: int
    parent: int


def process(pid: int) -> Process | None:
    """A process of this PID namespace, or None when there is none."""
    return _parse_stat(line_of(f"/proc/{pid}/stat"))


def is_same(pid: int, start_ticks: int) -> bool:
    """Whether the process that had this pid and started then still lives: neither ended nor its pid given anew."""
    found = process(pid)
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"


def own_start_ticks() -> int:
    """When this process started; 0 when /proc does not say."""
    found = process(os.getpid())
    return found.start_ticks if found else 0


def session_members(session: int) -> list[tuple[int, int]]:
    """(pid, start ticks) of every living process of a session: a worker and what it started."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is wanted
        if name.isdecimal() and (member := process(int(name))) and member.session == session and member.state != "Z":
            found.append((int(name), member.start_ticks))
    return found


def lock_holders(descriptor: int) -> list[tuple[int, str]]:
    """(pid, state) of every other process through which the lock on this file is held; those of other users are left
    out. Who merely has the file open, to wait for the lock, holds nothing.
    """
    wanted = os.fstat(descriptor)
    name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115, PTH119
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):  # noqa: PTH208
        if pid != os.getpid() and (there := process(pid)) and _holds_lock(pid, name, wanted):
            found.append((pid, there.state))
    return found


def _holds_lock(pid: int, name: str, wanted: os.stat_result) -> bool:
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            path = f"/proc/{pid}/fd/{number}"
            # By its name first: to ask for a file on a disk that does not answer would take for ever.
            if os.path.basename(os.readlink(path)) != name or not os.path.samestat(os.stat(path), wanted):  # noqa: PTH115, PTH116, PTH119
                continue
            if "\nlock:" in (text_of(f"/proc/{pid}/fdinfo/{number}") or ""):
                return True
    except OSError:
        pass
    return False


def command_line(pid: int) -> str:
    """A process's command, at most 200 characters; "" when it is gone or not ours to see."""
    text = line_of(f"/proc/{pid}/cmdline") or line_of(f"/proc/{pid}/comm") or ""
    return text.replace("\0", " ").strip()[:200]


def _parse_stat(text: str | None) -> Process | None:
    # The name may hold spaces and parentheses: everything counts from the last one.
    fields = (text or "").rpartition(")")[2].split()
    try:
        return Process(
            start_ticks=int(fields[19]),
            state=fields[0],
            cpu_ticks=int(fields[11]) + int(fields[12]),
            rss=int(fields[21]) * _PAGE,
            session=int(fields[3]),
            parent=int(fields[1]),
        )
    except (IndexError, ValueError):
        return None


def host_identity(kernel: Kernel) -> dict[str, Any]:
    """Which boot, which container: what a later shell compares with its own."""
    return {"boot": kernel.boot_id(), "pid1_start": kernel.pid1_start(), "pid_ns": kernel.pid_namespace()}
