"""An input of `dflash store merge` and `subset`: a finished store with the records of its blocks and documents.

Only read here, from a folder or a bucket. What becomes of it is in manifests/derived_store.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from manifests import blocks
from manifests.derived_block import BlockCopy
from manifests.lines import scan
from manifests.records import KINDS, DocumentRecord, SkipRecord
from shared.documents import Documents
from shared.errors import StoreDamaged
from shared.shard_file import Array
from shared.store import TeacherStore

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input: a finished store, its shard records, and the record of each document in the order of `documents`."""

    store: TeacherStore
    records: Mapping[int, Mapping[str, Any]]
    lines: Sequence[DocumentRecord]
    skips: Sequence[SkipRecord]

    @classmethod
    def open(cls, location: Path | str) -> Source:
        """Raises StoreMissing, StoreIncomplete, StoreMismatch, or StoreDamaged when a document has no record."""
        store = blocks.open_store(location, cache=False)
        records = blocks.recorded_blocks(location)
        found: dict[tuple[int, int], tuple[float, DocumentRecord]] = {}
        for when, line in _read(store, DocumentRecord):
            place = line.block, line.document_index
            if line.seal in (store.blocks.get(line.block), "") and when >= found.get(place, (0.0, line))[0]:
                found[place] = when, line
        wanted = list(zip(store.documents.block.tolist(), store.documents.index.tolist(), strict=True))
        if missing := [place for place in wanted if place not in found]:
            raise StoreDamaged(
                f"{location} has no whole record of {len(missing):,} of its {len(wanted):,} documents, the first is "
                f"document {missing[0][1]} of block {missing[0][0]}; `dflash store verify {location} --repair` sets "
                "such blocks aside, the command that made the store makes them again"
            )
        return cls(
            store=store,
            records=records,
            lines=[found[place][1] for place in wanted],
            skips=list(dict.fromkeys(skip for _, skip in _read(store, SkipRecord))),
        )

    @property
    def documents(self) -> Documents:
        """All documents, block by block."""
        return self.store.documents

    @property
    def num_rows(self) -> int:
        """How far its document numbers go: rows of the prepared data, stored or skipped."""
        highest = int(self.documents.index.max(initial=-1)) + 1
        return max(int(self.store.identity.get("documents", 0)), highest)

    def copies(self, number: int, kept: Array, offset: int, heldout: Array | None = None) -> list[BlockCopy]:
        """The blocks of this input (the `number`-th) that hold any of the documents where `kept` (bool [D]) is true.

        `offset` is added to document numbers; `heldout` (bool [D]) are new splits.
        """
        documents = self.documents
        splits = documents.heldout if heldout is None else heldout
        edges = np.flatnonzero(np.diff(documents.block)) + 1
        found = []
        for first, end in zip([0, *edges.tolist()], [*edges.tolist(), len(documents)], strict=True):
            here = np.flatnonzero(kept[first:end])
            if len(here):
                found.append(
                    BlockCopy(
                        source=number,
                        block=int(documents.block[first]),
                        documents=documents.take(np.arange(first, end)),
                        kept=here,
                        index=documents.index[first:end][here] + offset,
                        heldout=splits[first:end][here],
                    )
                )
        return found


def _read(store: TeacherStore, kind: type[RecordT]) -> Iterator[tuple[float, RecordT]]:
    """(time, record) of all whole records of a kind, of a store in a folder or a bucket.

    One line at a time becomes a record, a third of the memory of the decoded JSON: there may be millions.
    """
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = next(kind_name for kind_name, cls in KINDS.items() if cls is kind) + "."
    for name in store.files.list("manifest"):
        if name.startswith(prefix) and name.endswith(".jsonl"):
            for lines, _ in scan(io.BytesIO(store.files.read_bytes(f"manifest/{name}"))):
                for values in map(json.loads, lines):
                    yield values["time"], kind(**{key: value for key, value in values.items() if key in names})
