"""All workers of a run, and the only place where their supervisor waits: whoever waits sees every death meanwhile.

Asks workers to leave, kills them with all that they started, records how each ended, samples the host. Used by
manifests/supervise.py, which decides.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from manifests.event_log import EventLog, print_line
from manifests.hang_watch import Learned
from manifests.host_watch import HostWatch
from manifests.launch_spec import LaunchSpec
from manifests.lost_folder import folder_lost, is_lost, moved_to
from manifests.stacks import save_stacks
from manifests.stop_requests import Requests, told
from manifests.worker_process import Exit, Seat
from shared import phases
from shared.errors import FolderLost

POLL_S = 0.1
STOP_GRACE_S = 120.0
GONE_S = 10.0
# A loop that did not come round for this long was stopped itself, and knows nothing of that time.
_BLIND_S = 5.0


class Crew:
    """The seats of a run; every method that takes time goes through `pump`."""

    def __init__(
        self, spec: LaunchSpec, log: EventLog, requests: Requests, host: HostWatch, draw: Callable[[], None]
    ) -> None:
        self.spec, self.log, self.requests, self.host = spec, log, requests, host
        self.seats = [Seat(spec, rank) for rank in range(spec.num_workers)]
        self.learned = Learned()
        self.blind_until = 0.0
        """Silence before this moment says nothing: we did not look."""
        self._draw = draw
        self._came_round = time.monotonic()
        self._told = 0
        self._faulty: set[str] = set()
        self._ending = self._lost = False

    @property
    def running(self) -> list[Seat]:
        """Seats whose process has not ended."""
        return [seat for seat in self.seats if seat.running]

    def pump(self, seconds: float) -> None:
        """Sleep, or until something happens; then see who died, who asks, sample, draw. Raises FolderLost."""
        self.requests.wait(seconds)
        self.require_folder()
        for seat in self.seats:
            if (exit := seat.poll()) is not None:
                self._record(seat, exit)
        now = time.monotonic()
        if now - self._came_round > _BLIND_S:
            self.blind_until = now
        self._came_round = now
        with self.guarded("a sample of the host"):
            self.host.tick({seat.rank: seat.pid for seat in self.running})
        self.log.retry()
        self._draw()

    def require_folder(self) -> None:
        """Before anything is written there: raise FolderLost once the folder of this name is not this run's."""
        # Not asked again once it is known: each such look takes half a second, and the workers are to be ended.
        self._lost = self._lost or bool(self.spec.run_id and is_lost(self.spec.run_dir))
        if self._lost:
            self.log.leave_folder()
            if not self._ending:
                raise folder_lost(self.spec, moved_to())

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """For what a run can do without: a fault in there is said once, and the run goes on."""
        try:
            yield
        except FolderLost:
            raise
        except Exception:  # noqa: BLE001
            if what not in self._faulty:
                self._faulty.add(what)
                print_line(f"without {what}:\n{traceback.format_exc()}")

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until the condition holds, or the time is over: False."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self.pump(min(POLL_S / 2, max(0.0, deadline - time.monotonic())))
        return True

    def stop_grace(self) -> float:
        """Seconds that workers have to save and leave."""
        longest = self.learned.longest.get(phases.CHECKPOINT, 0.0)
        return max(STOP_GRACE_S, 3 * longest) * self.spec.hurry

    def end(self, seats: Sequence[Seat], grace_s: float, *, stacks: bool = False) -> None:
        """Ask, wait, then kill; with `stacks` those of who did not hear are saved first."""
        for seat in seats:
            seat.ask_to_leave()
        self.tell_requests()
        self.wait(lambda: self.requests.now or not any(seat.running for seat in seats), grace_s)
        self.tell_requests()
        left = [seat for seat in seats if seat.running]
        if left and stacks and not self.requests.now:
            self.save_stacks(left)
        self._kill(left)

    def save_stacks(self, seats: Sequence[Seat]) -> None:
        """What they are doing, into files, before they are killed."""
        with self.guarded("stacks"):
            files, groups = save_stacks(seats, self.wait)
            self.log.write("stacks saved", attempt=seats[0].attempt, files=files, groups=groups)

    def sweep(self) -> None:
        """What ended workers started must not outlive them."""
        self.wait(lambda: all([seat.sweep() for seat in self.seats]), GONE_S)

    def leave_nobody(self) -> None:
        """Whatever happened: no process of this run goes on."""
        self._ending = True
        with suppress(Exception):
            self._kill(self.running)
            self.sweep()

    def tell_requests(self) -> None:
        """Write down every request to stop, once."""
        for request in self.requests.by[self._told :]:
            self._told += 1
            now = self._told > 1 or bool(request.get("now"))
            then = "workers are killed" if now else "workers save and leave, asking again kills them"
            self.log.write("stop asked", f"stop asked by {told(request)}: {then}", by=request, now=now)

    def _kill(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            seat.kill()
        if not self.wait(lambda: not any(seat.running for seat in seats), GONE_S):
            held = [seat for seat in seats if seat.running]
            pids = [seat.pid for seat in held]
            said = f"processes {pids} did not end within {GONE_S:.0f} s of SIGKILL: the kernel holds them"
            ranks, ticks = [seat.rank for seat in held], [seat.start_ticks for seat in held]
            self.log.write("processes held", said, pids=pids, ranks=ranks, start_ticks=ticks)
        self.sweep()

    def _record(self, seat: Seat, exit: Exit) -> None:
        facts: dict[str, Any] = {}
        with self.guarded("facts about the host at a death"):
            facts = self.host.at_death(killed=exit.signal == signal.SIGKILL and not exit.asked)
        beat = exit.beat
        self.log.write(
            "worker ended",
            "" if exit.well else f"worker {seat.rank} ended by {exit.how()}",
            attempt=exit.attempt,
            rank=exit.rank,
            pid=exit.pid,
            exit_code=exit.code,
            signal=exit.signal,
            phase=beat.phase if beat else None,
            done=beat.done if beat else None,
            total=beat.total if beat else None,
            unit=beat.unit if beat else None,
            saved=beat.saved if beat else None,
            spent=beat.spent_until(exit.mono) if beat else {},
            beat_age=round(exit.mono - beat.alive, 3) if beat and beat.alive_count else None,
            ending=exit.ending,
            peak_memory=exit.peak_memory,
            **facts,
            asked=exit.asked,
            last_lines=[] if exit.well else seat.last_lines(),
            fault_lines=[] if exit.well else seat.fault_lines(),
        )
        seat.sweep()
