"""Evidence is collected from real files and processes, and whatever is in a folder, collecting never raises."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from supervised import until

from manifests.commit import Ledger
from manifests.evidence import Evidence, collect
from manifests.lines import line_of
from manifests.postmortem import page
from manifests.records import EventRecord, RunRecord
from manifests.verdict import Verdict, verdict
from shared.beat import Beat
from shared.kernel import Kernel, host_identity, own_start_ticks, process
from shared.ring import Ring
from shared.samples import SLOT_BYTES, SLOTS, Sampler, events_path, samples_path

RUN = "abc123"


class Folder:
    """A run folder in the making: a supervisor and workers as the caller says."""

    def __init__(self, run_dir: Path, command: str = "train", **supervisor: Any) -> None:
        self.run_dir = run_dir
        detail = {"config": {}, "provenance": {"host": socket.gethostname()}}
        record = RunRecord(run_id=RUN, command=command, state="started", detail=detail)
        Ledger(run_dir, f"{command}-{RUN}").append(record)
        self.command = command
        self.supervisor = Ledger(run_dir, f"supervisor-{RUN}")
        self.ring = Ring(events_path(run_dir), 256, 4096)
        kernel = Kernel()
        facts = {"pid": os.getpid(), "start_ticks": own_start_ticks(), "host": socket.gethostname(),
                 "cgroup": kernel.cgroup(), "num_workers": 2, **host_identity(kernel)}  # fmt: skip
        self.event("supervisor started", **(facts | supervisor))

    def event(self, name: str, *, ledger: bool = True, ring: bool = True, **detail: Any) -> None:
        stamp = {"mono": time.monotonic(), "boot": Kernel().boot_id(), "t": time.time()}
        record = EventRecord(run_id=RUN, event=name, detail=stamp | detail)
        if ledger:
            self.supervisor.append(record)
        if ring:
            self.ring.append({"time": time.time(), "writer": f"supervisor-{RUN}", **dataclasses.asdict(record)})

    def spawned(self, rank: int, pid: int, start_ticks: int, attempt: int = 1) -> None:
        self.event("worker spawned", rank=rank, pid=pid, start_ticks=start_ticks, attempt=attempt)

    def beat(self, rank: int, pid: int, start_ticks: int, **state: Any) -> None:
        beat = Beat.create(self.run_dir / "progress" / f"{self.command}-{rank}.beat")
        now = {"time": time.time(), "started": time.time(), "reported": time.monotonic(), "phase": "step", "done": 7,
               "total": 10, "unit": "steps", "attempt": 1}  # fmt: skip
        beat.report(now | {"pid": pid, "start_ticks": start_ticks} | state)
        beat.alive()
        beat.close()

    def ending(self, rank: int, **values: Any) -> None:
        path = self.run_dir / "workers" / f"{self.command}-{rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"pid": 5, "start_ticks": 6, "attempt": 1, "ended": time.time(), **values}))

    def sample(self, count: int = 1) -> None:
        sampler, ring = Sampler(Kernel(), self.run_dir), Ring(samples_path(self.run_dir), SLOTS, SLOT_BYTES)
        for _ in range(count):
            ring.append(sampler.sample({0: os.getpid()}))
        ring.close()
        sampler.close()


def test_a_living_run_is_seen_with_its_processes(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        seen = process(child.pid)
        assert seen is not None
        until(lambda: (now := process(child.pid)) is None or now.state == "S")  # it is on its way to sleep
        folder = Folder(tmp_path)
        folder.spawned(0, child.pid, seen.start_ticks)
        folder.spawned(1, child.pid, seen.start_ticks + 1)  # its pid was given to another since
        folder.beat(0, child.pid, seen.start_ticks)
        folder.sample(3)
        evidence = collect(tmp_path)
    finally:
        child.kill()
        child.wait()
    assert evidence.run is not None
    assert (evidence.run["run_id"], evidence.role, evidence.ended) == (RUN, "train", None)
    assert evidence.now.supervisor_alive is True
    assert evidence.now.alive_ranks == (0,), "a living process with other start ticks is not ours"
    assert evidence.now.rank_states == {0: "S"}
    assert evidence.beats[0].done == 7
    assert len(evidence.samples) == 3
    assert evidence.num_workers == 2
    found = verdict(evidence)
    assert (found.code, found.confidence, found.phase, found.step) == ("running", "proved", "step", 7)


def test_the_dead_are_dead_and_what_they_wrote_counts(tmp_path: Path) -> None:
    folder = Folder(tmp_path, start_ticks=1)  # our pid, but not this process
    for rank in (0, 1):
        folder.spawned(rank, 5 + rank, 6)
    folder.beat(1, 6, 6)
    folder.beat(0, 99, 6)  # of an earlier run: not the process that was started
    folder.ending(0, error="ValueError", message="ValueError: x", code=1)
    folder.ending(1, error="ValueError", message="of an earlier run", code=1)
    evidence = collect(tmp_path)
    assert evidence.now.supervisor_alive is False
    assert evidence.now.alive_ranks == ()
    assert list(evidence.endings) == [0]
    assert list(evidence.beats) == [1]
    assert any("rank 0 is another process's" in gap for gap in evidence.gaps)


def test_events_are_merged_from_ledger_and_ring(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.event("attempt started", attempt=1, long="x" * 9000)
    folder.event("worker ended", ledger=False, attempt=1, rank=1, pid=3, signal=9)
    folder.event("restart", ring=False, attempt=1)
    names = [event["event"] for event in collect(tmp_path).events]
    assert names == ["supervisor started", "attempt started", "worker ended", "restart"]
    assert len(collect(tmp_path).named("attempt started")[0]["detail"]["long"]) == 9000, "the ledger's copy is whole"
    Ledger(tmp_path, "supervisor-zzz").append(EventRecord(run_id="zzz", event="restart", detail={"mono": 1.0}))
    assert len(collect(tmp_path).events) == 4, "another run's events are its own"


def test_only_the_newest_run_of_train_or_extract_counts(tmp_path: Path) -> None:
    Folder(tmp_path)
    ledger = Ledger(tmp_path, "train-later")
    ledger.append(RunRecord(run_id="later", command="train", state="started"))
    ledger.append(RunRecord(run_id="later", command="train", state="refused", exit_code=43))
    ledger.append(RunRecord(run_id="e", command="export", state="started"))
    evidence = collect(tmp_path)
    assert evidence.run is not None
    assert evidence.run["run_id"] == RUN, "a refused command touched nothing"
    ledger.append(RunRecord(run_id="next", command="train", state="started"))
    ledger.append(RunRecord(run_id="next", command="train", state="failed", exit_code=50, message="X: y"))
    evidence = collect(tmp_path)
    assert evidence.run is not None
    assert evidence.run["run_id"] == "next"
    assert evidence.ended is not None
    assert evidence.ended["exit_code"] == 50
    assert evidence.supervisor is None


def test_a_folder_that_was_moved_is_known_by_its_command(tmp_path: Path) -> None:
    Folder(tmp_path)
    (tmp_path / "supervision").mkdir(exist_ok=True)
    for cwd, run_dir, moved_from in (
        (str(tmp_path.parent), tmp_path.name, ""),
        ("/elsewhere", str(tmp_path), ""),
        ("/elsewhere", "R", "/elsewhere/R"),
        (None, 7, ""),
        ("/x", "\0", ""),
    ):
        spec = {"run_id": RUN, "cwd": cwd, "run_dir": run_dir}
        (tmp_path / "supervision" / "spec.json").write_text(json.dumps(spec))
        assert collect(tmp_path).moved_from == moved_from


def test_samples_of_earlier_runs_and_boots_are_left_out(tmp_path: Path) -> None:
    ring = Ring(samples_path(tmp_path), SLOTS, SLOT_BYTES)
    for mono in (9e9, 9e9 + 1, 5.0, time.monotonic() - 500):
        ring.append({"mono": mono, "t": time.time(), "memory": {}})
    ring.append({"mono": "soon", "t": None})
    ring.close()
    folder = Folder(tmp_path)
    folder.sample(2)
    assert len(collect(tmp_path).samples) == 2


def test_another_container_hides_processes(tmp_path: Path) -> None:
    Folder(tmp_path, pid_ns="pid:[1]")
    evidence = collect(tmp_path)
    assert evidence.now.supervisor_alive is None
    assert evidence.now.alive_ranks == ()


def test_another_host_hides_them_too(tmp_path: Path) -> None:
    folder = Folder(tmp_path, boot="another", host="node9")
    folder.beat(0, os.getpid(), own_start_ticks())
    evidence = collect(tmp_path)
    assert evidence.now.supervisor_alive is None
    assert verdict(evidence).code == "running", "its files are fresh"
    assert verdict(evidence).confidence == "likely"
    later = dataclasses.replace(evidence, now=dataclasses.replace(evidence.now, time=time.time() + 100))
    assert (verdict(later).code, verdict(later).confidence) == ("unknown", "unknown")
    assert "node9" in verdict(later).sentence


def test_logs_and_stacks_are_read_as_text(tmp_path: Path) -> None:
    Folder(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "supervision" / "stacks").mkdir()
    bar = b"\x1b[2K 10 %\r 20 %\r\x1b[32mdone\x1b[0m\n"
    (tmp_path / "logs" / "train-0.log").write_bytes(b"x" * 100_000 + b"\n\xff\xfe\0binary\n" + bar)
    (tmp_path / "logs" / "train-0.fault").write_text("Fatal Python error: Aborted\n")
    (tmp_path / "logs" / "extract-0.log").write_text("of another command\n")
    (tmp_path / "supervision" / "stacks" / "attempt-1-rank-0.txt").write_text("Current thread\n")
    evidence = collect(tmp_path)
    assert evidence.logs["train-0.log"][-1] == "done"
    assert list(evidence.logs) == ["train-0.log"]
    assert all(character.isprintable() for line in evidence.logs["train-0.log"] for character in line)
    assert evidence.faults == {0: ("Fatal Python error: Aborted",)}
    assert evidence.stacks == {"attempt-1-rank-0.txt": "Current thread\n"}


def judged(run_dir: Path) -> tuple[Evidence, Verdict]:
    """Everything that a command does with a folder."""
    evidence = collect(run_dir)
    found = verdict(evidence)
    json.dumps(found.as_dict())
    assert Verdict.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert page(evidence, found).startswith("# ")
    return evidence, found


def test_an_empty_folder_and_none_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing", Path("/dev/null")):
        evidence, found = judged(folder)
        assert evidence.run is None
        assert found.code == "unknown"
        assert evidence.gaps


@pytest.mark.parametrize("seed", range(6))
def test_junk_in_every_file_is_never_the_end(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = Folder(tmp_path, start_ticks=1)
    folder.spawned(0, 5, 6)
    folder.beat(0, 5, 6)
    folder.ending(0, error="ValueError", message="ValueError: x", code=1, traceback=None, signal=[], thread=7)
    folder.event(
        "worker ended", rank="one", pid=None, signal="9", ending=[1], oom_before=3, memory="much", last_lines=5
    )
    folder.event("hang", rank=None, action="kill", names=[], silent_s="long", attempt={})
    folder.event("stacks saved", groups={"a": "b", "c": [None]}, attempt=1)
    folder.event("verdict", verdict={"code": "x", "ranks": 3})
    folder.event("stop asked", by="me")
    folder.sample(3)
    (tmp_path / "supervision" / "spec.json").write_text("[]")
    judged(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        data = bytearray(path.read_bytes())
        way = chance.randrange(4)
        if way == 0:
            data = data[: chance.randrange(len(data) + 1)]
        elif way == 1:
            data = bytearray(chance.randbytes(chance.randrange(3000)))
        elif data:
            for _ in range(20):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        judged(tmp_path)


def test_records_of_a_newer_version_are_said_and_passed_over(tmp_path: Path) -> None:
    Folder(tmp_path, start_ticks=1)
    newer: list[dict[str, Any]] = [
        {"time": time.time(), "run_id": RUN, "event": "worker ended", "detail": "compressed"},
        {"time": "2031-01-01", "run_id": RUN, "event": "restart", "detail": {}},
        {"time": time.time(), "run_id": RUN, "event": {"name": "restart"}, "detail": {}},
        {"run_id": RUN},
    ]
    path = tmp_path / "manifest" / "events.supervisor-new.jsonl"
    path.write_bytes(b"".join(map(line_of, newer)))
    (tmp_path / "manifest" / "runs.train-new.jsonl").write_bytes(
        line_of({"time": 1e12, "run_id": "n", "command": "train"})
    )
    evidence, _ = judged(tmp_path)
    assert [event["event"] for event in evidence.events] == ["supervisor started"]
    assert any("worker ended" in gap for gap in evidence.gaps)


LOOK = """
import sys
from pathlib import Path
from manifests.evidence import collect
print(collect(Path(sys.argv[1])).gaps)
"""


def test_a_folder_without_permission_is_said(tmp_path: Path) -> None:
    Folder(tmp_path)
    become = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    if become and subprocess.run([*become, sys.executable, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("root sees everything, and this Python cannot be started as somebody else")
    for folder in (tmp_path, *tmp_path.parents):
        if become and folder.name.startswith(("test_", "pytest-")):
            folder.chmod(0o755)
    for name in ("manifest", "supervision"):
        (tmp_path / name).chmod(0)
    try:
        done = subprocess.run(
            [*become, sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, check=False
        )
    finally:
        for name in ("manifest", "supervision"):
            (tmp_path / name).chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "no record of a training" in done.stdout
    assert "permission" in done.stdout.lower()


def test_collecting_is_quick(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "logs").mkdir()
    for rank in range(8):
        folder.spawned(rank, 5, 6)
        folder.beat(rank, 5, 6)
        (tmp_path / "logs" / f"train-{rank}.log").write_bytes(b"line of a log\n" * 100_000)
    for attempt in range(200):
        folder.event("attempt started", attempt=attempt, text="x" * 500)
    folder.sample(600)
    started = time.process_time()
    verdict(collect(tmp_path))
    assert time.process_time() - started < 0.6, "`dflash status` has a second for everything"
