"""A worker's heartbeat: one small file that a SIGKILL at any byte, or a full disk, leaves readable.

Written through shared memory by shared/progress.py (what the loop does) and by the liveness thread (that Python still
runs); read by the supervisor, by `dflash status` and by the verdict. Next: shared/progress.py.

Layout, 8 KiB, all of it allocated when the file is made (a page that the disk had no room for would be a SIGBUS later):
magic at 0; alive at 64: two 8-byte words, count and monotonic ns, each written at once; two slots from 1024 on, each
sequence u64, length u32, crc32 u32 of all else in the slot, then JSON. Reports alternate between the slots, so that
the one before the last is whole while the last is being written.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.atomic import disk_faults

SIZE = 8192
_MAGIC = b"dfbeat1\n"
_ALIVE_WORD = 8  # of 8 bytes: offset 64, a cache line of its own
_SLOTS = (1024, 4608)
_HEADER = struct.Struct("<QII")
_PREFIX = struct.Struct("<QI")
MOST_JSON = 3072
"""Bytes of one report; one that is longer loses its numbers."""
_MOST_TEXT = 100
# A reader whom the writer overtook twice within one read(2) saw two torn slots: look again.
_LOOKS = 4

_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatState:
    """What a beat says: process, phase, counts. `*_since`, `reported` and `alive` are CLOCK_MONOTONIC seconds."""

    pid: int = 0
    start_ticks: int = 0
    attempt: int = 0
    sequence: int = 0
    phase: str = ""
    phase_since: float = 0.0
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    first: float = 0.0
    """`done` when the phase began."""
    inner: float | None = None
    """Progress inside the phase, where `done` does not move: documents estimated, regions compiled."""
    reported: float = 0.0
    """When a report last changed phase, done or inner."""
    time: float = 0.0
    """Wall clock of the last report."""
    started: float = 0.0
    """Wall clock of the phase's first report."""
    saved: float | None = None
    """Durable progress: step of the newest complete checkpoint, or blocks committed of this worker's share."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase that this process has left, all its visits together."""
    numbers: dict[str, Any] = field(default_factory=dict)
    alive_count: int = 0
    alive: float = 0.0

    def spent_until(self, now: float) -> dict[str, float]:
        """Seconds in each phase, the present one counted up to `now` (monotonic)."""
        present = {self.phase: self.spent.get(self.phase, 0.0) + max(0.0, now - self.phase_since)} if self.phase else {}
        return self.spent | present


class Beat:
    """The writing end; one per process. `report` is for one thread, `alive` for another."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped
        self._bytes = memoryview(mapped)
        self._words = self._bytes.cast("Q")
        self._sequence = 0
        self._count = 0

    @classmethod
    def create(cls, path: Path) -> Beat:
        """Make the file, or begin anew in the one that is there: its room on the disk is not given back in between.

        Raises DiskFull or PathNotWritable.
        """
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, SIZE)
                mapped = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED)
            finally:
                os.close(descriptor)
        mapped[:] = _MAGIC.ljust(SIZE, b"\0")
        return cls(path, mapped)

    def report(self, state: dict[str, Any], *, fixed: str = "") -> None:
        """Put `state` (BeatState's fields, JSON values) in place of the report before the last.

        fixed: more fields, which seldom change, as `members` gave them: most of a report's cost is its JSON.
        """
        try:
            text = _ENCODER.encode(state)
        except (TypeError, ValueError, RecursionError):  # numbers that are no JSON: never the end of the work
            text = _ENCODER.encode(_without_numbers(state))
        if len(text) + len(fixed) > MOST_JSON:
            text = _ENCODER.encode(_without_numbers(state))
        text = "{" + fixed + text[1:]
        self._sequence += 1
        at = _SLOTS[self._sequence & 1]
        data = text.encode()
        check = zlib.crc32(data, zlib.crc32(_PREFIX.pack(self._sequence, len(data))))
        start = at + _HEADER.size
        self._bytes[start : start + len(data)] = data
        _HEADER.pack_into(self._bytes, at, self._sequence, len(data), check)

    def alive(self) -> None:
        """Count one beat of the liveness thread."""
        self._count += 1
        words = self._words
        words[_ALIVE_WORD] = self._count
        words[_ALIVE_WORD + 1] = time.monotonic_ns()

    def close(self) -> None:
        """Give the memory back; the file stays."""
        self._words.release()
        self._bytes.release()
        self._map.close()


def members(state: dict[str, Any]) -> str:
    """Fields of a report as JSON, for `Beat.report` to put before the others; texts are cut."""
    return _ENCODER.encode(_without_numbers(state))[1:-1] + ","


def _without_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """A report that fits for certain: known fields without numbers, texts cut."""
    kept = {name: state[name] for name in BeatState.__dataclass_fields__ if name in state and name != "numbers"}
    return {name: value[:_MOST_TEXT] if isinstance(value, str) else value for name, value in kept.items()}


def read_beat(path: Path) -> BeatState | None:
    """The newest whole report of a worker; None when there is none (no file, cut short, both slots torn)."""
    for _ in range(_LOOKS):
        try:
            with path.open("rb") as file:
                data = file.read(SIZE)
        except (OSError, ValueError):
            return None
        if len(data) < SIZE or not data.startswith(_MAGIC):
            return None
        found = [slot for at in _SLOTS if (slot := _read_slot(data, at)) is not None]
        if found:
            return _state(*max(found, key=lambda slot: slot[0]), data)
    return None


def _read_slot(data: bytes, at: int) -> tuple[int, dict[str, Any]] | None:
    sequence, length, check = _HEADER.unpack_from(data, at)
    if sequence == 0 or length > MOST_JSON:
        return None
    text = data[at + _HEADER.size : at + _HEADER.size + length]
    if zlib.crc32(text, zlib.crc32(_PREFIX.pack(sequence, length))) != check:
        return None
    try:
        state = json.loads(text)
    except ValueError:
        return None
    return (sequence, state) if isinstance(state, dict) else None


def _state(sequence: int, state: dict[str, Any], data: bytes) -> BeatState | None:
    count, nanoseconds = struct.unpack_from("=QQ", data, _ALIVE_WORD * 8)
    try:
        return BeatState(
            pid=int(state.get("pid", 0)),
            start_ticks=int(state.get("start_ticks", 0)),
            attempt=int(state.get("attempt", 0)),
            sequence=sequence,
            phase=str(state.get("phase", "")),
            phase_since=float(state.get("phase_since", 0.0)),
            done=float(state.get("done", 0.0)),
            total=_number(state.get("total")),
            unit=str(state.get("unit", "")),
            first=float(state.get("first", 0.0)),
            inner=_number(state.get("inner")),
            reported=float(state.get("reported", 0.0)),
            time=float(state.get("time", 0.0)),
            started=float(state.get("started", 0.0)),
            saved=_number(state.get("saved")),
            spent={str(name): float(seconds) for name, seconds in (state.get("spent") or {}).items()},
            numbers=dict(state.get("numbers") or {}),
            alive_count=count,
            alive=nanoseconds / 1e9,
        )
    except (TypeError, ValueError, OverflowError, AttributeError):  # a later version's idea of a field
        return None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
