"""What a run left behind and what is true now, collected as plain values: all that a verdict is made from.

Nothing is written, locked for longer than a look, or raised: what is missing, torn, unreadable or of a newer version
is listed in `gaps`. Used by the supervisor (a verdict on a death), `dflash status` and `dflash why`. Next:
manifests/verdict.py, which judges, and manifests/evidence_files.py, which reads.
"""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests import evidence_files as files
from manifests.runs import is_owned
from shared.beat import BeatState
from shared.kernel import Kernel, is_same, process

JUDGED = ("train", "extract")
"""The commands whose runs are judged; their name is the workers' role too."""


@dataclass(frozen=True, kw_only=True)
class Now:
    """Facts about this moment and this host; None is "cannot be known from here"."""

    boot_id: str | None = None
    pid1_start: int | None = None
    pid_ns: str | None = None
    host: str = ""
    supervisor_alive: bool | None = None
    """None on another host, in another container, and for a run without a supervisor."""
    supervisor_state: str = ""
    owned: bool | None = None
    """Whether some living process holds the run's folder."""
    alive_ranks: tuple[int, ...] = ()
    rank_states: dict[int, str] = field(default_factory=dict)
    """The kernel's letter for each living rank."""
    oom: dict[str, int | None] = field(default_factory=dict)
    boot_time: float | None = None
    """Wall clock of this boot's beginning."""
    time: float = 0.0
    mono: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One run as its files and the kernel show it. `run` is None when nothing was trained or extracted here."""

    run_dir: str = ""
    role: str = ""
    run: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    supervisor: dict[str, Any] | None = None
    """The detail of "supervisor started"."""
    spec: dict[str, Any] = field(default_factory=dict)
    moved_from: str = ""
    """The folder that the run's command writes to, where this is another one."""
    events: tuple[dict[str, Any], ...] = ()
    """Of this run, the supervisor's in the order of their monotonic time, then those without one."""
    samples: tuple[dict[str, Any], ...] = ()
    beats: dict[int, BeatState] = field(default_factory=dict)
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)
    stop: dict[str, Any] | None = None
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The last lines of each log, by file name."""
    faults: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The last lines of each rank's faulthandler file, only when it changed since the run began."""
    stacks: dict[str, str] = field(default_factory=dict)
    """Stacks saved at a hang, by file name."""
    now: Now = field(default_factory=Now)
    gaps: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """How many ranks the run has, as far as anything says."""
        said = [source.get("num_workers") for source in (self.supervisor or {}, self.spec)]
        known = [value for value in said if isinstance(value, int)]
        return known[0] if known else max([*self.beats, *self.endings, -1]) + 1

    @property
    def supervised(self) -> bool:
        """Whether anything on record is a supervisor's; nothing is under torchrun or Slurm."""
        return (
            self.supervisor is not None or bool(self.samples) or bool(self.named("attempt started", "worker spawned"))
        )

    @property
    def independent(self) -> bool:
        """Whether workers do not wait for one another (stage 1): then no death is the consequence of another."""
        said = self.spec.get("independent", (self.supervisor or {}).get("independent"))
        return said if isinstance(said, bool) else self.role == "extract"

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names, in order."""
        return [event for event in self.events if event["event"] in names]

    @property
    def last_mono(self) -> float | None:
        """The last sign of life of the supervisor, monotonic seconds of its boot."""
        return max(
            [event["detail"]["mono"] for event in self.events if "mono" in event["detail"]]
            + [sample["mono"] for sample in self.samples],
            default=None,
        )

    @property
    def supervisor_time(self) -> float | None:
        """The wall clock of that sign: workers that outlive their supervisor go on giving signs, it does not."""
        # Not the time of an event's record: one that a full disk did not take was appended later.
        details = [event["detail"] | {"time": event["time"]} for event in self.events if "mono" in event["detail"]]
        signs = [(detail["mono"], detail.get("t", detail["time"])) for detail in details]
        signs += [(sample["mono"], sample.get("t")) for sample in self.samples]
        return files.number(max(signs, key=lambda sign: sign[0])[1]) if signs else None

    @property
    def last_time(self) -> float | None:
        """The last sign of life of any process of the run, wall clock: for people, never for order."""
        found = [event["time"] for event in self.events] + [sample.get("t") for sample in self.samples[-1:]]
        found += [_last_beat(beat) for beat in self.beats.values()]
        found += [ending.get("ended") for ending in self.endings.values()]
        return max((value for value in map(files.number, found) if value is not None), default=None)


def _last_beat(beat: BeatState) -> float:
    """When a heart beat last, wall clock: a report may be half an hour old in a compile that is alive.

    Two moments are known by both clocks: the last change, unless reports without one came after it ("wait for room"),
    and the phase's beginning. The earlier answer is the one that claims no more than was seen.
    """
    by_change = beat.alive - beat.reported
    by_phase = beat.started + beat.alive - beat.phase_since - beat.time if beat.started else math.inf
    return beat.time + max(0.0, min(by_change, by_phase))


def collect(run_dir: Path, kernel: Kernel | None = None) -> Evidence:
    """The evidence about the newest run of train or extract in `run_dir`. Reads only, never raises."""
    kernel = kernel or Kernel()
    gaps: list[str] = []
    run, ended = _newest_run(files.records(run_dir, "runs", gaps))
    if run is None:
        gaps.append("no record of a training or an extraction")
        return Evidence(run_dir=str(run_dir), now=_now(run_dir, kernel, None, {}), gaps=tuple(gaps))
    role, run_id = str(run["command"]), str(run["run_id"])
    events = files.events(run_dir, run_id, gaps)
    supervisor = next((event["detail"] for event in events if event["event"] == "supervisor started"), None)
    if supervisor is None:
        gaps.append("no record of a supervisor: an older version, another launcher, or its events are gone")
    spec = files.object_in(run_dir / "supervision" / "spec.json", gaps)
    spec = spec if spec.get("run_id") in (run_id, None, "") else {}
    spawned = _spawned(events)
    since = float(run["time"])
    beats = files.beats(run_dir, role, since, spawned, gaps)
    processes = {rank: (beat.pid, beat.start_ticks) for rank, beat in beats.items()} | spawned
    return Evidence(
        run_dir=str(run_dir),
        role=role,
        run=run,
        ended=ended,
        supervisor=supervisor,
        spec=spec,
        moved_from=_moved_from(run_dir, spec),
        events=tuple(events),
        samples=tuple(files.samples(run_dir, since, supervisor, gaps)),
        beats=beats,
        endings=files.endings(run_dir, role, since, spawned, gaps),
        stop=files.object_in(run_dir / "supervision" / "stop.json", None) or None,
        logs=files.log_tails(run_dir, role, gaps),
        faults=files.fault_tails(run_dir, role, since, gaps),
        stacks=files.stacks(run_dir, since, gaps),
        now=_now(run_dir, kernel, supervisor, processes),
        gaps=tuple(gaps),
    )


def _moved_from(run_dir: Path, spec: dict[str, Any]) -> str:
    """Where the run's command would write again: `dflash resume` refuses to go on in a folder that is not there."""
    cwd, folder = spec.get("cwd"), spec.get("run_dir")
    if not isinstance(cwd, str) or not isinstance(folder, str):
        return ""
    made = Path(cwd) / folder
    try:
        return "" if made.resolve() == run_dir.resolve() else str(made)
    except (OSError, ValueError, RuntimeError):  # a zero byte, links in a circle
        return ""


def _newest_run(records: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(its first record, its ending or None) of the newest run that was not refused."""
    ours = [record for record in records if record.get("command") in JUDGED and record.get("run_id")]
    refused = {record["run_id"] for record in ours if record.get("state") == "refused"}
    starts = [record for record in ours if record.get("state") == "started"]
    kept = [record for record in starts if record["run_id"] not in refused] or starts
    if not kept:
        return None, None
    run = kept[-1]
    endings = [record for record in ours if record["run_id"] == run["run_id"] and record.get("state") != "started"]
    return run, endings[-1] if endings else None


def _spawned(events: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """(pid, start ticks) of each rank's newest worker."""
    found = {}
    for event in events:
        detail = event["detail"]
        if event["event"] == "worker spawned" and isinstance(detail.get("rank"), int):
            found[detail["rank"]] = (files.whole(detail.get("pid")), files.whole(detail.get("start_ticks")))
    return found


def _now(run_dir: Path, kernel: Kernel, supervisor: dict[str, Any] | None, workers: dict[int, tuple[int, int]]) -> Now:
    boot, namespace, host = kernel.boot_id(), kernel.pid_namespace(), socket.gethostname()
    facts = supervisor or {}
    # A pid means something only in the namespace where it was given, in the boot where it was given.
    visible = facts.get("boot") in (boot, None) and facts.get("pid_ns") in (namespace, None)
    visible = visible and (facts.get("boot") is not None or facts.get("host") in (host, None))
    states = {}
    for rank, (pid, start_ticks) in workers.items():
        if visible and is_same(pid, start_ticks) and (seen := process(pid)):
            states[rank] = seen.state
    alive, state = None, ""
    if visible and supervisor is not None and files.whole(supervisor.get("pid")):
        pid = files.whole(supervisor["pid"])
        alive = is_same(pid, files.whole(supervisor.get("start_ticks")))
        seen = process(pid) if alive else None
        state = seen.state if seen else ""
    cgroup = facts.get("cgroup")
    return Now(
        boot_id=boot,
        pid1_start=kernel.pid1_start(),
        pid_ns=namespace,
        host=host,
        supervisor_alive=alive,
        supervisor_state=state,
        owned=_owned(run_dir),
        alive_ranks=tuple(sorted(states)),
        rank_states=states,
        oom=kernel.oom_counts(cgroup if isinstance(cgroup, str) else None),
        boot_time=kernel.boot_time(),
        time=time.time(),
        mono=time.monotonic(),
    )


def _owned(run_dir: Path) -> bool | None:
    try:
        return is_owned(run_dir)
    except OSError:
        return None
