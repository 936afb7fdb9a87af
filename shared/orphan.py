"""How long a worker may go on without its supervisor: to the end of its step and its checkpoint, but not for ever.

It leaves by itself at its next boundary (shared/stop_signals.py). One that hangs comes to none, and nobody is left to
find the hang: it kept its GPU's memory until a person looked. So it measures its own silence, by the limits that the
supervisor would have had. Asked once a second by a thread of shared/worker.py.
"""

from __future__ import annotations

from shared import phases

# Who did not come round for this long was stopped or not let run, and knows nothing of that time: `kill -CONT` of a
# worker that somebody stopped must leave it the time to save.
_BLIND_S = 5.0


class OrphanWatch:
    """One worker's silences, and since when it is alone; times are CLOCK_MONOTONIC seconds."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._longest: dict[str, float] = {}
        self._phase, self._reported = "", 0.0
        self._alone_since: float | None = None
        self._came_round = 0.0

    def overdue(self, now: float, alone: bool, phase: str, reported: float) -> float | None:
        """Seconds without a sign, once those are too many; None while it may go on, and while it is not alone.

        reported: when the last report changed something.
        """
        if self._reported and reported > self._reported and phase == self._phase:
            self._longest[phase] = max(self._longest.get(phase, 0.0), reported - self._reported)
        self._phase, self._reported = phase, reported
        blind, self._came_round = now - self._came_round > _BLIND_S, now
        if not alone:
            return None
        if self._alone_since is None or blind:
            self._alone_since = now
        silent = now - max(self._alone_since, reported)
        limit = phases.alone_limit_s(phase, self._longest.get(phase, 0.0), self._scale)
        if phase in phases.NOTHING_TO_SAVE:
            silent, limit = now - self._alone_since, min(limit, phases.LEAVE_S)
        # Also one that reports and reports and asks nobody whether to go on.
        too_long = now - self._alone_since > phases.most_alone_s(self._scale)
        return silent if silent > limit or too_long else None
