"""A file of fixed size that keeps the newest records: its space is taken at the start, so it works on a full disk.

The supervisor keeps its samples (shared/samples.py) and a second copy of its events in such rings;
`manifests/evidence.py` reads them after a death. A record is one pwrite and survives the writer's SIGKILL; a record
that is torn or was damaged does not fit its checksum and is passed over.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from shared.atomic import disk_faults

_MAGIC = b"dfring1\n"
_HEADER = struct.Struct("<8sII")
_HEADER_BYTES = 64
# Checksum of all that follows, sequence number from 1, length of the JSON text.
_SLOT = struct.Struct("<IQI")
# What a record too large for its slot is cut to, one after the other: characters of a string, items of a list.
_CUTS = ((4000, 60), (1500, 40), (600, 24), (240, 12), (100, 6), (40, 2))


class Ring:
    """The newest `slots` records of at most `slot_bytes` each; an existing ring of that shape goes on.

    Raises DiskFull or PathNotWritable when it cannot be made.
    """

    def __init__(self, path: Path, slots: int, slot_bytes: int) -> None:
        self.path, self.slots, self.slot_bytes = path, slots, slot_bytes
        size = _HEADER_BYTES + slots * slot_bytes
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                header = _HEADER.pack(_MAGIC, slots, slot_bytes)
                if os.pread(self._file, _HEADER.size, 0) != header or os.fstat(self._file).st_size != size:
                    os.ftruncate(self._file, 0)
                os.posix_fallocate(self._file, 0, size)
                os.pwrite(self._file, header, 0)
            except BaseException:
                os.close(self._file)
                raise
        self._sequence = max((number for number, _ in _records(path)), default=0)

    def append(self, values: dict[str, Any], durable: bool = False) -> None:
        """Write one record over the oldest; what is too large is cut inside. `durable`: fsync before returning.

        Raises DiskFull or PathNotWritable.
        """
        text = _fitting(values, self.slot_bytes - _SLOT.size)
        self._sequence += 1
        slot = _HEADER_BYTES + (self._sequence % self.slots) * self.slot_bytes
        with disk_faults(self.path):
            os.pwrite(self._file, _sealed(self._sequence, text), slot)
            if durable:
                os.fdatasync(self._file)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)


def read_ring(path: Path) -> list[dict[str, Any]]:
    """A ring's records, oldest first; empty for a file that is missing, unreadable or no ring. Never raises."""
    return [values for _, values in sorted(_records(path), key=lambda record: record[0])]


def _sealed(sequence: int, text: bytes) -> bytes:
    body = _SLOT.pack(0, sequence, len(text))[4:] + text
    return struct.pack("<I", zlib.crc32(body)) + body


def _records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        data = path.read_bytes()
        magic, slots, slot_bytes = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return []
    if magic != _MAGIC or slot_bytes <= _SLOT.size:
        return []
    found = []
    for start in range(_HEADER_BYTES, min(len(data), _HEADER_BYTES + slots * slot_bytes) - _SLOT.size, slot_bytes):
        checksum, sequence, length = _SLOT.unpack_from(data, start)
        if not sequence or length > slot_bytes - _SLOT.size:
            continue
        if zlib.crc32(data[start + 4 : start + _SLOT.size + length]) != checksum:
            continue
        try:
            values = json.loads(data[start + _SLOT.size : start + _SLOT.size + length])
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            found.append((sequence, values))
    return found


def _fitting(values: dict[str, Any], limit: int) -> bytes:
    """JSON text of at most `limit` bytes: long strings and lists lose their middle until it fits."""
    text = _json(values)
    for characters, items in _CUTS:
        if len(text) <= limit:
            return text
        text = _json(_cut(values, characters, items))
    if len(text) <= limit:
        return text
    plain = {key: value for key, value in values.items() if isinstance(value, int | float | None)}
    text = _json(plain | {"cut": True})
    return text if len(text) <= limit else b'{"cut":true}'


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")


def _cut(value: Any, characters: int, items: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        head = characters // 3
        return value[:head] + "…" + value[head - characters + 1 :]
    if isinstance(value, dict):
        return {key: _cut(item, characters, items) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kept = list(value) if len(value) <= items else [*value[: items // 2], *value[items // 2 - items :]]
        return [_cut(item, characters, items) for item in kept]
    return value
