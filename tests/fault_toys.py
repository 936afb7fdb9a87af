"""Workers of a toy run: they walk through the phases of a training and have the fault that their plan names.

RUN/toy/plan.json (a `Plan`, written by tests/fault_run.py) says which ranks have it, in which phase and at which tick.
Pure Python, started by the real supervisor through the real shared/worker.py. What a fault does to a worker is in
fault_injections.py; ranks in step wait for each other in `all_reduce`, as real ones do, and lose their peers there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shared import phases
from shared.atomic import write_json
from shared.errors import Interrupted
from shared.kernel import is_same, own_start_ticks
from shared.reporter import Reporter
from shared.worker import stop_requested

TICKS = {"import": 1, "load": 6, "compile": 4, "step": 16, "checkpoint": 12}
"""How often a phase of an attempt offers a moment for its fault; work follows after each of them."""
STEPS, SAVE_EVERY, SAVE_TICKS = 20, 4, 3
PEER_LOST = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500"
# How soon a survivor of a lost peer notices, as TCP does.
CASCADE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the workers of one toy run do."""

    role: str = "train"
    fault: str = ""
    """A function of fault_injections.py, "module:function", or "wait for it": somebody outside acts."""
    ranks: tuple[int, ...] = (0,)
    phase: str = "step"
    tick: int = 1
    attempts: int = 1
    """The first so many attempts have the fault."""
    steps: int = STEPS
    tick_s: float = 0.02
    slow: dict[str, float] = field(default_factory=dict)
    """Phases that take longer, by factor."""
    dawdle_s: float = 30.0
    """How long a rank that waits for its fault goes on without leaving the phase."""
    deaf: bool = False
    """A rank that waits for its fault does not hear a request to stop."""
    hold: bool = False
    """The other ranks wait at the same moment."""
    silent: bool = False
    """A rank that waits for its fault reports no progress meanwhile."""
    save_bytes: int = 100

    @property
    def lockstep(self) -> bool:
        """Whether the ranks wait for each other: a training, not an extraction."""
        return self.role == "train"

    @classmethod
    def read(cls, run_dir: Path) -> Plan:
        """From the run folder."""
        values = json.loads((run_dir / "toy" / "plan.json").read_text())
        return cls(**{**values, "ranks": tuple(values["ranks"])})

    def write(self, run_dir: Path) -> None:
        """Into the run folder."""
        (run_dir / "toy").mkdir(parents=True, exist_ok=True)
        (run_dir / "toy" / "plan.json").write_text(json.dumps(dataclasses.asdict(self)))


def step_on(state: int, step: int) -> int:
    """The whole computation of one step: a step that is left out or repeated changes the result."""
    return zlib.crc32(f"{state}/{step}".encode())


def expected_result(steps: int) -> int:
    """What an uninterrupted run computes."""
    state = 0
    for step in range(1, steps + 1):
        state = step_on(state, step)
    return state


def work(run_dir: Path, rank: int, world_size: int) -> None:
    """The entry function of a toy worker."""
    toy = Toy(Plan.read(run_dir), run_dir, rank, world_size)
    toy.tick(phases.IMPORT, 0)
    toy.reporter.update(phases.RENDEZVOUS, 0, None, "ranks")
    toy.peers.join()
    for number in range(TICKS[phases.LOAD]):
        toy.tick(phases.LOAD, number, 1000.0 * number, 6000.0, "bytes")
    for number in range(TICKS[phases.COMPILE]):
        toy.tick(phases.COMPILE, number, number, 4.0, "regions")
    toy.loop()


class Toy:
    """One rank's walk."""

    def __init__(self, plan: Plan, run_dir: Path, rank: int, world_size: int) -> None:
        self.plan, self.run_dir, self.rank = plan, run_dir, rank
        self.attempt = int(os.environ["DFLASH_ATTEMPT"])
        self.reporter = Reporter(run_dir, plan.role, rank)
        self.peers = Peers(run_dir, rank, range(world_size) if plan.lockstep else (rank,), self.attempt)
        writer = 0 if plan.lockstep else rank
        self.saved_path = run_dir / "toy" / f"saved-{writer}.json"
        self.writes = rank == writer
        self.slower = 1.0
        self.skipped = 0
        self.done = 0
        self.state = 0

    def tick(
        self, phase: str, number: int, done: float = 0.0, total: float | None = None, unit: str = "modules"
    ) -> None:
        """One moment of a phase: report it, have the fault if it is due, spend its time."""
        self.reporter.update(phase, done, total, unit, inner=number)
        if self._due(phase, number):
            self._have_fault()
        time.sleep(self.plan.tick_s * self.plan.slow.get(phase, 1.0) * self.slower)

    def _due(self, phase: str, number: int) -> bool:
        plan = self.plan
        mine = (self.rank in plan.ranks or plan.hold) and self.attempt <= plan.attempts
        return bool(plan.fault) and mine and (phase, number) == (plan.phase, plan.tick)

    def _have_fault(self) -> None:
        moment = self.run_dir / "toy" / f"moment-{self.attempt}-{self.rank}"
        partial = moment.with_suffix(".new")
        partial.write_text(f"{time.monotonic()} {os.getpid()}")
        partial.rename(moment)
        if self.plan.fault != "wait for it":
            module, _, name = self.plan.fault.rpartition(":")
            getattr(importlib.import_module(module or "fault_injections"), name)(self)
            return
        deadline = time.monotonic() + self.plan.dawdle_s
        while time.monotonic() < deadline and (self.plan.deaf or not stop_requested()):
            time.sleep(0.01)
            if not self.plan.silent:
                self.reporter.inner(time.monotonic())

    def loop(self) -> None:
        """Steps and checkpoints from where the newest checkpoint was, until done or asked to stop."""
        self._resume()
        steps = self.plan.steps
        first = self.done  # the fault's tick counts the steps of this attempt: a restart must come to it again
        while self.done < steps:
            self.tick(phases.STEP, self.done - first, float(self.done), float(steps), "steps")
            stop = self.peers.all_reduce(stop_requested())
            self.done += 1
            self.state = step_on(self.state, self.done)
            self.reporter.update(phases.STEP, self.done, steps, "steps")
            if stop or self.done == steps or self.done % SAVE_EVERY == 0:
                self.save(((self.done - first - 1) // SAVE_EVERY) * SAVE_TICKS)
            if stop:
                raise Interrupted(f"stopped at step {self.done} of {steps}; run the same command again to go on")
        (self.run_dir / "toy" / f"result-{self.rank}").write_text(str(self.state))

    def save(self, first_tick: int) -> None:
        """A checkpoint; ranks in step leave it together."""
        for number in range(SAVE_TICKS):
            self.tick(phases.CHECKPOINT, first_tick + number, float(self.done), float(self.plan.steps), "steps")
        if self.writes:
            padding = "x" * self.plan.save_bytes
            write_json(self.saved_path, {"step": self.done, "state": self.state, "padding": padding})
        self.peers.all_reduce(False)
        self.reporter.saved(self.done)

    def _resume(self) -> None:
        if self.saved_path.exists():
            saved = json.loads(self.saved_path.read_text())
            self.done, self.state = saved["step"], saved["state"]
            self.reporter.saved(self.done)


def _read(path: str) -> bytes:
    """With few frames of its own: a saved stack shows the innermost ones, and a real collective waits in one call."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 64)
    finally:
        os.close(descriptor)


class Peers:
    """Ranks that wait for each other through small files; alone, nobody is waited for."""

    _RECORD = struct.Struct("<qqqq")

    def __init__(self, run_dir: Path, rank: int, ranks: Iterable[int], attempt: int) -> None:
        self._paths = {peer: run_dir / "toy" / f"at-{attempt}-{peer}" for peer in ranks}
        self._rank = rank
        self._round = -1
        self._stop_at = -1

    def join(self) -> None:
        """Be there, and wait until all are."""
        self._say()
        while not all(path.exists() for path in self._paths.values()):
            time.sleep(0.005)

    def all_reduce(self, stop: bool) -> bool:
        """Wait until all have come to this call; whether any of them wants to stop. RuntimeError when one died."""
        self._round += 1
        if stop and self._stop_at < 0:
            self._stop_at = self._round
        self._say()
        wants = False
        for peer in self._paths:
            wants |= self._wait_for(peer)
        return wants

    def _say(self) -> None:
        path = self._paths[self._rank]
        data = self._RECORD.pack(self._round, self._stop_at, os.getpid(), own_start_ticks())
        if not path.exists():
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").rename(path)
            return
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, data, 0)
        os.close(descriptor)

    def _wait_for(self, peer: int) -> bool:
        while True:
            at, stop_at, pid, start_ticks = self._RECORD.unpack(_read(str(self._paths[peer])))
            if at >= self._round:
                return 0 <= stop_at <= self._round
            if not is_same(pid, start_ticks):
                time.sleep(CASCADE_S)
                raise RuntimeError(PEER_LOST)
            time.sleep(0.005)
