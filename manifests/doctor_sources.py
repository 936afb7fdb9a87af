"""Where `dflash doctor` reads from: small files of the kernel and of systemd, and the table of mounts.

Used by the reading halves of doctor_*.py, always below a root that a test may set. Next: manifests/doctor_folder.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

NOWHERE = "unknown"


def text_of(path: Path) -> str:
    """A file's text without the space around it; "" when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    at: str
    kind: str
    """As ext4, overlay, nfs4."""
    source: str
    options: frozenset[str]


def mounts(root: Path) -> list[Mount]:
    """What /proc/self/mountinfo below `root` lists, in its order."""
    found = []
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 6 and len(rest) >= 2:
            options = {*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ())}
            found.append(Mount(_plain(fields[4]), rest[0], _plain(rest[1]), frozenset(options)))
    return found


def mount_of(path: Path, table: list[Mount]) -> Mount:
    """The file system that holds `path`: the longest mount point above it, of equal ones the last mounted."""
    real = os.path.realpath(path)
    found = Mount("", NOWHERE, NOWHERE, frozenset())
    for mount in table:
        above = mount.at.rstrip("/") + "/"
        if (real + "/").startswith(above) and len(mount.at) >= len(found.at):
            found = mount
    return found


def _plain(text: str) -> str:
    r"""The table writes a space as \040 and so on."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
