"""Append records to a folder's manifest and read them back: each process writes its own files, nobody locks.

A record is one line (manifests/lines.py), an append one write; a kill can at most leave one torn last line, which
readers pass over and the next append first closes. Durable before `append` returns, because a record says "done".
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from manifests.lines import closing_of, line_of, parse, records_in, scan
from manifests.records import KINDS, kind_of
from manifests.run_order import oldest_first
from shared.atomic import disk_faults, fsync_dir
from shared.store_files import is_remote, open_files


class DamagedLine(NamedTuple):
    """A line of a manifest file that does not fit its checksum; its record is void."""

    path: Path
    line_number: int
    reason: str


class Ledger:
    """The records that one process appends to one folder."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.folder = folder / "manifest"
        self.writer = writer
        self._time = 0.0
        with disk_faults(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def append(self, *records: object) -> None:
        """Append records of one kind with one write and one fsync. Raises DiskFull or PathNotWritable."""
        if not records:
            return
        kind = kind_of(records[0])
        lines = []
        for record in records:
            assert kind_of(record) == kind, "one append holds one kind"
            values = {"time": self._now(), "writer": self.writer, **dataclasses.asdict(record)}  # type: ignore[call-overload]
            lines.append(line_of(values))
        path = self.folder / f"{kind}.{self.writer}.jsonl"
        new = not path.exists()
        with disk_faults(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                data = (closing_of(path.read_bytes().rpartition(b"\n")[2]) if torn else b"") + b"".join(lines)
                while data:  # a short write happens only when the disk fills: then the next call raises
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if new:
                fsync_dir(self.folder)

    def _now(self) -> float:
        """The time, but never the same twice: "the newest record" must have one answer."""
        self._time = max(time.time(), self._time + 1e-6)
        return self._time


def settle(folder: Path) -> None:
    """Make durable what an earlier command was killed over: its records are read as done, so they must not be lost.

    Call only while owning the folder.
    """
    for path in [*(folder / "manifest").glob("*.jsonl"), folder / "manifest", folder]:
        with suppress(FileNotFoundError, PermissionError):  # what we may not read binds us to nothing
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def files_of(folder: Path, kind: str) -> list[Path]:
    """The manifest files of one kind in a run or store folder."""
    assert kind in KINDS, kind
    return sorted(path for path in (folder / "manifest").glob(f"{kind}.*.jsonl") if path.is_file())


def read(folder: Path | str, kind: str) -> list[dict[str, Any]]:
    """All records of a kind whose lines fit their checksums, oldest first; a store may also lie in a bucket."""
    records: list[dict[str, Any]] = []
    if is_remote(folder):
        files = open_files(folder)
        for name in files.list("manifest"):
            if name.startswith(f"{kind}.") and name.endswith(".jsonl"):
                records += records_in(files.read_bytes(f"manifest/{name}"))[0]
        return oldest_first(kind, records)
    folder = Path(folder)
    for path in files_of(folder, kind):
        with path.open("rb") as file:
            for lines, _ in scan(file):
                records += parse(lines)
    return oldest_first(kind, records)


def damaged_lines(folder: Path, kind: str) -> list[DamagedLine]:
    """Lines of a kind that do not fit their checksums; a line that a kill cut short is void but not among them."""
    found = []
    for path in files_of(folder, kind):
        with path.open("rb") as file:
            found += [DamagedLine(path, number, reason) for _, damaged in scan(file) for number, reason in damaged]
    return found


def latest(records: Iterable[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
    """The newest record for each value of `key`."""
    return {record[key]: record for record in records}
