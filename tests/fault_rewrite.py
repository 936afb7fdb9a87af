"""Changes to what a run left behind, each through the format's own reader and writer: other memory, clocks, pids.

For what cannot be done to a real host in a test (run out of memory, set its clock back), and for the mutation check,
which takes each source of evidence away in turn. Used by tests/fault_acts.py and tests/fault_mutations.py.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.event_log import RING_SLOT_BYTES, RING_SLOTS
from manifests.lines import line_of, records_in
from shared.ring import Ring, read_ring
from shared.samples import SLOT_BYTES, SLOTS, events_path, samples_path

Change = Callable[[dict[str, Any]], None]


def rewrite_samples(run_dir: Path, change: Change) -> None:
    """Every sample of the last minutes, as if the host had been another."""
    _rewrite_ring(samples_path(run_dir), SLOTS, SLOT_BYTES, change)


def rewrite_events(run_dir: Path, change: Change) -> None:
    """Every event of the supervisor, in the ledger and in the ring."""
    for path in (run_dir / "manifest").glob("events.*.jsonl"):
        records, _ = records_in(path.read_bytes())
        for record in records:
            record.pop("crc", None)
            change(record)
        path.write_bytes(b"".join(line_of(record) for record in records))
    _rewrite_ring(events_path(run_dir), RING_SLOTS, RING_SLOT_BYTES, change)


def _rewrite_ring(path: Path, slots: int, slot_bytes: int, change: Change) -> None:
    records = read_ring(path)
    path.unlink(missing_ok=True)
    ring = Ring(path, slots, slot_bytes)
    for record in records:
        change(record)
        ring.append(record)
    ring.close()


def memory_was(used: float) -> Change:
    """The cgroup used this share of its limit."""

    def change(sample: dict[str, Any]) -> None:
        limit = 64 << 30
        sample["memory"] = {"current": int(used * limit), "max": limit, "available": 300 << 30, "total": 512 << 30}
        sample["pressure"] = {"memory": 0.0, "io": 0.0}

    return change


def clock_moved(seconds: float, since: float) -> Change:
    """The wall clock was set by that much at monotonic time `since`."""

    def change(event: dict[str, Any]) -> None:
        if event["detail"].get("mono", 0.0) < since:
            return
        event["time"] += seconds
        if "t" in event["detail"]:
            event["detail"]["t"] += seconds
        ending = event["detail"].get("ending")
        if isinstance(ending, dict) and ending.get("ended"):
            ending["ended"] += seconds

    return change


def take_pid(pid: int) -> int | None:
    """Start a process that gets this pid, which is free again; its own pid, None when somebody was faster."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(50):
        before = last.read_text()
        try:
            last.write_text(str(pid - 1))
            child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
        finally:
            last.write_text(before)  # all else goes on with new numbers: tests may hold an old one
        if child == pid:
            return child
        os.kill(child, 9)
        os.waitpid(child, 0)
        time.sleep(0.01)
    return None


SOURCES = (
    "endings",
    "fault files",
    "logs",
    "samples",
    "events ring",
    "ledger of events",
    "beats",
    "spec",
    "run's ending",
    "all events",
    "all events and endings",
)


def without(run_dir: Path, copy: Path, source: str) -> Path:
    """A copy of a run folder that lacks one source of evidence."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("data", "pipe-*", "ballast", ".*.partial"))
    victims = {
        "endings": [*copy.glob("workers/*")],
        "fault files": [*copy.glob("logs/*.fault")],
        "logs": [*copy.glob("logs/*.log")],
        "samples": [samples_path(copy)],
        "events ring": [events_path(copy)],
        "ledger of events": [*copy.glob("manifest/events.*")],
        "beats": [*copy.glob("progress/*")],
        "spec": [copy / "supervision" / "spec.json"],
        "run's ending": [],
        "all events": [events_path(copy), *copy.glob("manifest/events.*")],
        "all events and endings": [events_path(copy), *copy.glob("manifest/events.*"), *copy.glob("workers/*")],
    }[source]
    for path in victims:
        path.unlink(missing_ok=True)
    if source == "run's ending":
        for path in copy.glob("manifest/runs.*"):
            path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    return copy
