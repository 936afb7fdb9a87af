"""A run whose folder is no longer where it was: deleted, moved away, or replaced by another run's.

The lock lies on the file `.owner` that was opened, not on its name: after `rm -rf RUN` and the same command again, both
held "the" lock, and the old run's workers saved checkpoints among the new one's. So a supervisor compares the two with
every look (manifests/crew.py). All that its workers write goes by the folder's name, a last checkpoint too: they are
killed, not asked. What is finished in a folder that was moved goes with it untouched.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from manifests.launch_spec import LaunchSpec
from shared.atomic import held_locks
from shared.errors import FolderLost

_LOOKS, _BETWEEN_S = 6, 0.1


def is_lost(run_dir: Path) -> bool:
    """Whether the folder of this name is not the one whose lock this process holds; said after half a second of looks.

    A run is killed for it, so a disk that fails, a name that a network disk has lost for a moment, and a file system
    that numbers its files anew are no loss.
    """
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_S)
        if not _seems_lost(run_dir):
            return False
    return True


def _seems_lost(run_dir: Path) -> bool:
    held = held_locks()
    if not held:
        return False
    path = run_dir / ".owner"
    try:
        found = path.stat()
        if any(os.path.samestat(os.fstat(descriptor), found) for descriptor in held):
            return False
        signed = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return not signed or signed not in [os.pread(descriptor, len(signed) + 1, 0) for descriptor in held]


def moved_to() -> Path | None:
    """Where the folder whose lock this process holds is now; None when it was deleted."""
    for descriptor in held_locks():
        with suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return path.parent
    return None


def folder_lost(spec: LaunchSpec, moved: Path | None = None) -> FolderLost:
    """What ends such a run; `moved` where it is known to be now."""
    said = f"{spec.run_dir} was deleted or moved while {spec.role} ran there, so its workers were killed; "
    if moved is None:
        return FolderLost(f"{said}run the same command again to begin anew, or move the folder back first to go on")
    return FolderLost(
        f"{said}it is {moved} now, with all that was finished: move it back, then the same command goes on"
    )
