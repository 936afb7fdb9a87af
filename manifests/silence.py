"""The look for hangs: what every rank of a team was seen doing, judged, and what is written down about it.

Used by manifests/supervise.py. A stopped process is named and left alone; once its limit has passed it is continued
and gets one more. The judgement is manifests/hang.py's, the memory manifests/hang_watch.py's.
"""

from __future__ import annotations

import math
import time
from typing import Any

from manifests.crew import POLL_S, Crew
from manifests.hang import STOPPED, Hang, Look, grace_after_continue_s, hung
from manifests.hang_watch import RankWatch
from manifests.team import Team
from manifests.worker_process import Seat
from shared.gpus import GpuQuestion


class Silence:
    """Looks about once a second, more often where tests scale the limits down."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.scale = crew.spec.hang_limit_scale
        self._every = max(POLL_S, crew.spec.hurry)

    def begin(self, team: Team) -> None:
        """A new attempt has started."""
        team.watches = {seat.rank: RankWatch(seat.started) for seat in team.seats}

    def look(self, team: Team) -> Hang | None:
        """A hang among the running ranks of a team, when it is time to look."""
        now = time.monotonic()
        if now < team.look_due:
            return None
        team.look_due = now + self._every
        with self.crew.guarded("the look for hangs"):
            return self._judged(team, now)
        return None

    def _judged(self, team: Team, now: float) -> Hang | None:
        looks = {seat.rank: self._see(team, seat, now) for seat in team.running}
        found = hung(looks, self.crew.spec.hurry)
        if found is None or found.code != STOPPED:
            return found
        watch = team.watches[found.rank]
        if watch.grace_s is not None:
            return found
        # Stopped past its limit: whoever stopped it has forgotten it. It gets one more limit to show that it runs.
        watch.grace_s = grace_after_continue_s(looks[found.rank].limit_s, self.scale)
        self.crew.seats[found.rank].let_go_on()
        for other in team.watches.values():
            other.forgive(now)
        return None

    def name(self, team: Team, hang: Hang) -> None:
        """Write the hang down, and save what everybody does; nothing is killed yet."""
        look = self._look_of(team, hang.rank, time.monotonic())
        gpus = [gpu.as_dict() for gpu in GpuQuestion().answer().gpus]
        said = (
            f"worker {hang.rank} made no progress in phase {look.phase} for {look.silent_s:.0f} s (limit "
            f"{look.limit_s:.0f} s): {hang.code}; stacks are saved before it is ended"
        )
        self._write(team, hang, look, said, "kill", **({"gpus": gpus} if gpus else {}))
        self.crew.save_stacks(team.running)

    def _see(self, team: Team, seat: Seat, now: float) -> Look:
        watch = team.watches[seat.rank]
        if self.crew.blind_until > watch.forgiven:
            watch.forgive(self.crew.blind_until)
        watch.see(seat.beat(), seat.process(), now, self.crew.learned)
        look = self._look_of(team, seat.rank, now)
        if look.stopped and not watch.stop_named:
            watch.stop_named = True
            said = (
                f"worker {seat.rank} (process {seat.pid}) is stopped (state {look.state}), not hung: "
                f"`kill -CONT {seat.pid}` lets it go on"
            )
            self._write(team, Hang(seat.rank, STOPPED, {seat.rank: STOPPED}), look, said, "named")
        return look

    def _look_of(self, team: Team, rank: int, now: float) -> Look:
        return team.watches[rank].look(now, self.crew.learned, self.scale)

    def _write(self, team: Team, hang: Hang, look: Look, said: str, action: str, **more: Any) -> None:
        self.crew.log.write(
            "hang",
            said,
            attempt=team.number,
            rank=hang.rank,
            code=hang.code,
            phase=look.phase,
            silent_s=round(look.silent_s, 2),
            limit_s=round(look.limit_s, 2) if math.isfinite(look.limit_s) else None,
            state=look.state,
            cpu_share=None if look.cpu_share is None else round(look.cpu_share, 3),
            alive_age=None if look.alive_s is None else round(look.alive_s, 2),
            action=action,
            names={str(rank): name for rank, name in hang.names.items()},
            **more,
        )
