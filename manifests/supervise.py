"""The supervising loop: start workers, see every end within moments, decide, start again or stop.

manifests/supervisor.py runs it in a process of its own, `run_workers` (manifests/launch.py) in a command's. Workers
that are started together are a team: all ranks of a training, each worker of an extraction by itself. The order of
things is here; judgement is in hang.py, restart.py and judgement.py, what waits and kills in crew.py.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from manifests.crew import POLL_S, Crew
from manifests.event_log import EventLog, print_line
from manifests.hang import Hang
from manifests.host_watch import HostWatch
from manifests.judgement import (
    Judged,
    Outcome,
    failed_to_stop,
    failure,
    first_bad,
    judge,
    not_started,
    only_lost_peers,
    plain,
)
from manifests.launch_spec import LaunchSpec
from manifests.restart import DISK_FULL, Policy, decide
from manifests.room import Room
from manifests.silence import Silence
from manifests.spawn import environment_of
from manifests.stop_requests import Requests, code_of
from manifests.team import Team
from shared import phases
from shared.errors import DflashError, Interrupted, WorkerHung
from shared.kernel import Kernel

SETTLE_S = 1.0
"""After a death: others that die of the same cause do it within moments, and all belong to one verdict."""
PEER_GRACE_S = 10.0
HANG_GRACE_S = 5.0
ROOM_EVERY_S = 2.0
HELD_S = 600.0


def bug(log: EventLog, what: str, error: Exception) -> Outcome:
    """Write down an exception of our own that is being handled, and how the run ends by it."""
    trace = traceback.format_exc()
    print_line(trace)
    said = f"the supervisor {what}: {type(error).__name__}: {error}"
    log.write("supervisor failed", said, traceback=trace[-8000:])
    return Outcome("failed", 1, "Bug", f"{said}; its log has the traceback; run the same command again to go on")


class Supervision:
    """One run's workers, from the first start to the last end; `run` is called once."""

    def __init__(
        self,
        spec: LaunchSpec,
        log: EventLog,
        requests: Requests,
        *,
        recorded: bool = True,
        draw: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec, self.log, self.requests, self.recorded = spec, log, requests, recorded
        self.host = HostWatch(Kernel(), spec.run_dir if recorded else None)
        self.crew = Crew(spec, log, requests, self.host, draw)
        self.silence = Silence(self.crew)
        seats = self.crew.seats
        self.teams = [Team(part) for part in ([[seat] for seat in seats] if spec.independent else [seats])]
        self.policy = Policy(spec.restarts, spec.on_disk_full, spec.hurry)

    def run(self) -> Outcome:
        """Run all workers to their end; whatever goes wrong in here, none is left behind."""
        try:
            return self._run()
        except DflashError as error:  # a folder that takes no log, or is not there any more
            return Outcome("failed", error.exit_code, type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - it must outlive its own bugs long enough to say so
            return self._bug(error)
        finally:
            self.crew.leave_nobody()
            self.host.close()

    def _run(self) -> Outcome:
        while not all(team.state == "done" for team in self.teams):
            self.crew.pump(POLL_S)
            if self.requests.asked:
                return self._stop()
            for team in self.teams:
                self._advance(team)
                if team.state == "failed":
                    return self._give_up(team)
        return Outcome("finished")

    def _bug(self, error: Exception) -> Outcome:
        outcome = bug(self.log, "failed", error)
        with suppress(Exception):
            self.crew.end(self.crew.running, self.crew.stop_grace())
        return outcome

    def _advance(self, team: Team) -> None:
        """One round for one team."""
        if team.state == "waiting" and time.monotonic() >= team.due:
            if team.running:
                self._wait_for_held(team)
            else:
                self._start(team)
        elif team.state == "paused" and time.monotonic() >= team.due:
            self._look_for_room(team)
        elif team.state == "running":
            if any(not exit.well for exit in team.ended):
                self._failed(team)
            elif not team.running:
                team.state = "done"
            elif (hang := self.silence.look(team)) is not None:
                self._failed(team, hang)

    def _wait_for_held(self, team: Team) -> None:
        """The kernel holds a killed process: another beside it would meet its files and its GPU's memory."""
        if time.monotonic() < team.due + HELD_S * self.spec.hurry:
            return
        seat = team.running[0]
        said = (
            f"process {seat.pid} of worker {seat.rank} did not end within {HELD_S:.0f} s of SIGKILL: the kernel holds "
            "it, for a disk, a network mount or a GPU"
        )
        judged = Judged("hang.io", seat.rank, WorkerHung.exit_code, said)
        self.log.write("gave up", "", attempt=team.number, code=judged.code, ranks=team.ranks, reason=said)
        team.fail(judged, "")

    def _start(self, team: Team) -> None:
        self.crew.require_folder()
        now = time.monotonic()
        if not self.crew.running:  # else the death of another team's worker would lose what the kernel counted for it
            self.host.since(now)
        team.begin(now)
        self.log.write("attempt started", attempt=team.number, reason=team.reason, saved=team.saved, ranks=team.ranks)
        environment = environment_of(self.spec)
        team.forget_endings()
        for seat in team.seats:
            try:
                seat.start(team.number, environment)
            except (OSError, DflashError) as error:  # no process to be had, or no log for it
                self._not_started(team, seat.rank, error)
                return
            self.log.write(
                "worker spawned", attempt=team.number, rank=seat.rank, pid=seat.pid, start_ticks=seat.start_ticks
            )
        self.silence.begin(team)

    def _not_started(self, team: Team, rank: int, error: OSError | DflashError) -> None:
        """One of a team has no process: the others leave, and no ending of theirs is what happened."""
        said = f"worker {rank} could not be started: {error}"
        self.log.write("worker not started", said, attempt=team.number, rank=rank, error=type(error).__name__)
        self.crew.end(team.running, PEER_GRACE_S * self.spec.hurry)
        judged = not_started(self.spec.run_dir, rank, error, said)
        if self.recorded:
            self._write_verdict(team, judged)
        team.close(judged, None, time.monotonic())
        team.forget_endings()
        self._decide(team, judged)

    def _failed(self, team: Team, hang: Hang | None = None) -> None:
        """An attempt went wrong: see it whole, name it, end what is left of it, decide."""
        if hang is None:
            self.crew.wait(lambda: not team.running, SETTLE_S * self.spec.hurry)
            self.crew.wait(lambda: not team.running or not only_lost_peers(team.ended), PEER_GRACE_S * self.spec.hurry)
        else:
            self.silence.name(team, hang)
        if self.requests.asked:
            return
        judged = self._judge(team, hang)
        self.crew.end(team.running, self._grace(team, hang))
        self.crew.sweep()
        if self.requests.asked:
            return
        team.close(judged, first_bad(team.ended), time.monotonic())
        self._decide(team, judged)

    def _grace(self, team: Team, hang: Hang | None) -> float:
        """How long the others of a failed attempt have to leave."""
        if hang is not None:
            return HANG_GRACE_S * self.spec.hurry
        first = first_bad(team.ended)
        if (first is not None and first.error == Interrupted.__name__) or any(
            team.phase(seat.rank) == phases.CHECKPOINT for seat in team.running
        ):
            return self.crew.stop_grace()  # they save what they have
        return PEER_GRACE_S * self.spec.hurry

    def _judge(self, team: Team, hang: Hang | None) -> Judged:
        if not self.recorded:
            return plain(team.ended, hang)
        ranks = team.ranks if self.spec.independent else None
        judged = judge(self.spec.run_dir, team.ended, hang, team.number, ranks)
        self._write_verdict(team, judged)
        return judged

    def _write_verdict(self, team: Team, judged: Judged) -> None:
        if judged.verdict is not None:
            self.log.write("verdict", judged.sentence, attempt=team.number, verdict=judged.verdict, ranks=team.ranks)

    def _decide(self, team: Team, judged: Judged) -> None:
        endings = [exit.ending for exit in team.ended if exit.error == "DiskFull"]
        room = Room.at_failure(self.spec.run_dir, endings) if judged.code == DISK_FULL else None
        short = room is not None and not room.is_there()
        decision = decide(team.history, judged.code, self.policy, short_of_room=short)
        if decision.kind == "restart":
            what = failure(self.spec, team.ended, judged).message.partition("; its log: ")[0]
            who = f"worker {team.ranks[0]}" if self.spec.independent else "all workers"
            said = f"{what}; attempt {team.number + 1} of {who} begins in {decision.delay_s:.0f} s"
            self.log.write(
                "restart",
                said,
                attempt=team.number,
                ranks=team.ranks,
                delay_s=decision.delay_s,
                reason=decision.reason,
            )
            team.wait(time.monotonic() + decision.delay_s, f"{judged.code}; {decision.reason}")
        elif decision.kind == "pause" and room is not None:
            team.pause(room, time.monotonic() + ROOM_EVERY_S * self.spec.hurry)
            self.log.write("paused", room.sentence(), code=judged.code, **room.numbers(), ranks=team.ranks)
        else:
            if decision.code:
                judged = judged.as_policy(decision.code, decision.reason)
                self._write_verdict(team, judged)
            more = {"reason": decision.reason, "fingerprint": team.history[-1].fingerprint}
            self.log.write("gave up", "", attempt=team.number, code=judged.code, ranks=team.ranks, **more)
            team.fail(judged, decision.reason if decision.spent else "")

    def _look_for_room(self, team: Team) -> None:
        assert team.room is not None
        team.due = time.monotonic() + ROOM_EVERY_S * self.spec.hurry
        if team.room.is_there():
            self.log.write("continued", "there is room again; the run goes on", **team.room.numbers(), ranks=team.ranks)
            team.wait(time.monotonic(), "there is room again")

    def _stop(self) -> Outcome:
        """Asked to stop: workers save and leave; a second request, or a grace that has passed, kills."""
        self.crew.end(self.crew.running, self.crew.stop_grace(), stacks=True)
        exits = [seat.exit for seat in self.crew.seats]
        if all(exit is not None and exit.well for exit in exits):
            return Outcome("finished")  # the work was already done when the request came
        # What a team failed of before, and waits to try again, is no answer to the request.
        ended = [exit for team in self.teams if team.state == "running" for exit in team.ended]
        if (failed := None if self.requests.now else failed_to_stop(ended)) is not None:
            return failure(self.spec, [failed], plain([failed]))
        said = next((exit.message for exit in ended if exit.error == Interrupted.__name__), "")
        killed = [exit.rank for exit in ended if exit.asked and exit.signal == signal.SIGKILL]
        if killed and not self.requests.now:
            said = (
                f"{self.spec.role} stopped on request, but workers {killed} did not leave within "
                f"{self.crew.stop_grace():.0f} s and were killed: they saved nothing more; run the same command again "
                "to go on"
            )
        if not said:
            at_once = " at once" if self.requests.now else ""
            said = f"{self.spec.role} stopped on request{at_once}; run the same command again to go on"
        return Outcome("interrupted", Interrupted.exit_code, Interrupted.__name__, said, code_of(self.requests.by[0]))

    def _give_up(self, team: Team) -> Outcome:
        """A team failed for good: workers that depend on nobody finish what they are at."""
        assert team.judged is not None
        self.crew.end(self.crew.running, self.crew.stop_grace(), stacks=True)
        return failure(self.spec, team.ended, team.judged, team.reason)
