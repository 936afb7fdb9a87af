"""Append records to a folder's manifest and read them back: each process writes its own files, nobody locks.

A record is one line and one write; a kill can at most leave one torn last line, which readers pass over and
the next append first closes. Durable before `append` returns, because a record is what says "done".
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from manifests.records import KINDS, kind_of
from shared.atomic import disk_faults, fsync_dir


class Ledger:
    """The records that one process appends to one folder."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.folder = folder / "manifest"
        self.writer = writer
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
            values = {"time": time.time(), "writer": self.writer, **dataclasses.asdict(record)}  # type: ignore[call-overload]
            lines.append(json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n")
        path = self.folder / f"{kind}.{self.writer}.jsonl"
        new = not path.exists()
        with disk_faults(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                data = ("\n" if torn else "").encode() + "".join(lines).encode()
                while data:  # a short write happens only when the disk fills: then the next call raises
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if new:
                fsync_dir(self.folder)


def files_of(folder: Path, kind: str) -> list[Path]:
    """The manifest files of one kind in a run or store folder."""
    assert kind in KINDS, kind
    return sorted((folder / "manifest").glob(f"{kind}.*.jsonl"))


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """All whole records of a kind, oldest first; torn lines are passed over."""
    records = [record for path in files_of(folder, kind) for record in _lines(path)]
    return sorted(records, key=lambda record: record["time"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "time" in record:
            yield record


def latest(records: Iterable[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
    """The newest record for each value of `key`."""
    return {record[key]: record for record in records}
