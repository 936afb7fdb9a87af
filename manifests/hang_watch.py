"""What a supervisor sees of its workers, second by second: their beats, their states, how long they were silent.

Keeps what judgement needs over time: since when a process is in its state, its share of a core, the longest silence of
each phase that ended by itself. Used by manifests/supervise.py; the judgement is manifests/hang.py's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from manifests.hang import Look
from shared import phases
from shared.beat import BeatState
from shared.kernel import TICKS_PER_S, Process

_CPU_WINDOW_S = 3.0
_LEAST_WINDOW_S = 0.5


@dataclass
class Learned:
    """What phases took in this run: seconds by phase."""

    longest_gap: dict[str, float] = field(default_factory=dict)
    """Longest silence that ended by itself, also by the next phase."""
    longest: dict[str, float] = field(default_factory=dict)
    """Longest duration of the whole phase."""

    def see(self, before: BeatState, after: BeatState, forgiven: float = 0.0) -> None:
        """Two looks at the same process's beat, one after the other; time before `forgiven` teaches nothing."""
        if after.reported > before.reported:
            _keep_longest(self.longest_gap, before.phase, after.reported - max(before.reported, forgiven))
        if after.phase_since > before.phase_since:
            _keep_longest(self.longest, before.phase, after.phase_since - max(before.phase_since, forgiven))


def _keep_longest(longest: dict[str, float], phase: str, seconds: float) -> None:
    longest[phase] = max(longest.get(phase, 0.0), seconds)


@dataclass
class RankWatch:
    """One worker process, from its start (`started`, CLOCK_MONOTONIC seconds) to its end."""

    started: float
    beat: BeatState | None = None
    forgiven: float = 0.0
    """Silence before this moment does not count: it, or we, were stopped."""
    grace_s: float | None = None
    """After a SIGCONT of ours: the limit of the silence since `forgiven`."""
    state: str = ""
    state_since: float = 0.0
    stop_named: bool = False
    _cpu: deque[tuple[float, int, bool]] = field(default_factory=lambda: deque(maxlen=64))
    """(when, CPU ticks, whether it ran or wanted to) of the last looks."""

    def see(self, beat: BeatState | None, process: Process | None, now: float, learned: Learned) -> None:
        """Take in one look at the worker's beat and process."""
        state = process.state if process else ""
        if state != self.state:
            if self.state in ("T", "t"):  # an hour's SIGSTOP is no hour that the phase took
                self.forgive(now)
            self.state, self.state_since = state, now
            self.stop_named = False
        if beat is not None:
            if self.beat is not None:
                learned.see(self.beat, beat, self.forgiven)
                if beat.reported > self.beat.reported:
                    self.grace_s = None
            self.beat = beat
        if process is not None:
            self._cpu.append((now, process.cpu_ticks, state == "R"))

    def look(self, now: float, learned: Learned, scale: float) -> Look:
        """What is to be judged."""
        phase = self.beat.phase if self.beat and self.beat.phase else phases.SPAWN
        since = max(self.started, self.forgiven, self.beat.reported if self.beat else 0.0)
        limit = phases.limit_s(phase, learned.longest_gap.get(phase, 0.0), scale)
        alive = None
        if self.beat is not None and self.beat.alive_count:
            alive = now - max(self.beat.alive, self.forgiven)
        return Look(
            phase=phase,
            silent_s=now - since,
            limit_s=limit if self.grace_s is None else self.grace_s,
            state=self.state,
            state_s=now - self.state_since,
            alive_s=alive,
            cpu_share=self._busy_share(now, since),
        )

    def forgive(self, now: float) -> None:
        """Start the clock of silence again."""
        self.forgiven = now

    def _busy_share(self, now: float, since: float) -> float | None:
        """Cores used during the silence, or how often it wanted one: on crowded cores a busy loop gets few."""
        seen = [point for point in self._cpu if point[0] >= max(now - _CPU_WINDOW_S, since)]
        if len(seen) < 3 or seen[-1][0] - seen[0][0] < _LEAST_WINDOW_S:
            return None
        used = (seen[-1][1] - seen[0][1]) / TICKS_PER_S / (seen[-1][0] - seen[0][0])
        return max(used, sum(ran for _, _, ran in seen) / len(seen))
