"""A machine as files: a root with the /proc, /sys and /etc that `dflash doctor` reads, for tests of its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.kernel import Kernel

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max core file size        0                    unlimited            bytes
Max processes             96364                96364                processes
Max open files            {files}                1048576              files
Max locked memory         8388608              8388608              bytes
Max address space         {address}            unlimited            bytes
"""
MEMINFO = "MemTotal:       64000000 kB\nMemFree:        1000000 kB\nMemAvailable:   48000000 kB\n"
PLAIN = {
    "proc/self/cgroup": "0::/system.slice/train.service\n",
    "proc/self/mountinfo": (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "22 21 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        "23 21 0:31 / /dev/shm rw,nosuid - tmpfs tmpfs rw\n"
        "24 21 0:32 / /mnt/nfs rw - nfs4 server:/a\\040b rw\n"
    ),
    "proc/self/limits": LIMITS.format(files=65536, address="unlimited"),
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "proc/meminfo": MEMINFO,
    "proc/vmstat": "pgfault 5\noom_kill 0\n",
    "proc/1/comm": "systemd\n",
    "proc/1/stat": "1 (systemd) S 0 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 7 1000 10 0\n",
    "proc/sys/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555\n",
    "proc/sys/kernel/core_pattern": "core\n",
    "proc/sys/kernel/yama/ptrace_scope": "1\n",
    "proc/sys/kernel/osrelease": "6.8.0\n",
    "sys/fs/cgroup/cgroup.controllers": "memory pids\n",
    "sys/fs/cgroup/cgroup.procs": "",
    "run/systemd/system/": "",
    "dev/shm/": "",
    "dev/kmsg": "",
}


def level(path: str, *, limit: str = "max", current: int = 1 << 30, group: int = 0, kills: int = 0) -> dict[str, str]:
    """The files of one cgroup of version 2."""
    files = {
        "cgroup.procs": "",
        "cgroup.controllers": "memory pids\n",
        "memory.max": f"{limit}\n",
        "memory.current": f"{current}\n",
        "memory.stat": "active_file 0\ninactive_file 0\n",
        "memory.oom.group": f"{group}\n",
        "memory.events": f"low 0\nhigh 0\nmax 0\noom {kills}\noom_kill {kills}\n",
    }
    return {f"sys/fs/cgroup/{path}/{name}": text for name, text in files.items()}


def make_host(root: Path, *changes: Mapping[str, str | None]) -> Kernel:
    """Write PLAIN with two cgroup levels, then the changes (None takes a file away, "x/" makes a folder)."""
    files: dict[str, str | None] = {**PLAIN, **level("system.slice"), **level("system.slice/train.service")}
    for change in changes:
        files |= change
    for name, text in files.items():
        path = root / name
        if text is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text(text)
    return Kernel(root)
