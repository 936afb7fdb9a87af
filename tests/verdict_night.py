"""The evidence of a run, told event by event: for tests of the verdict that need no processes.

The values have the shape that the supervisor and the workers write. Used by verdict_scenarios.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manifests.evidence import Evidence, Now
from shared.beat import BeatState

START, WALL = 5_000.0, 1_800_000_000.0
BOOT, PID1, NAMESPACE, HOST = "boot-a", 40_000, "pid:[4026532001]", "node7"
GIB = 2**30
TRACE = 'Traceback (most recent call last):\n  File "/app/data.py", line 88, in row\n    return rows[index]\n'


@dataclass
class Night:
    """A run of two ranks in step, told event by event; times are seconds after the supervisor's start."""

    ranks: int = 2
    role: str = "train"
    unit: str = "steps"
    supervised: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    beats: dict[int, BeatState] = field(default_factory=dict)
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    faults: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ended: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None
    oom: dict[str, int | None] = field(default_factory=lambda: {"vmstat": 41, "cgroup": 0})
    facts: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.supervised:
            self.event(
                0.0,
                "supervisor started",
                pid=300,
                start_ticks=490_000,
                host=HOST,
                pid1_start=PID1,
                pid_ns=NAMESPACE,
                cgroup="/sys/fs/cgroup/x",
                num_workers=self.ranks,
            )
            self.started(0.1)

    def pid(self, rank: int) -> int:
        return 1000 * self.attempt + rank

    def event(self, at: float, name: str, message: str = "", **detail: Any) -> None:
        stamp = {"mono": START + at, "boot": BOOT, "t": WALL + at}
        self.events.append(
            {"time": WALL + at, "run_id": "r1", "event": name, "message": message, "detail": stamp | detail}
        )

    def started(self, at: float) -> None:
        self.event(at, "attempt started", attempt=self.attempt, reason="", saved=None)
        for rank in range(self.ranks):
            self.event(at, "worker spawned", attempt=self.attempt, rank=rank, pid=self.pid(rank), start_ticks=490_100)

    def memory(self, share: float, available: float = 0.6) -> dict[str, int]:
        return {"current": int(share * 64 * GIB), "max": 64 * GIB, "available": int(available * 256 * GIB),
                "total": 256 * GIB}  # fmt: skip

    def sampled(self, until: float, share: float = 0.41, available: float = 0.6, **other: Any) -> None:
        """One sample a second up to `until`, memory constant."""
        first = len(self.samples)
        for second in range(first, int(until) + 1):
            sample = {
                "t": WALL + second,
                "mono": START + second,
                "memory": self.memory(share, available),
                "oom": dict(self.oom),
                "pressure": {"memory": 0.0, "io": 1.0},
                "shm_free": 60 * 2**20,
                "shm_total": 64 * 2**20,
                "disk_free": 500 * GIB,
                "disk_inodes": 10**6,
                "ranks": {str(r): [self.pid(r), "R", (r + 8) * GIB, 100 * second] for r in range(self.ranks)},
            }
            self.samples.append(sample | other)

    def beat(
        self, at: float, rank: int, phase: str = "step", done: float = 1204, reported: float | None = None
    ) -> None:
        self.beats[rank] = BeatState(
            pid=self.pid(rank), start_ticks=490_100, attempt=self.attempt, sequence=9, phase=phase,
            phase_since=START, done=done, total=10_000, unit=self.unit,
            reported=START + (at if reported is None else reported), time=WALL + at, started=WALL, alive_count=int(at),
            alive=START + at,
        )  # fmt: skip

    def beating(self, at: float, phase: str = "step", done: float = 1204) -> None:
        for rank in range(self.ranks):
            self.beat(at, rank, phase, done)

    def ending(self, at: float, rank: int, error: str, message: str, code: int = 1, **more: Any) -> dict[str, Any]:
        said = {
            "pid": self.pid(rank), "start_ticks": 490_100, "attempt": self.attempt, "rank": rank, "started": WALL,
            "ended": WALL + at, "code": code, "error": error or None, "message": message, "thread": None,
            "traceback": "" if not error else TRACE + message, "phase": "step", "done": 1204, "unit": self.unit,
            "total": 10_000, "signal": None, "peak_memory": 9 * GIB, "gpu_peak": None, "needed_bytes": None,
        }  # fmt: skip
        self.endings[rank] = said | more
        return self.endings[rank]

    def died(self, at: float, rank: int, *, signal: int | None = None, code: int | None = None, asked: bool = False,
             ending: dict[str, Any] | None = None, oom: dict[str, int | None] | None = None, share: float = 0.41,
             available: float = 0.6, phase: str = "step", done: float = 1204, lines: tuple[str, ...] = (),
             fault: tuple[str, ...] = (), shm_free: int = 60 * 2**20) -> None:  # fmt: skip
        """A worker's end as the supervisor records it; `oom` are the counters after it."""
        if ending is not None and not lines and ending.get("error"):
            thread = f"thread {ending['thread']} " if ending.get("thread") else ""
            lines = (*TRACE.splitlines(), f"{thread}ended by {ending['error']}: {ending['message']}")
        before, after = dict(self.oom), dict(oom or self.oom)
        self.oom = after
        self.beat(at, rank, phase, done)
        self.logs[f"{self.role}-{rank}.log"] = lines
        if fault:
            self.faults[rank] = fault
        self.event(
            at + 0.06, "worker ended", attempt=self.attempt, rank=rank, pid=self.pid(rank), exit_code=code,
            signal=signal, phase=phase, done=done, total=10_000, unit=self.unit, saved=1000, beat_age=0.5,
            ending=ending, peak_memory=9 * GIB,
            oom_before=before, oom_after=after, memory=self.memory(share, available), shm_free=shm_free, asked=asked,
            last_lines=list(lines), fault_lines=list(fault),
        )  # fmt: skip

    def raised(self, at: float, rank: int, error: str, message: str, code: int = 1, **more: Any) -> None:
        """A worker that wrote its own ending."""
        asked = bool(more.pop("asked", False))
        self.died(at, rank, code=code, asked=asked, ending=self.ending(at, rank, error, message, code, **more))

    def asked_away(self, at: float, rank: int) -> None:
        """A worker that we ended because of another."""
        self.died(at, rank, signal=15, asked=True)

    def failed(
        self,
        at: float,
        message: str = "WorkerFailed: rank 1 ...",
        code: int = 50,
        reason: str = "--restarts is 0",
        verdict_code: str = "",
    ) -> Night:
        """The run's end as a failure."""
        self.event(at, "gave up", reason, attempt=self.attempt, reason=reason, fingerprint="x")
        self.event(at + 0.1, "supervisor ended", state="failed", exit_code=code, code=verdict_code)
        self.ended = {"run_id": "r1", "command": self.role, "state": "failed", "exit_code": code, "message": message,
                      "time": WALL + at + 0.2}  # fmt: skip
        return self

    def interrupted(self, at: float) -> Night:
        self.event(at, "supervisor ended", state="interrupted", exit_code=75, code="user.stop")
        self.ended = {"run_id": "r1", "command": self.role, "state": "interrupted", "exit_code": 75,
                      "message": "stopped at step 1204", "time": WALL + at}  # fmt: skip
        return self

    def evidence(self, at: float = 60.0, **now: Any) -> Evidence:
        """All of it, looked at `at` seconds after the start."""
        present: dict[str, Any] = {
            "boot_id": BOOT, "pid1_start": PID1, "pid_ns": NAMESPACE, "host": HOST,
            "supervisor_alive": False if self.supervised else None, "owned": False, "alive_ranks": (),
            "oom": dict(self.oom), "time": WALL + at, "mono": START + at,
        }  # fmt: skip
        supervisor = next((e["detail"] for e in self.events if e["event"] == "supervisor started"), None)
        run = {"run_id": "r1", "command": self.role, "state": "started", "time": WALL - 1,
               "detail": {"provenance": {"host": HOST}}}  # fmt: skip
        return Evidence(
            run_dir="runs/a", role=self.role, run=run, ended=self.ended, supervisor=supervisor,
            spec={"num_workers": self.ranks, "independent": self.role == "extract"},
            events=tuple(sorted(self.events, key=lambda e: e["detail"]["mono"])), samples=tuple(self.samples),
            beats=dict(self.beats), endings=dict(self.endings), stop=self.stop, logs=dict(self.logs),
            faults=dict(self.faults), now=Now(**(present | now)),
        )  # fmt: skip
