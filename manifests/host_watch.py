"""The host as a supervisor sees it: a sample a second into a ring, and what the OOM counters said before a death.

Used by manifests/supervise.py. A failing look never ends a run: facts that cannot be had are None.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.errors import DflashError
from shared.kernel import Kernel
from shared.ring import Ring
from shared.samples import SLOT_BYTES, SLOTS, Sampler, samples_path

SAMPLE_EVERY_S = 1.0
# The kernel counts an OOM kill when it decides on it; a process of 200 GB then takes seconds to die. A count from just
# before we notice the death may have moved already.
_BEFORE_S = 30.0

Counts = dict[str, int | None]


class HostWatch:
    """Samples of one run; without a folder only the counters are kept."""

    def __init__(self, kernel: Kernel, run_dir: Path | None) -> None:
        self.kernel = kernel
        self._due = 0.0
        self._counts: deque[tuple[float, Counts]] = deque([(time.monotonic(), kernel.oom_counts())], maxlen=64)
        self._sampler: Sampler | None = None
        self._ring: Ring | None = None
        self._newest: dict[str, Any] = {}
        if run_dir is not None:
            with suppress(OSError, DflashError):
                self._sampler = Sampler(kernel, run_dir)
                self._ring = Ring(samples_path(run_dir), SLOTS, SLOT_BYTES)

    def tick(self, pids: Mapping[int, int]) -> bool:
        """Take a sample when one is due (`pids`: {rank: pid}); whether it was."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + SAMPLE_EVERY_S
        if self._sampler is not None:
            self._newest = self._sampler.sample(pids)
            self._counts.append((now, dict(self._newest["oom"])))
            if self._ring is not None:
                with suppress(OSError, DflashError):
                    self._ring.append(self._newest)
        return True

    def since(self, moment: float) -> None:
        """Forget the counters before an attempt: an OOM kill of another one is no evidence about this."""
        kept = [point for point in self._counts if point[0] >= moment]
        self._counts.clear()
        self._counts.extend(kept or [(moment, self.kernel.oom_counts())])

    def at_death(self, *, killed: bool) -> dict[str, Any]:
        """oom_before, oom_after, memory and shm_free, for the event of a worker's death.

        `killed`: by a SIGKILL that was not ours. Such a death uses up one of the OOM kills that were counted: the next
        one must have its own.
        """
        now, after = time.monotonic(), self.kernel.oom_counts()
        before = dict(
            next((counts for moment, counts in self._counts if now - moment <= _BEFORE_S), self._counts[-1][1])
        )
        for name in [name for name, count in after.items() if killed and (before.get(name) or 0) < (count or 0)]:
            for _, counts in self._counts:
                counts[name] = min((counts.get(name) or 0) + 1, after[name] or 0)
        shm = self.kernel.shm()
        return {
            "oom_before": before,
            "oom_after": after,
            "memory": self.kernel.memory(),
            "shm_free": shm[0] if shm else None,
        }

    def close(self) -> None:
        """End the sampler's thread."""
        if self._sampler is not None:
            self._sampler.close()
        if self._ring is not None:
            self._ring.close()
