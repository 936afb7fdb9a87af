"""Room on a disk that was full: how much a run needs to go on, and whether it is there.

Used by manifests/supervise.py while a run is paused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.atomic import nearest_existing

# Where a worker did not say how much it needs: so much more than it met, on a small disk 5 % of it.
MORE_BYTES, MORE_INODES, MOST_OF_THE_DISK = 64 << 20, 64, 0.05
_MARGIN = 1.05
_PROBE_BYTES = 1 << 20
# File systems without nameless files (NFS, some overlays).
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


@dataclass(frozen=True)
class Room:
    """What a folder's disk must have before a run goes on."""

    folder: Path
    bytes: int
    inodes: int

    @classmethod
    def at_failure(cls, folder: Path, endings: Sequence[dict[str, Any] | None]) -> Room:
        """For what ended so on a full disk; the endings' `needed_bytes` where they say."""
        free, inodes = _free(folder)
        stat = os.statvfs(nearest_existing(folder))
        more = min(MORE_BYTES, int(MOST_OF_THE_DISK * stat.f_blocks * stat.f_frsize))
        said = [int(ending["needed_bytes"]) for ending in endings if ending and ending.get("needed_bytes")]
        # With a gigabyte left it was not the bytes: inodes or a quota, and only trying tells.
        unsaid = free + more if free < 1 << 30 else 0
        needed = max(said) if said else unsaid
        return cls(folder, int(needed * _MARGIN), inodes + MORE_INODES if inodes < MORE_INODES else 0)

    def is_there(self) -> bool:
        """Whether the disk has what is needed, and takes a file."""
        free, inodes = _free(self.folder)
        return free >= self.bytes and inodes >= self.inodes and _takes_a_file(self.folder)

    def numbers(self) -> dict[str, int]:
        """free and needed bytes, for an event."""
        return {"free": _free(self.folder)[0], "needed": self.bytes}

    def sentence(self) -> str:
        """For a person."""
        free, inodes = _free(self.folder)
        files = f" and {inodes:,} files of {self.inodes:,}" if self.inodes else ""
        needed = f" of {self.bytes:,} bytes" if self.bytes else " bytes"
        return (
            f"the disk of {self.folder} is full: {free:,}{needed}{files} are free; paused until there is room, "
            "finished work is kept"
        )


def _free(folder: Path) -> tuple[int, int]:
    stat = os.statvfs(nearest_existing(folder))
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else 1 << 60


def _takes_a_file(folder: Path) -> bool:
    """Whether a megabyte can be had: a quota is not among the numbers of statvfs."""
    try:
        descriptor = os.open(nearest_existing(folder), os.O_WRONLY | os.O_TMPFILE, 0o600)
    except OSError as error:
        return error.errno in _NO_NAMELESS
    try:
        os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
