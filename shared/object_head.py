"""What a store in a bucket consists of at one moment: one small object, written last, replaced in one request.

It names the files of records (each by the hash of its content), the documents cache, and where a block lies that was
made again after an earlier one was published. Written by manifests/store_push.py, read by shared/object_files.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import StoreDamaged, StoreMismatch
from shared.json_file import parse_object, require_sealed, sealed
from shared.store_layout import block_name

HEAD = "manifest/head.json"
HEAD_FORMAT = 1
# In the names of record files that hold the lines of many writers.
PUBLISHED = "published-"


@dataclass(frozen=True)
class RecordFile:
    """One file of records: bytes and hash of its content."""

    bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Head:
    """One published state of a store."""

    store_uuid: str
    manifest: Mapping[str, RecordFile]
    """Name in manifest/ -> what it holds."""
    previous: tuple[str, ...] = ()
    """Record files of the state before, kept for those who read that one."""
    places: Mapping[int, str] = field(default_factory=dict)
    """Block -> folder, for blocks that do not lie where their number says."""
    complete: bool = False
    """Whether all planned blocks and the target are there."""

    def to_bytes(self) -> bytes:
        """The object's content."""
        value = {
            "format": HEAD_FORMAT,
            "store_uuid": self.store_uuid,
            "complete": self.complete,
            "manifest": {name: vars(entry) for name, entry in sorted(self.manifest.items())},
            "previous": list(self.previous),
            "places": {str(block): place for block, place in sorted(self.places.items())},
        }
        return (json.dumps(sealed(value), indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Head:
        """The inverse. Raises StoreDamaged, or StoreMismatch for a format that this version does not read."""
        advice = "run `dflash store push` again: it is made anew"
        value = parse_object(data, where, advice)
        require_sealed(value, where, advice)
        if value.get("format") != HEAD_FORMAT:
            raise StoreMismatch(f"{where} has format {value.get('format')}, this version reads {HEAD_FORMAT}")
        try:
            return cls(
                store_uuid=str(value["store_uuid"]),
                manifest={
                    str(name): RecordFile(int(entry["bytes"]), str(entry["blake2b"]))
                    for name, entry in value["manifest"].items()
                },
                previous=tuple(str(name) for name in value["previous"]),
                places={int(block): str(place) for block, place in value["places"].items()},
                complete=bool(value["complete"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreDamaged(f"{where} is no list of a store's records ({error!r}); {advice}") from error

    def place_of(self, block: int) -> str:
        """The folder of a block."""
        return self.places.get(block, block_name(block))


def record_file(kind: str, data: bytes) -> tuple[str, RecordFile]:
    """Name and entry of a file of records with this content."""
    found = hash_of(data)
    return f"{kind}.{PUBLISHED}{found}.jsonl", RecordFile(len(data), found)


def hash_of(data: bytes) -> str:
    """BLAKE2b, 16 bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def require_whole(entry: RecordFile, data: bytes, where: str) -> None:
    """Raise StoreDamaged unless a file of records is the one that the head names."""
    if (len(data), hash_of(data)) != (entry.bytes, entry.blake2b):
        raise StoreDamaged(
            f"{where} has {len(data):,} bytes with hash {hash_of(data)}, {HEAD} names {entry.bytes:,} bytes with "
            f"{entry.blake2b}; run `dflash store push` again"
        )


def same_state(one: Head | None, other: Head) -> bool:
    """Whether two heads say the same, but for what they keep of the state before."""

    def key(head: Head) -> tuple[Any, ...]:
        return head.store_uuid, dict(head.manifest), dict(head.places), head.complete

    return one is not None and key(one) == key(other)
