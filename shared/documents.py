"""The documents of a store as columns, and the file that caches them: a million open in a fraction of a second.

Per-document arrays lie in every block; the cache is made from them and named by the snapshot (blocks and seals) it
was made from, so a stale one is never read. Called by shared/store.py and manifests/blocks.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.atomic import write_bytes
from shared.checksum import crc32c
from shared.shard_file import Array
from shared.store_files import StoreFiles

_MAGIC = "dflash documents 1"
_COLUMNS = {"index": "<i8", "block": "<i4", "start": "<i8", "length": "<i4", "n_supervised": "<i4", "heldout": "|b1"}


@dataclass(frozen=True)
class DocumentRef:
    """Where one document lies: row number in the prepared data, block, first token in it, tokens, split, supervised."""

    index: int
    block: int
    start: int
    length: int
    split: str
    n_supervised: int


class Documents:
    """Documents as numpy columns of one length: index, block, start, length, n_supervised, heldout (bool)."""

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self.columns = {name: np.asarray(columns[name], dtype=kind) for name, kind in _COLUMNS.items()}

    @classmethod
    def concatenate(cls, parts: Sequence[Documents]) -> Documents:
        """One after another."""
        return cls(
            {
                name: np.concatenate([part.columns[name] for part in parts]) if parts else np.empty(0, kind)
                for name, kind in _COLUMNS.items()
            }
        )

    @property
    def index(self) -> Array:
        """Row numbers in the prepared data, int64 [D]."""
        return self.columns["index"]

    @property
    def block(self) -> Array:
        """Block numbers, int32 [D]."""
        return self.columns["block"]

    @property
    def start(self) -> Array:
        """First token in the block, int64 [D]."""
        return self.columns["start"]

    @property
    def length(self) -> Array:
        """Tokens, int32 [D]."""
        return self.columns["length"]

    @property
    def n_supervised(self) -> Array:
        """Tokens whose loss counts, int32 [D]."""
        return self.columns["n_supervised"]

    @property
    def heldout(self) -> Array:
        """Whether the document is kept out of training, bool [D]."""
        return self.columns["heldout"]

    def __len__(self) -> int:
        return len(self.columns["index"])

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return self.take(np.arange(len(self))[position])
        c = self.columns
        return DocumentRef(
            int(c["index"][position]),
            int(c["block"][position]),
            int(c["start"][position]),
            int(c["length"][position]),
            "heldout" if c["heldout"][position] else "train",
            int(c["n_supervised"][position]),
        )

    def __iter__(self) -> Iterator[DocumentRef]:
        return (self[position] for position in range(len(self)))

    def take(self, positions: Array) -> Documents:
        """The documents at these positions, or where a boolean mask is true."""
        return Documents({name: column[positions] for name, column in self.columns.items()})


def index_name(snapshot: str) -> str:
    """The cache file of a snapshot, relative to the store."""
    return f"index/documents-{snapshot}.bin"


def write_index(store: Path, snapshot: str, documents: Documents) -> Path:
    """Write the cache of a snapshot and return its path. Raises DiskFull or PathNotWritable."""
    payload = b"".join(np.ascontiguousarray(documents.columns[name]).tobytes() for name in _COLUMNS)
    header = {"what": _MAGIC, "snapshot": snapshot, "documents": len(documents), "crc32c": crc32c(payload)}
    path = store / index_name(snapshot)
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, json.dumps(header).encode() + b"\n" + payload)
    return path


def read_index(files: StoreFiles, snapshot: str) -> Documents | None:
    """The cached documents of a snapshot, or None when there is no cache or a damaged one (it is only a cache)."""
    try:
        data = files.read_bytes(index_name(snapshot))
        line, payload = data.split(b"\n", 1)
        header = json.loads(line)
        if (header["what"], header["snapshot"], header["crc32c"]) != (_MAGIC, snapshot, crc32c(payload)):
            return None
        count, offset, columns = int(header["documents"]), 0, {}
        if len(payload) != count * sum(np.dtype(kind).itemsize for kind in _COLUMNS.values()):
            return None  # the count is the only word of the header that the checksum does not vouch for
        for name, kind in _COLUMNS.items():
            columns[name] = np.frombuffer(payload, kind, count, offset)
            offset += columns[name].nbytes
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Documents(columns)
