"""How two stores differ: in what they were made from, in which documents they hold, and in the values of those.

Called by manifests/store_diff.py. Codes are decoded as stage 2 decodes them (shared/quantise.py), in numpy.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manifests.blocks import open_store, recorded_blocks
from manifests.store_facts import stored_documents
from shared.documents import DocumentRef
from shared.progress import progress
from shared.shard_file import Array
from shared.store import Arrays, TeacherStore, differences
from shared.store_layout import ARRAYS, from_bf16

_THREADS = 4
_NOT_COMPARED = ("store_uuid", "crc32c")
Key = tuple[str, str]
"""A document's id, and the first 16 hex digits of a sha256 over its ids and loss mask."""


class Side:
    """One of the stores, with its documents by key."""

    def __init__(self, location: Path | str) -> None:
        self.store = open_store(location, partial=True, cache=False)
        self._channels: dict[tuple[int, str], Array] = {}
        self._lock = threading.Lock()
        records = {
            (record["block"], record["document_index"]): (str(record["doc_id"]), str(record["token_sha"]))
            for record in stored_documents(self.store.files, recorded_blocks(location))
        }
        self.documents: defaultdict[Key, list[DocumentRef]] = defaultdict(list)
        for ref in self.store.documents:
            doc_id, sha = records.get((ref.block, ref.index), (f"#{ref.index}", ""))
            self.documents[doc_id, sha or self._sha(ref)].append(ref)

    def _sha(self, ref: DocumentRef) -> str:
        read = self.store.read_document(ref, ("input_ids", "loss_mask"))
        return hashlib.sha256(read["input_ids"].tobytes() + read["loss_mask"].tobytes()).hexdigest()[:16]

    def values(self, ref: DocumentRef) -> Arrays:
        """The per-token arrays of a document; hidden states as float32 whatever they are stored as."""
        names = [name for name in self.store.sealed(ref.block) if ARRAYS[name].rows == "tokens"]
        read = self.store.read_document(ref, names)
        for name in ("hidden_states", "last_hidden_state"):
            if f"{name}_q" in read:
                scales = read.pop(f"{name}_scale")[..., None]
                read[name] = round_to_bf16(read.pop(f"{name}_q") * scales * self._channel(ref.block, f"{name}_channel"))
            elif name in read:
                read[name] = from_bf16(read[name])
        if "topk_logits" in read:
            read["topk_logits"] = from_bf16(read["topk_logits"])
        return read

    def _channel(self, block: int, name: str) -> Array:
        with self._lock:
            if (block, name) not in self._channels:
                self._channels[block, name] = self.store.read_block_array(block, name)
            return self._channels[block, name]


def round_to_bf16(values: Array) -> Array:
    """float32 values rounded to the nearest bf16, half to even, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass
class Difference:
    """How far one array's values are apart: relative L2 difference of a token's row, or how many integers differ."""

    largest: float = 0.0
    total: float = 0.0
    rows: int = 0
    differing: int = 0

    def add(self, one: Array, other: Array) -> None:
        """Count a document's rows; `other` has the same shape."""
        rows = len(one)
        if one.dtype.kind == "f":
            flat = (-1, one.shape[-1] if one.ndim > 1 else 1)
            exact, near = one.reshape(flat).astype(np.float64), other.reshape(flat).astype(np.float64)
            size = np.linalg.norm(exact, axis=1)
            off = np.linalg.norm(near - exact, axis=1) / np.where(size == 0, 1.0, size)
            self.largest, self.total = max(self.largest, float(off.max(initial=0.0))), self.total + float(off.sum())
            self.rows += len(off)
            self.differing += int((off > 0).sum())
            return
        different = (one != other).reshape(rows, -1)
        self.largest = max(self.largest, float(different.mean(axis=1).max(initial=0.0)))
        self.total, self.rows = self.total + float(different.mean(axis=1).sum()), self.rows + rows
        self.differing += int(different.any(axis=1).sum())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        mean = self.total / max(self.rows, 1)
        return {"largest": self.largest, "mean": mean, "rows": self.rows, "differing": self.differing}


@dataclass
class Comparison:
    """What was found; documents are keys with how often each is in one store only."""

    identity: dict[str, tuple[Any, Any]]
    only_first: Counter[Key]
    only_second: Counter[Key]
    common: int
    same_seals: int
    blocks: tuple[int, int]
    content: dict[str, Difference] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether nothing differs in what was compared."""
        off = any(difference.differing for difference in self.content.values())
        return not (self.identity or self.only_first or self.only_second or off or self.not_compared)

    def other_tokens(self) -> list[str]:
        """Ids that both have, with other tokens."""
        return sorted({doc_id for doc_id, _ in self.only_first} & {doc_id for doc_id, _ in self.only_second})


def compare(first: Path | str, second: Path | str, *, content: bool) -> Comparison:
    """Compare two stores, finished or not. Raises what opening and reading them raises."""
    one, other = Side(first), Side(second)
    counts, others = (Counter({key: len(refs) for key, refs in side.documents.items()}) for side in (one, other))
    seals, theirs = set(one.store.blocks.values()), set(other.store.blocks.values())
    found = Comparison(
        _identity(one.store, other.store), counts - others, others - counts, sum((counts & others).values()),
        len(seals & theirs), (len(seals), len(theirs)),
    )  # fmt: skip
    if content:
        _compare_content(one, other, found)
    return found


def _identity(one: TeacherStore, other: TeacherStore) -> dict[str, tuple[Any, Any]]:
    forward = differences(one.identity, other.identity)
    backward = {name: (have, want) for name, (want, have) in differences(other.identity, one.identity).items()}
    return {name: pair for name, pair in sorted({**backward, **forward}.items()) if name not in _NOT_COMPARED}


def _pairs(one: Side, other: Side) -> Iterator[tuple[DocumentRef, DocumentRef]]:
    for key, refs in one.documents.items():
        yield from zip(refs, other.documents.get(key, ()), strict=False)


def _compare_content(one: Side, other: Side, found: Comparison) -> None:
    pairs = sorted(_pairs(one, other), key=lambda pair: (pair[0].block, pair[0].start))
    differing: defaultdict[str, Difference] = defaultdict(Difference)

    def read(pair: tuple[DocumentRef, DocumentRef]) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        return one.values(pair[0]), other.values(pair[1])

    with (
        ThreadPoolExecutor(_THREADS, thread_name_prefix="diff") as pool,
        progress("diff", len(pairs), "documents", "store") as bar,
    ):
        for mine, theirs in pool.map(read, pairs):
            for name in sorted({*mine, *theirs}):
                if name not in mine or name not in theirs:
                    found.not_compared[name] = "only one of the stores has it"
                elif mine[name].shape != theirs[name].shape:
                    found.not_compared[name] = f"shapes of a document are {mine[name].shape} and {theirs[name].shape}"
                else:
                    differing[name].add(mine[name], theirs[name])
            bar.advance()
    found.content = {name: differing[name] for name in sorted(differing)}
