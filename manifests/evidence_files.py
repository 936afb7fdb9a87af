"""Reads one kind of file of a run each, and never fails: what cannot be used is said in `gaps`.

Called by manifests/evidence.py. A run folder may hold what earlier runs left, what a newer version writes, and what a
dying disk makes of it; every value is checked before it counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from manifests.commit import files_of
from manifests.lines import parse, scan
from manifests.run_order import oldest_first
from shared.beat import BeatState, read_beat
from shared.json_file import read_if_whole
from shared.ring import read_ring
from shared.samples import events_path, samples_path

_TAIL_BYTES = 32 << 10
_TAIL_LINES = 40
# Of a C++ backtrace: one of torch has 15 to 60 lines and pushes the sentence before it out of the last ones.
_FRAME = re.compile(r"frame #\d+: ")
_STACK_BYTES = 64 << 10
_LINE_CHARACTERS = 1000
# A worker may write its files a moment before the run's record has its time; clocks of one host agree to this.
_SLACK_S = 5.0
# Of a newer version, or no value at all.
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError)


def whole(value: Any) -> int:
    """An integer, 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def number(value: Any) -> float | None:
    """A finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return float(value)


def records(run_dir: Path, kind: str, gaps: list[str]) -> list[dict[str, Any]]:
    """A kind's records that fit their checksums and have a time, oldest first."""
    found: list[dict[str, Any]] = []
    try:
        paths = files_of(run_dir, kind)
    except OSError as error:
        gaps.append(f"{run_dir / 'manifest'} cannot be read: {error.strerror}")
        return []
    if not os.access(run_dir / "manifest", os.R_OK | os.X_OK) and (run_dir / "manifest").exists():
        gaps.append(f"{run_dir / 'manifest'} cannot be read: no permission")
    for path in paths:
        try:
            with path.open("rb") as file:
                for lines, damaged in scan(file):
                    found += [record for record in parse(lines) if number(record.get("time")) is not None]
                    if damaged:
                        gaps.append(f"{len(damaged)} damaged lines in {path}, the first is {damaged[0][0]}")
        except OSError as error:
            gaps.append(f"{path} cannot be read: {error.strerror}")
        except (*_UNUSABLE,) as error:
            gaps.append(f"{path} holds records that this version does not understand: {type(error).__name__}")
    return oldest_first(kind, found)


def events(run_dir: Path, run_id: str, gaps: list[str]) -> list[dict[str, Any]]:
    """A run's events, the ledger's and those that only the ring has, each once."""
    found: dict[Any, dict[str, Any]] = {}
    for source in (records(run_dir, "events", gaps), read_ring(events_path(run_dir))):
        for record in source:
            detail = record.get("detail")
            if record.get("run_id") != run_id or not isinstance(record.get("event"), str):
                continue
            if not isinstance(detail, dict) or number(record.get("time")) is None:
                gaps.append(f"an event `{record['event']}` without the facts that this version knows")
                continue
            mono = number(detail.get("mono"))
            if mono is None:
                detail = {key: value for key, value in detail.items() if key != "mono"}
            # The ledger's copy comes first and is never cut; only one boot's monotonic times can be compared.
            key = (record["event"], mono) if mono is not None else (record["event"], record["time"])
            found.setdefault(key, {**record, "message": str(record.get("message", "")), "detail": detail})
    timed = sorted((e for e in found.values() if "mono" in e["detail"]), key=lambda e: float(e["detail"]["mono"]))
    return timed + sorted((e for e in found.values() if "mono" not in e["detail"]), key=lambda e: float(e["time"]))


def samples(run_dir: Path, since: float, supervisor: dict[str, Any] | None, gaps: list[str]) -> list[dict[str, Any]]:
    """The samples of this run's supervisor, in the order of their monotonic time.

    A ring outlives runs and reboots: a monotonic time that goes back begins a new boot, and only what came after the
    supervisor's start is this run's.
    """
    found = [sample for sample in read_ring(samples_path(run_dir)) if number(sample.get("mono")) is not None]
    last_boot = 0
    for index in range(1, len(found)):
        if found[index]["mono"] < found[index - 1]["mono"]:
            last_boot = index
    begun = number((supervisor or {}).get("mono"))
    ours = [
        sample
        for sample in found[last_boot:]
        if (sample["mono"] >= begun - 1.0 if begun is not None else (number(sample.get("t")) or 0.0) > since - _SLACK_S)
    ]
    if not ours:
        gaps.append("no samples of the host before the end")
    return ours


def beats(
    run_dir: Path, role: str, since: float, spawned: dict[int, tuple[int, int]], gaps: list[str]
) -> dict[int, BeatState]:
    """The heartbeats of this run's workers: of the processes that were started last, or written since it began."""
    found = {}
    for rank, path in _by_rank(run_dir / "progress", f"{role}-", ".beat", gaps):
        beat = read_beat(path)
        if beat is None:
            gaps.append(f"no heartbeat of rank {rank} that can be read")
        elif (beat.pid, beat.start_ticks) == spawned[rank] if rank in spawned else beat.started > since - _SLACK_S:
            found[rank] = beat
        else:
            gaps.append(f"the heartbeat of rank {rank} is another process's ({beat.pid}): left out")
    return found


def endings(
    run_dir: Path, role: str, since: float, spawned: dict[int, tuple[int, int]], gaps: list[str]
) -> dict[int, dict[str, Any]]:
    """What the workers of this run wrote about their own end, chosen as the heartbeats are."""
    found = {}
    for rank, path in _by_rank(run_dir / "workers", f"{role}-", ".json", gaps):
        ending = read_if_whole(path)
        if ending is None:
            gaps.append(f"the ending of rank {rank} cannot be read: {path}")
            continue
        own = (whole(ending.get("pid")), whole(ending.get("start_ticks")))
        ended = number(ending.get("ended"))
        if own == spawned[rank] if rank in spawned else ended is not None and ended > since - _SLACK_S:
            found[rank] = ending
    return found


def object_in(path: Path, gaps: list[str] | None) -> dict[str, Any]:
    """The object in a JSON file, empty when there is none."""
    value = read_if_whole(path)
    if value is None and gaps is not None:
        gaps.append(f"{path.name} is missing or cannot be read")
    return value or {}


def log_tails(run_dir: Path, role: str, gaps: list[str]) -> dict[str, tuple[str, ...]]:
    """The last lines of each log of a role, by file name, without the frames of native backtraces."""
    paths = _listed(run_dir / "logs", lambda name: name.startswith(f"{role}-") and name.endswith(".log"), gaps)
    return {path.name: without_frames(_tail(path, gaps).splitlines())[-_TAIL_LINES:] for path in paths}


def without_frames(lines: Sequence[str]) -> tuple[str, ...]:
    """Lines of a log without the frames of native backtraces, which say less than what stands before them."""
    return tuple(line for line in lines if _FRAME.match(line) is None)


def fault_tails(run_dir: Path, role: str, since: float, gaps: list[str]) -> dict[int, tuple[str, ...]]:
    """The last lines of each rank's faulthandler file, of those that were written to since the run began."""
    found = {}
    for rank, path in _by_rank(run_dir / "logs", f"{role}-", ".fault", gaps):
        try:
            changed = path.stat().st_mtime > since - _SLACK_S and path.stat().st_size > 0
        except OSError:
            continue
        if changed:
            found[rank] = tuple(_tail(path, gaps).splitlines()[-60:])
    return found


def stacks(run_dir: Path, since: float, gaps: list[str]) -> dict[str, str]:
    """The stacks saved at hangs of this run, by file name."""
    found = {}
    for path in _listed(run_dir / "supervision" / "stacks", lambda name: name.endswith(".txt"), []):
        try:
            if path.stat().st_mtime > since - _SLACK_S:
                found[path.name] = _tail(path, gaps, _STACK_BYTES)
        except OSError as error:
            gaps.append(f"{path} cannot be read: {error.strerror}")
    return found


def _tail(path: Path, gaps: list[str], size: int = _TAIL_BYTES) -> str:
    """The end of a file as text that a terminal can take."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            data = file.read(size)
    except (OSError, ValueError) as error:
        gaps.append(f"{path} cannot be read: {error}")
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace").replace("\r\n", "\n"))
    # A progress bar rewrites its line by carriage returns: what stood there last is what a person saw.
    lines = [line.rstrip("\r").rpartition("\r")[2][:_LINE_CHARACTERS] for line in text.split("\n")]
    return "\n".join("".join(c if c.isprintable() or c == "\t" else "?" for c in line) for line in lines)


def _by_rank(folder: Path, before: str, after: str, gaps: list[str]) -> Iterable[tuple[int, Path]]:
    named = re.compile(re.escape(before) + r"(\d{1,6})" + re.escape(after))
    for path in _listed(folder, lambda name: named.fullmatch(name) is not None, gaps):
        if found := named.fullmatch(path.name):
            yield int(found[1]), path


def _listed(folder: Path, wanted: Callable[[str], bool], gaps: list[str]) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []
    except OSError as error:
        gaps.append(f"{folder} cannot be read: {error.strerror}")
        return []
    return [folder / name for name in names if wanted(name)]
