"""The disks that a run needs: the run folder (kept? locks? how fast is fsync?), /dev/shm, the temporary folder.

`measure` is called in a process of its own (manifests/doctor_child.py), because a dead network mount answers never;
`judge_folder` is pure. Called by manifests/doctor_machine.py. Next: manifests/doctor_limits.py.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.doctor_finding import Finding, size
from manifests.doctor_sources import Mount
from shared.atomic import disk_faults, nearest_existing

ROUNDS = 20
_GIB = 1 << 30
# A checkpoint of a drafter with 1.73 B parameters: fp32 weights and both moments.
_CHECKPOINT = 21 * 10**9
# Below these a run cannot even begin: rings, logs, the first records.
_LEAST_BYTES, _LEAST_INODES = 256 << 20, 100
_FEW_INODES = 20_000
_SLOW_FSYNC_S, _WORST_FSYNC_S = 0.05, 1.0
_SMALL_SHM = _GIB
_SMALL_TEMPORARY = 2 * _GIB
_GONE_WITH = {
    "tmpfs": "the machine or container",
    "ramfs": "the machine",
    "overlay": "the container",
    "overlayfs": "the container",
    "aufs": "the container",
}
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")


@dataclass(frozen=True)
class FolderFacts:
    """The run folder, /dev/shm and the temporary folder; sizes in bytes."""

    path: str
    mount: Mount
    measured: Mapping[str, Any]
    """What `measure` returned; empty when it did not return."""
    fault: str
    """Why it did not."""
    shm: tuple[int, int] | None
    """(free, total)."""
    temporary: str
    temporary_mount: Mount
    temporary_free: int | None


def measure(folder: str) -> dict[str, Any]:
    """Try out the file system that holds `folder`, or its nearest parent that exists; leaves nothing behind.

    {"free", "inodes", "total_inodes", "fsync": [s], "refused": {what: why}}. Raises PathNotWritable, DiskFull.
    """
    place = nearest_existing(Path(folder))
    stat = os.statvfs(place)
    found: dict[str, Any] = {
        "free": stat.f_bavail * stat.f_frsize,
        "inodes": stat.f_favail,
        "total_inodes": stat.f_files,
    }
    with disk_faults(place), tempfile.TemporaryDirectory(prefix=".dflash-doctor-", dir=place) as made:
        found["fsync"] = _fsync_times(Path(made) / "fsync")
        found["refused"] = {
            name: why
            for name, trial in (("flock", _try_flock), ("posix_fallocate", _try_room), ("shared mmap", _try_mmap))
            if (why := _refusal(trial, Path(made) / name))
        }
    return found


def judge_folder(facts: FolderFacts) -> list[Finding]:
    """The findings of the part "disks"."""
    found = [file_system(facts.path, facts.mount)]
    if facts.fault:
        advice = "choose a folder on a disk that answers and can be written: --run-dir"
        found.append(Finding("disks", "run folder", "broken", facts.fault, advice))
    else:
        found += [_room(facts.measured), _fsync(facts.measured), _services(facts.measured)]
    return [*found, shared_memory(facts.shm), _temporary(facts)]


def file_system(path: str, mount: Mount) -> Finding:
    """Whether what is written there is still there tomorrow, and for whom."""
    where = f"{path}: {mount.kind} at {mount.at or '?'}"
    if gone := _GONE_WITH.get(mount.kind):
        return Finding(
            "disks", "file system", "limited",
            f"{where}: everything in it goes with {gone}, checkpoints and the evidence of what happened too",
            "put runs on a disk or a mounted volume: --run, --out",
        )  # fmt: skip
    if mount.kind in _NETWORK or mount.kind.startswith("fuse."):
        return Finding(
            "disks", "file system", "limited",
            f"{where}, a network or user-space file system: a lock or a liveness signal may not reach other hosts",
            "start each run from one host only, and ask `dflash status` there",
        )  # fmt: skip
    return Finding("disks", "file system", "ok", where)


def shared_memory(shm: tuple[int, int] | None) -> Finding:
    """Whether /dev/shm has room for NCCL and worker processes; a full one is a SIGBUS."""
    advice = "docker run --shm-size 16g (or --ipc host); Kubernetes: an emptyDir with medium Memory at /dev/shm"
    if shm is None:
        return Finding("disks", "/dev/shm", "limited", "is not there: ranks cannot share memory", advice)
    free, total = shm
    found = f"{size(free)} of {size(total)} free"
    if total < _SMALL_SHM or free < _SMALL_SHM // 2:
        return Finding("disks", "/dev/shm", "limited", f"{found}: when it is full, a rank dies of SIGBUS", advice)
    return Finding("disks", "/dev/shm", "ok", found)


def _room(measured: Mapping[str, Any]) -> Finding:
    free, inodes = measured["free"], measured["inodes"]
    counted = f" and {inodes:,} inodes" if measured["total_inodes"] else ""
    found = f"{size(free)}{counted} free"
    few = bool(measured["total_inodes"]) and inodes < _FEW_INODES
    if free < _LEAST_BYTES or (few and inodes < _LEAST_INODES):
        return Finding(
            "disks", "room", "broken", f"{found}: a run cannot begin", "make room, or give another --run-dir"
        )
    if free < _CHECKPOINT or few:
        found += f"; a checkpoint of a drafter for a 27B target takes {size(_CHECKPOINT)}, and three are kept"
        advice = (
            "make room, or expect a pause: a run waits for room and goes on (`dflash plan` says what a store takes)"
        )
        return Finding("disks", "room", "limited", found, advice)
    return Finding("disks", "room", "ok", found)


def _fsync(measured: Mapping[str, Any]) -> Finding:
    times = measured["fsync"]
    median, slowest = statistics.median(times), max(times)
    found = f"{1e3 * median:.2g} ms median, {1e3 * slowest:.2g} ms worst of {len(times)} writes of 4 KiB"
    if median > _SLOW_FSYNC_S or slowest > _WORST_FSYNC_S:
        advice = "use a local disk for runs: every record, block and checkpoint waits for it"
        return Finding("disks", "fsync", "limited", found, advice)
    return Finding("disks", "fsync", "ok", found)


def _services(measured: Mapping[str, Any]) -> Finding:
    refused = measured["refused"]
    if not refused:
        return Finding(
            "disks", "locks, mmap", "ok", "flock, posix_fallocate and shared mmap work; O_DIRECT is not used"
        )
    said = ", ".join(f"{name}: {why}" for name, why in refused.items())
    return Finding(
        "disks", "locks, mmap", "broken",
        f"{said}: runs keep their folder by flock and their heartbeat in a mapped file",
        "put runs on another file system, or mount this one with locks (Lustre: -o flock)",
    )  # fmt: skip


def _temporary(facts: FolderFacts) -> Finding:
    found = f"{facts.temporary}: {facts.temporary_mount.kind}, {size(facts.temporary_free)} free"
    advice = "set TMPDIR, or `dflash train --compile-cache`, to a folder of a local disk"
    if "noexec" in facts.temporary_mount.options:
        found += ", noexec: compiled code cannot be loaded from there"
        return Finding("disks", "temporary folder", "limited", found, advice)
    if facts.temporary_free is not None and facts.temporary_free < _SMALL_TEMPORARY:
        return Finding("disks", "temporary folder", "limited", found, advice)
    return Finding("disks", "temporary folder", "ok", found)


def _fsync_times(path: Path) -> list[float]:
    times = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for _ in range(ROUNDS):
            os.write(descriptor, b"\0" * 4096)
            started = time.perf_counter()
            os.fsync(descriptor)
            times.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
    return times


def _refusal(trial: Any, path: Path) -> str:
    try:
        return str(trial(path))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "failed")


def _try_flock(path: Path) -> str:
    """ "" when a second descriptor is kept out."""
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "lets two in"
    finally:
        os.close(first)
        os.close(second)


def _try_room(path: Path) -> str:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, 8192)
        return ""
    finally:
        os.close(descriptor)


def _try_mmap(path: Path) -> str:
    """ "" when what is written to the mapping is read from the file."""
    path.write_bytes(b"\0" * 8192)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        mapped[100] = 7
        file.seek(100)
        return "" if file.read(1) == b"\7" else "what is written does not arrive"
