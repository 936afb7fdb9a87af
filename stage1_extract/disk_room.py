"""What a file system has left, and how fast it writes: the two questions a plan asks a disk.

Called by stage1_extract/extract.py (room only) and stage1_extract/plan_report.py. Sizes come from disk_plan.py.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.atomic import PARTIAL, disk_faults, nearest_existing
from shared.errors import DiskFull
from stage1_extract.disk_plan import Size

PROBE_BYTES = 256 << 20
_WRITE_BYTES = 8 << 20
_DEFAULT_RESERVE_GB, _DEFAULT_RESERVE_INODES, _MOST_OF_THE_DISK = 1.0, 1000, 0.05


def readable_bytes(count: float) -> str:
    """Bytes in the units of disks, powers of 1,000: 12 B, 3.45 kB, 79.4 GB, 1,234 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB" if count < 9999 else f"{count:,.0f} TB"


@dataclass(frozen=True, slots=True)
class Room:
    """What a file system has left for this user; `inodes` is None where there is no limit."""

    bytes: int
    inodes: int | None

    @classmethod
    def at(cls, path: Path) -> Room:
        """Where `path` lies or would lie."""
        stat = os.statvfs(nearest_existing(path))
        return cls(stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None)

    def lacks(self, needed: Size) -> str | None:
        """What is short, with both numbers, or None when it fits."""
        if needed.allocated > self.bytes:
            return f"{readable_bytes(needed.allocated)} are needed, {readable_bytes(self.bytes)} are free"
        if self.inodes is not None and needed.inodes > self.inodes:
            return f"{needed.inodes:,} files and folders are needed, {self.inodes:,} are free"
        return None


def reserve_of(path: Path, reserve_gb: float | None) -> Size:
    """What must stay free where `path` lies: so many GB, or by default 1 GB but at most 5 % of the disk.

    Of the inodes 1,000, but at most 5 % of all.
    """
    stat = os.statvfs(nearest_existing(path))
    default = min(_DEFAULT_RESERVE_GB * 1e9, _MOST_OF_THE_DISK * stat.f_blocks * stat.f_frsize)
    size = int(default if reserve_gb is None else reserve_gb * 1e9)
    return Size(size, size, int(min(_DEFAULT_RESERVE_INODES, _MOST_OF_THE_DISK * stat.f_files)), 0)


def require_room(where: Path, needed: Size, room: Room, reserve: Size | None = None) -> None:
    """Raise DiskFull when what is still to be written at `where`, and what must stay free, does not fit."""
    if (short := room.lacks(needed + (reserve or Size()))) is not None:
        kept = f" (with {readable_bytes(reserve.allocated)} in reserve)" if reserve else ""
        raise DiskFull(
            f"{where}: {short}{kept}; make room, or store less (--precision int8, --num-taps, --topk, "
            "--last-hidden none, fewer rows)"
        )


def measure_disk(path: Path, size: int = PROBE_BYTES) -> float:
    """GB/s of one process that writes `size` bytes of noise at `path` and fsyncs them; the file is removed again.

    Noise, made before the clock starts: neither a compressing disk nor the generator is measured. One stream is what
    one writer reaches; a striped file system may give several writers more. Raises DiskFull, PathNotWritable.
    """
    folder = nearest_existing(path)
    data = np.random.default_rng(0).bytes(size)
    probe = folder / f".{uuid.uuid4().hex}{PARTIAL}"
    with disk_faults(path):
        try:
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                started = time.perf_counter()
                for start in range(0, size, _WRITE_BYTES):
                    _write_all(descriptor, memoryview(data)[start : start + _WRITE_BYTES])
                os.fsync(descriptor)
                seconds = time.perf_counter() - started
            finally:
                os.close(descriptor)
        finally:
            probe.unlink(missing_ok=True)
    return size / seconds / 1e9


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
