"""Plays one scenario of the fault matrix on a real supervisor: start, fault, end; what is said then: fault_marks.py.

The scenarios are data (tests/fault_scenarios.py), played by tests/fault_matrix.py and tests/test_fault_matrix.py.
A run is judged twice: by what its supervisor wrote at the time, and by its files alone after its end, as `dflash why`
does it. Nothing is mocked: processes, signals, disks and clocks are real; a made host is used only where a real one
would have to run out of memory or reboot.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_hosts import Host
from fault_toys import TICKS, Plan

from manifests.evidence import collect
from manifests.launch import start_supervisor
from manifests.launch_spec import LaunchSpec
from manifests.runs import recording
from manifests.verdict import Verdict, verdict
from shared.kernel import ROOT_VARIABLE, process, session_members

TESTS = Path(__file__).parent
PHASES = ("load", "compile", "step", "checkpoint")
END_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Expect:
    """The right answer."""

    code: str
    exit_code: int | None = None
    """Of the run; None: its supervisor did not live to give one."""
    ranks: str = "victims"
    """victims | all | none | any: whom the verdict must name."""
    confidence: tuple[str, ...] = ("proved",)
    or_code: tuple[str, ...] = ()
    """Other names that are as right."""
    named: str = ""
    """The code of a hang that must be on record though the run went on."""
    weaker: tuple[str, ...] = ()
    """Names that are less exact but not wrong, for when evidence is missing."""


DONE = Expect(code="done", exit_code=0, ranks="none")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One fault, what it is done to, and what it must be called."""

    name: str
    expect: Expect
    fault: str = "wait for it"
    act: Callable[[Live], None] | None = None
    """Called when all victims are at their moment; else the victims have the fault by themselves."""
    setup: Callable[[Live], Any] | None = None
    """A context manager around the run, entered before it starts: disks, hosts."""
    after: Callable[[Live], None] | None = None
    """What happens between the end and the question what happened: a reboot, evidence that gets lost."""
    phases: tuple[str, ...] = PHASES
    victims: int = 1
    roles: tuple[str, ...] = ("train", "extract")
    world: int = 3
    plan: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    entry: str = "fault_toys:work"
    prompt: bool = True
    """The event and the verdict must come as soon as promised for a death."""
    quick: bool = False
    """Played in `make test` in one phase of its choice; all else is for `-m slow`."""
    end_s: float = END_S
    outlived: bool = False
    """Workers live when the question is asked."""


@dataclass
class Live:
    """A run while a scenario is played on it."""

    scenario: Scenario
    run_dir: Path
    plan: Plan
    rng: random.Random
    spec: LaunchSpec
    host: Host | None = None
    pid: int = 0
    code: int | None = None
    acted: float | None = None
    notes: list[str] = field(default_factory=list)
    """What went against a promise, found by the scenario itself."""
    seen: dict[str, int] = field(default_factory=dict)
    """What its set-up measured."""

    def start(self) -> None:
        """Start the run as `dflash train` and `dflash extract` do."""
        self.plan.write(self.run_dir)
        before = os.environ.get(ROOT_VARIABLE)
        if self.host is not None:
            os.environ[ROOT_VARIABLE] = str(self.host.root)
        try:
            with recording(self.run_dir, self.plan.role, {}) as run:
                started = start_supervisor(run, self.spec)
        finally:
            os.environ.pop(ROOT_VARIABLE, None)
            if before is not None:
                os.environ[ROOT_VARIABLE] = before
        started.signals.restore()
        self.pid = started.pid

    @property
    def running(self) -> bool:
        """Whether the supervisor has not ended."""
        if self.pid and self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
        return bool(self.pid) and self.code is None

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        """Until something is so; False, with a note, when it did not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.notes.append(f"{what} did not come within {seconds:.0f} s")
                return False
            time.sleep(0.005)
        return True

    def moment(self, rank: int) -> float | None:
        """When a victim was about to have its fault."""
        with suppress(OSError, ValueError, IndexError):
            return float((self.run_dir / "toy" / f"moment-1-{rank}").read_text().split()[0])
        return None

    def wait_for_victims(self) -> bool:
        """Until all of them are at their moment."""
        ranks = range(self.spec.num_workers) if self.plan.hold else self.plan.ranks

        def there() -> bool:
            return all(self.moment(rank) is not None for rank in ranks) or not self.running

        return self.wait(there, 60.0, "the moment of the fault")

    def worker(self, rank: int) -> int:
        """The pid of a rank's newest process."""
        spawned = [e["detail"]["pid"] for e in self.events("worker spawned") if e["detail"]["rank"] == rank]
        return int(spawned[-1])

    @property
    def workers(self) -> list[int]:
        """Pids of all ranks' newest processes."""
        return [self.worker(rank) for rank in range(self.spec.num_workers)]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What the supervisor wrote."""
        return [event for event in collect(self.run_dir).events if event["event"] in names]

    def send(self, pid: int, number: int) -> None:
        """A signal from outside, at a known time."""
        self.acted = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def judged(self) -> Verdict:
        """What is said of the run by whoever asks now."""
        return verdict(collect(self.run_dir, self.host.kernel() if self.host else None))

    def processes(self) -> list[int]:
        """Every process of the run that lives, and what they started."""
        found = set()
        for event in collect(self.run_dir).events:
            if event["event"] in ("worker spawned", "supervisor started"):
                pid, start_ticks = event["detail"]["pid"], event["detail"]["start_ticks"]
                leader = process(pid)
                if leader is None or leader.start_ticks == start_ticks:  # else its number is another's now
                    found |= {member for member, _ in session_members(pid)}
        return sorted(pid for pid in found if (seen := process(pid)) is not None and seen.state not in "ZX")

    def end_everything(self) -> None:
        """Leave nothing behind, whatever came of the scenario."""
        # Never a pid alone: that of a supervisor that has ended may be somebody else's by now, and 0 is all of us.
        for pid in {*self.processes(), *([self.pid] if self.running else [])}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self.running and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def staged(scenario: Scenario, phase: str, seed: int, folder: Path) -> Iterator[Live]:
    """A scenario that was played to its end, its disks still mounted."""
    live = made_ready(scenario, phase, seed, folder)
    with ExitStack() as stack:
        if scenario.setup is not None:
            stack.enter_context(scenario.setup(live))
        try:
            live.start()
            if scenario.act is not None and live.wait_for_victims():
                scenario.act(live)
            live.wait(lambda: not live.running, scenario.end_s, "the end of the run")
            if scenario.after is not None:
                scenario.after(live)
            yield live
        finally:
            live.end_everything()


def made_ready(scenario: Scenario, phase: str, seed: int, folder: Path) -> Live:
    """Roll the dice: role, ranks and moment."""
    rng = random.Random(f"{scenario.name}/{phase}/{seed}")
    role = rng.choice(scenario.roles)
    victims = tuple(sorted(rng.sample(range(scenario.world), scenario.victims)))
    tick = rng.randrange(TICKS.get(phase, 1))
    dice = {"role": role, "fault": scenario.fault, "ranks": victims, "phase": phase, "tick": tick}
    plan = Plan(**{**dice, **scenario.plan})
    given: dict[str, Any] = {
        "entry": scenario.entry,
        "num_workers": scenario.world,
        "summed_progress": role == "extract",
        "independent": role == "extract",
        "environment": {"PYTHONPATH": str(TESTS)},
        "hang_limit_scale": 0.1,
        **scenario.spec,
    }
    return Live(scenario, folder, plan, rng, LaunchSpec(run_dir=folder, role=role, **given))
