"""Hosts for the fault matrix: one made of files (memory, OOM counters, boot, container), and real small disks.

A made host is given to the supervisor and to the verdict by DFLASH_KERNEL_ROOT; processes are always real. Real disks
need the right to mount; `why_not` says what is missing. Used by tests/fault_scenarios.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shared.kernel import TICKS_PER_S, Kernel

GIB = 1 << 30


@dataclass
class Host:
    """/proc and /sys of a host below `root`; change fields and `write` again."""

    root: Path
    version: int = 2
    limit: int = 64 * GIB
    used: int = 20 * GIB
    total: int = 512 * GIB
    available: int = 300 * GIB
    oom_host: int = 41
    oom_cgroup: int | None = 0
    """None: the counter of the cgroup cannot be read."""
    boot: str = "11111111-2222-3333-4444-555555555555"
    pid1_start_s: float = 12.0
    """Seconds after boot."""
    namespace: str = "pid:[4026532100]"
    """A container's: 4026531836 is that of the host itself."""
    boot_age_s: float | None = None
    """None: this host's."""

    def write(self) -> None:
        """Put the files in place of what was there, each at once."""
        cgroup = f"sys/fs/cgroup{'/memory' if self.version == 1 else ''}/job"
        kib, age = 1024, time.monotonic() if self.boot_age_s is None else self.boot_age_s
        files = {
            "proc/sys/kernel/random/boot_id": self.boot,
            "proc/1/stat": f"1 (init) S 0 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 {self._pid1_ticks} 1000 10 0",
            "proc/self/ns/pid": self.namespace,
            "proc/stat": f"cpu 1 1 1 1\nbtime {int(time.time() - age)}",
            "proc/vmstat": f"pgfault 5\noom_kill {self.oom_host}",
            "proc/meminfo": f"MemTotal: {self.total // kib} kB\nMemAvailable: {self.available // kib} kB",
            "proc/pressure/memory": "some avg10=0.00 avg60=0.00\nfull avg10=0.00 avg60=0.00",
            "dev/shm/.keep": "",
        }
        if self.version == 1:
            files |= {
                "proc/self/cgroup": "4:memory:/job",
                "proc/self/mountinfo": "30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
                f"{cgroup}/memory.usage_in_bytes": str(self.used),
                f"{cgroup}/memory.limit_in_bytes": str(self.limit),
                f"{cgroup}/memory.stat": "total_active_file 0\ntotal_inactive_file 0",
            }
            counter, name = f"{cgroup}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0"
        else:
            files |= {
                "proc/self/cgroup": "0::/job",
                "proc/self/mountinfo": "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
                f"{cgroup}/memory.current": str(self.used),
                f"{cgroup}/memory.max": str(self.limit),
                f"{cgroup}/memory.stat": "active_file 0\ninactive_file 0",
            }
            counter, name = f"{cgroup}/memory.events", f"low 0\noom {self.oom_cgroup}"
        if self.oom_cgroup is not None:
            files[counter] = f"{name}\noom_kill {self.oom_cgroup}"
        for where, text in files.items():
            self._put(self.root / where, text + "\n")

    @property
    def _pid1_ticks(self) -> int:
        return int(self.pid1_start_s * TICKS_PER_S)

    @staticmethod
    def _put(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(text)
        new.replace(path)

    def kernel(self) -> Kernel:
        """What reads it."""
        return Kernel(self.root)


@contextmanager
def small_disk(at: Path, size: int, inodes: int = 0) -> Iterator[Path]:
    """A file system of its own at `at`: a tmpfs of `size` bytes, and of so many files (0: many)."""
    at.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(at)], check=True)
    try:
        yield at
    finally:
        _unmount(at)


def make_read_only(at: Path) -> None:
    """Cover a folder by itself, read-only, as a file system that met an error does; files that are open stay so."""
    subprocess.run(["mount", "--bind", str(at), str(at)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(at)], check=True)


def make_writable(at: Path) -> None:
    """Take the cover away."""
    _unmount(at)


def _unmount(at: Path) -> None:
    subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Use up all of a disk but `leave` bytes; returns the file to delete."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    with ballast.open("wb") as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize - leave, 1))
    return ballast


def memory_cgroup_root() -> Path | None:
    """The folder of this process's memory cgroup (version 1), where a smaller one can be made; None without."""
    own = Kernel().cgroup()
    if own is None or not (Path(own) / "memory.limit_in_bytes").exists() or not os.access(own, os.W_OK):
        return None
    return Path(own)


@contextmanager
def inside_memory_cgroup(limit: int) -> Iterator[Path]:
    """What this process starts in the block lives in a memory cgroup of `limit` bytes for good."""
    parent = memory_cgroup_root()
    assert parent is not None
    own = parent / f"dflash-test-{os.getpid()}"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text(str(limit))
    try:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield own
        finally:
            (parent / "cgroup.procs").write_text(str(os.getpid()))
    except BaseException:
        remove_cgroup(own)
        raise


def remove_cgroup(own: Path) -> None:
    """Once its processes are gone."""
    for _ in range(50):
        with suppress(OSError):
            own.rmdir()
            return
        time.sleep(0.05)


def why_not(needs: str) -> str:
    """Why a scenario that needs "mount", "memory cgroup", "tmux", "pid" or "cuda" cannot run here, "" when it can."""
    if "mount" in needs and os.geteuid() != 0:
        return "mounting a small disk needs root"
    if "memory cgroup" in needs and (os.geteuid() != 0 or memory_cgroup_root() is None):
        return "no memory cgroup (version 1) in which a smaller one can be made"
    if "tmux" in needs and shutil.which("tmux") is None:
        return "tmux is not installed"
    if "pid" in needs.split() and not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        return "the kernel does not let this user choose the next pid"
    if "cuda" in needs and shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU"
    return ""
