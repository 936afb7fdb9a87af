"""The workers that start and fail together: all ranks of a training, one worker of an extraction.

The state of manifests/supervise.py's loop, without its actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from manifests.hang_watch import RankWatch
from manifests.judgement import Judged
from manifests.restart import Attempt, fingerprint
from manifests.room import Room
from manifests.worker_process import Exit, Seat

State = Literal["waiting", "running", "paused", "done", "failed"]


@dataclass
class Team:
    """Seats, what was seen of them, and the attempts so far; times are CLOCK_MONOTONIC seconds."""

    seats: list[Seat]
    watches: dict[int, RankWatch] = field(default_factory=dict)
    history: list[Attempt] = field(default_factory=list)
    state: State = "waiting"
    due: float = 0.0
    """When to start (waiting) or to look for room again (paused)."""
    number: int = 0
    """Of the newest attempt, from 1."""
    saved: float | None = None
    """The most that was ever durable (BeatState.saved)."""
    reason: str = "first start"
    """Why the next attempt starts, or why there is none."""
    room: Room | None = None
    judged: Judged | None = None
    look_due: float = 0.0
    """When to look for a hang again."""
    _started: float = 0.0

    @property
    def ranks(self) -> list[int]:
        """Of all seats."""
        return [seat.rank for seat in self.seats]

    @property
    def running(self) -> list[Seat]:
        """Seats whose process has not ended."""
        return [seat for seat in self.seats if seat.running]

    @property
    def ended(self) -> list[Exit]:
        """How those of this attempt ended that did."""
        return [seat.exit for seat in self.seats if seat.exit is not None]

    def phase(self, rank: int) -> str:
        """What a rank was last seen at."""
        watch = self.watches.get(rank)
        return watch.beat.phase if watch is not None and watch.beat is not None else ""

    def forget_endings(self) -> None:
        """What ended before is no ending of the next attempt, nor of one that could not start."""
        for seat in self.seats:
            seat.forget()

    def begin(self, now: float) -> None:
        """A new attempt starts."""
        self.state, self._started, self.look_due = "running", now, now
        self.number += 1

    def wait(self, due: float, reason: str) -> None:
        """The next attempt starts at `due`."""
        self.state, self.due, self.reason = "waiting", due, reason

    def pause(self, room: Room, due: float) -> None:
        """No attempt starts before there is room; the one that ended was no failure."""
        self.state, self.room, self.due = "paused", room, due
        self.history[-1] = replace(self.history[-1], paused=True)

    def fail(self, judged: Judged, reason: str) -> None:
        """No attempt follows."""
        self.state, self.judged, self.reason = "failed", judged, reason

    def close(self, judged: Judged, first: Exit | None, now: float) -> Attempt:
        """The attempt has ended by `first`; what it saved counts."""
        beats = [exit.beat for exit in self.ended if exit.beat is not None]
        saved = max((beat.saved for beat in beats if beat.saved is not None), default=None)
        progressed = saved is not None and saved > (self.saved or 0.0)
        if progressed:
            self.saved = saved
        error, message = (first.error, first.message) if first else ("", judged.sentence)
        if judged.code == "unknown" and first is not None and not error:
            # No name makes two failures the same: a SIGKILL is not a worker that could not be started.
            error = f"exit {first.code}" if first.signal is None else f"signal {first.signal}"
        attempt = Attempt(
            number=self.number,
            started=self._started,
            ended=now,
            fingerprint=fingerprint(judged.code, error, message),
            progressed=progressed,
        )
        self.history.append(attempt)
        return attempt
