"""One look per second at the host and the workers, kept in a ring: what the last minute before a death was like.

The supervisor samples; `manifests/evidence.py` reads the ring and `manifests/verdict.py` judges by it. A sample costs
well under a millisecond and starts no command.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.kernel import Kernel, process

SLOTS = 600
"""Ten minutes at one sample a second."""
SLOT_BYTES = 4096
"""Eight ranks take 700 bytes; what does not fit would lose its inside."""
# An answer of the disk older than this is no fact about now; a mount that is silent for longer is one by itself.
_SILENT_S = 3.0
_EVERY_S = 1.0


def samples_path(run_dir: Path) -> Path:
    """Where a run's samples are."""
    return run_dir / "supervision" / "samples.ring"


def events_path(run_dir: Path) -> Path:
    """Where the second copy of a run's events is."""
    return run_dir / "supervision" / "events.ring"


class Sampler:
    """Samples of one host and one run folder."""

    def __init__(self, kernel: Kernel, run_dir: Path) -> None:
        self.kernel = kernel
        self._disk = _DiskWatch(run_dir)

    def sample(self, ranks: Mapping[int, int]) -> dict[str, Any]:
        """One sample; `ranks` maps rank to pid. Plain JSON values; what cannot be read is None.

        `t` is wall time for people, `mono` (s) what order is judged by. `ranks` gives [pid, state, resident bytes,
        CPU ticks] per rank; `disk_silent_s` is there when the run folder's file system does not answer.
        """
        shm = self.kernel.shm()
        found = {rank: (pid, process(pid)) for rank, pid in ranks.items()}
        return {
            "t": time.time(),
            "mono": time.monotonic(),
            "memory": self.kernel.memory(),
            "oom": self.kernel.oom_counts(),
            "pressure": self.kernel.pressure(),
            "shm_free": shm[0] if shm else None,
            "shm_total": shm[1] if shm else None,
            **self._disk.newest(),
            "ranks": {
                str(rank): [pid, seen.state, seen.rss, seen.cpu_ticks] if seen else [pid, "", 0, 0]
                for rank, (pid, seen) in found.items()
            },
        }

    def close(self) -> None:
        """End the thread that watches the disk."""
        self._disk.close()


class _DiskWatch:
    """Free space of a folder's file system, asked by a thread: statvfs on a dead NFS mount never comes back.

    The supervisor must not hang with the disk it watches, so it takes the newest answer, at most a second old. The
    thread is a daemon: an unanswered call holds up nobody's end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answer: tuple[int | None, int | None] = (None, None)
        self._answered = time.monotonic()
        self._closed = threading.Event()
        first = threading.Thread(target=self._look, name="disk watch, first look", daemon=True)
        first.start()
        first.join(0.2)  # a healthy disk answers in microseconds; a silent one is left behind
        threading.Thread(target=self._watch, name="disk watch", daemon=True).start()

    def newest(self) -> dict[str, Any]:
        silent = time.monotonic() - self._answered
        if silent < _SILENT_S:
            return {"disk_free": self._answer[0], "disk_inodes": self._answer[1]}
        return {"disk_free": None, "disk_inodes": None, "disk_silent_s": round(silent, 1)}

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            stat = os.statvfs(self._folder)
            self._answer = (stat.f_bavail * stat.f_frsize, stat.f_favail)
        except OSError:
            self._answer = (None, None)
        self._answered = time.monotonic()
