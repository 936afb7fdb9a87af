"""From the teacher store to batches: documents read, packed, cut into blocks with labels, prefetched by one thread.

Called by train.py and estimate.py. The thread runs numpy, zarr and plain copies only: compiled code and
flex_attention belong to the main thread. Next: objective.py (what happens to a batch).

Shapes: R rows, S = max_length tokens, N anchor slots, B slots, F taps, H target hidden.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manifests.commit import read
from shared.errors import StoreIncomplete
from shared.json_file import read_object, require_keys
from shared.store import DocumentRef, TeacherStore, read_identity
from stage2_train.anchors import apportion, eligible_anchors, labels, sample_anchors
from stage2_train.config import TrainConfig
from stage2_train.packing import Row, batches_in, epoch_rows, rank_rows

Array = np.ndarray[Any, Any]
# What training asks of every store.
IDENTITY_KEYS = ("target_layer_ids", "num_hidden_layers", "hidden_size", "vocab_size")


def open_store(path: Path) -> TeacherStore:
    """A finished store: every planned block has its record. Raises StoreMissing, StoreDamaged or StoreIncomplete."""
    require_keys(read_identity(path), IDENTITY_KEYS, path / "store.json", "restore it or extract again")
    blocks = {int(record["block"]) for record in read(path, "shards")}
    plan = read_object(path / "plan.json", "run the same `dflash extract` command: it is made again")
    planned = len(plan.get("blocks", ()))
    if not blocks or len(blocks) < planned:
        raise StoreIncomplete(
            f"{path} holds {len(blocks)} of {planned} planned blocks; finish it with the same "
            "`dflash extract` command, then train"
        )
    return TeacherStore(path, blocks)


def select(store: TeacherStore, split: str) -> tuple[list[DocumentRef], int]:
    """Documents of a split in the order of the prepared data, and how many were left out for having no anchor.

    An anchor and its first label are two supervised tokens, so fewer cannot be trained on.
    """
    found = sorted((ref for ref in store.documents if ref.split == split), key=lambda ref: ref.index)
    kept = [ref for ref in found if ref.n_supervised >= 2]
    return kept, len(found) - len(kept)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows ready to be trained on, in numpy. Unused slots have start = end = 0, count nothing, see only themselves."""

    features: Array
    """[R,S,F*H] uint16: bf16 bits of the target's residual streams, 0 where a row is not full."""
    context_positions: Array
    """[R,S] int32: position in the document."""
    anchor_positions: Array
    """[R,N] int32: position of the anchor in its document."""
    anchor_tokens: Array
    """[R,N] int32."""
    start: Array
    """[R,N] int32: row index of the document's first token."""
    end: Array
    """[R,N] int32: row index of the anchor."""
    labels: Array
    """[R,N,B] int64."""
    counted: Array
    """[R,N,B] bool: slots with a label; slot 0 never."""
    documents: tuple[tuple[int, ...], ...]
    """Row numbers (in the prepared data) of the documents of each row, to name them in an error."""
    tokens: int
    """Context tokens that are not padding."""
    without_anchors: int
    """Documents that offer no anchor."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes that never change during a run."""

    max_length: int
    anchors: int
    block_size: int
    feature_size: int


class BatchBuilder:
    """Turns packed rows into a Batch. The same rows, seed and epoch give the same batch in every process."""

    def __init__(self, store: TeacherStore, documents: Sequence[DocumentRef], shapes: Shapes, seed: int) -> None:
        self.store = store
        self.documents = list(documents)
        self.shapes = shapes
        self.seed = seed

    def lengths(self) -> list[int]:
        """Tokens of every document."""
        return [ref.length for ref in self.documents]

    def build(self, rows: Sequence[Row], epoch: int) -> Batch:
        """Read and lay out `rows`. Raises StoreDamaged naming what cannot be read."""
        shapes, count = self.shapes, len(rows)
        features = np.zeros((count, shapes.max_length, shapes.feature_size), np.uint16)
        positions = np.zeros((count, shapes.max_length), np.int32)
        small = {
            name: np.zeros((count, shapes.anchors), np.int32)
            for name in ("anchor_positions", "anchor_tokens", "start", "end")
        }
        label_ids = np.zeros((count, shapes.anchors, shapes.block_size), np.int64)
        counted = np.zeros((count, shapes.anchors, shapes.block_size), np.bool_)
        empty = tokens = 0
        for number, row in enumerate(rows):
            read = [self._read(piece.document, piece.length) for piece in row]
            eligible = [eligible_anchors(arrays["loss_mask"]) for arrays in read]
            shares = apportion([len(found) for found in eligible], shapes.anchors) if row else []
            slot = 0
            for piece, arrays, found, share in zip(row, read, eligible, shares, strict=True):
                where = slice(piece.offset, piece.offset + piece.length)
                features[number, where] = arrays["hidden_states"].reshape(piece.length, -1)
                positions[number, where] = np.arange(piece.length)
                chosen = sample_anchors(found, share, self.seed, epoch, self.documents[piece.document].index)
                slots = slice(slot, slot + share)
                small["anchor_positions"][number, slots] = chosen
                small["anchor_tokens"][number, slots] = arrays["input_ids"][chosen]
                small["start"][number, slots] = piece.offset
                small["end"][number, slots] = piece.offset + chosen
                label_ids[number, slots], counted[number, slots] = labels(
                    arrays["input_ids"], arrays["loss_mask"], chosen, shapes.block_size
                )
                slot += share
                empty += len(found) == 0
                tokens += piece.length
        names = tuple(tuple(self.documents[piece.document].index for piece in row) for row in rows)
        return Batch(
            features=features,
            context_positions=positions,
            labels=label_ids,
            counted=counted,
            documents=names,
            tokens=tokens,
            without_anchors=empty,
            **small,
        )

    def _read(self, document: int, length: int) -> dict[str, Array]:
        return self.store.read_document(dataclasses.replace(self.documents[document], length=length))


@dataclass(frozen=True)
class StepRows:
    """One rank's share of one global batch: its place in the order and its micro-batches."""

    epoch: int
    batch: int
    parts: tuple[Batch, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which rows of every global batch this process takes, and how many per forward pass."""

    batch_rows: int
    rows_per_pass: int
    rank: int
    world_size: int


def total_steps(lengths: Sequence[int], config: TrainConfig) -> int:
    """Optimizer steps in config.epochs passes over documents of these lengths (each epoch packs differently)."""
    return sum(
        batches_in(epoch_rows(lengths, config.max_length, config.seed, epoch), config.batch_rows)
        for epoch in range(config.epochs)
    )


def stream(builder: BatchBuilder, share: Share, epoch: int, batch: int) -> Iterator[StepRows]:
    """This rank's rows from global batch `batch` of `epoch` on, for ever."""
    while True:
        rows = epoch_rows(builder.lengths(), builder.shapes.max_length, builder.seed, epoch)
        for number in range(batch, batches_in(rows, share.batch_rows)):
            mine = rank_rows(rows, number, share.batch_rows, share.rank, share.world_size)
            size = share.rows_per_pass
            parts = tuple(builder.build(mine[i : i + size], epoch) for i in range(0, len(mine), size))
            yield StepRows(epoch, number, parts)
        epoch, batch = epoch + 1, 0


class Prefetcher:
    """Runs an iterator in one thread, a few items ahead; its error surfaces at the next `next`."""

    def __init__(self, source: Iterator[StepRows], ahead: int = 2) -> None:
        self._items: queue.Queue[StepRows | BaseException] = queue.Queue(maxsize=ahead)
        self._source = source
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the next batch
            self._put(error)

    def _put(self, item: StepRows | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __next__(self) -> StepRows:
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread; it is gone when this returns."""
        self._closing.set()
        self._thread.join()
