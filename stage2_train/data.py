"""From the teacher store to batches: documents read, packed, cut into blocks with labels, prefetched by a thread.

Called by train.py and estimate.py. The thread reads files and copies only: compiled code and flex_attention belong to
the main thread. Next: objective.py (what happens to a batch).

Shapes: R rows, S = max_length tokens, N anchor slots, B slots, F taps, H target hidden, U blocks of a batch.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.documents import Documents
from shared.store import TeacherStore
from stage2_train.anchors import apportion, eligible_anchors, labels, sample_anchors
from stage2_train.packing import Piece, Row, batches_in, epoch_rows, rank_rows

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows ready to be trained on, in numpy. Unused slots have start = end = 0, count nothing, see only themselves."""

    tensors: dict[str, Tensor]
    """The memory of the arrays below, by their names: page-locked when a GPU is to copy from it."""
    features: Array
    """[R,S,F*H] uint16: bf16 bits of the target's residual streams, or int8 codes; 0 where a row is not full."""
    scales: Array | None = None
    """[R,S,F] float32: token scales of int8 codes; None for a bf16 store, like the two below."""
    channels: Array | None = None
    """[U,F*H] float32: channel scales of the blocks that the rows' documents come from."""
    blocks: Array | None = None
    """[R,S] int32: which row of `channels` a token's codes go with."""
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

    def finite_rows(self) -> list[bool]:
        """Whether each row's features are all finite numbers."""
        if self.scales is None or self.channels is None or self.blocks is None:
            # bf16 is not finite exactly when all eight exponent bits are set.
            return [bool(((row & 0x7F80) != 0x7F80).all()) for row in self.features]
        fine = np.asarray(np.isfinite(self.channels).all(axis=1))
        pairs = zip(self.scales, self.blocks, strict=True)
        return [bool(np.isfinite(scales).all() and fine[blocks].all()) for scales, blocks in pairs]


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes that never change during a run."""

    max_length: int
    anchors: int
    block_size: int
    feature_size: int


class BatchBuilder:
    """Turns packed rows into a Batch. The same rows, seed and epoch give the same batch in every process.

    `pinned` puts batches into page-locked memory, from which copies to a GPU are fast and wait for nobody; torch
    keeps and reuses it, and only after such a copy has ended. `readers` threads read documents of one batch side by
    side, each into its own place.
    """

    def __init__(
        self,
        store: TeacherStore,
        documents: Documents,
        shapes: Shapes,
        seed: int,
        *,
        pinned: bool = False,
        readers: int = 1,
    ) -> None:
        self.store = store
        self.documents = documents
        self.shapes = shapes
        self.seed = seed
        self.pinned = pinned
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="reader")
        self._taps = len(store.identity["target_layer_ids"])
        self._quantised = store.identity.get("precision") == "int8"

    def lengths(self) -> Array:
        """Tokens of every document, int32 [D]."""
        return self.documents.length

    def build(self, rows: Sequence[Row], epoch: int) -> Batch:
        """Read and lay out `rows`. Raises StoreDamaged naming what cannot be read."""
        tensors = self._allocate(len(rows))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        places = [{name: array[number] for name, array in arrays.items()} for number in range(len(rows))]
        blocks: dict[int, int] = {}
        reads = [
            [self._readers.submit(self._read, place, piece, self._number(blocks, piece)) for piece in row]
            for place, row in zip(places, rows, strict=True)
        ]
        empty = 0
        for place, row, documents in zip(places, rows, reads, strict=True):
            empty += self._fill(place, row, [document.result() for document in documents], epoch)
        if self._quantised:
            tensors["channels"] = self._channels(list(blocks))
            arrays["channels"] = tensors["channels"].numpy()
        return Batch(
            tensors=tensors,
            documents=tuple(tuple(self.documents[piece.document].index for piece in row) for row in rows),
            tokens=sum(piece.length for row in rows for piece in row),
            without_anchors=empty,
            **arrays,
        )

    def _allocate(self, count: int) -> dict[str, Tensor]:
        """All arrays of a batch but the channel scales: zeros, except for the features, which _fill writes in full."""
        shapes, tokens = self.shapes, (count, self.shapes.max_length)
        slots = (count, shapes.anchors)
        tensors = {
            "features": self._features((*tokens, shapes.feature_size)),
            "context_positions": torch.zeros(tokens, dtype=torch.int32, pin_memory=self.pinned),
            "labels": torch.zeros((*slots, shapes.block_size), dtype=torch.int64, pin_memory=self.pinned),
            "counted": torch.zeros((*slots, shapes.block_size), dtype=torch.bool, pin_memory=self.pinned),
        }
        for name in ("anchor_positions", "anchor_tokens", "start", "end"):
            tensors[name] = torch.zeros(slots, dtype=torch.int32, pin_memory=self.pinned)
        if self._quantised:
            tensors["scales"] = torch.zeros((*tokens, self._taps), dtype=torch.float32, pin_memory=self.pinned)
            tensors["blocks"] = torch.zeros(tokens, dtype=torch.int32, pin_memory=self.pinned)
        return tensors

    def _features(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for features; numpy's, which comes in huge pages and fills in half the time, if not page-locked."""
        if self.pinned:
            return torch.empty(shape, dtype=torch.int8 if self._quantised else torch.uint16, pin_memory=True)
        return torch.from_numpy(np.empty(shape, np.int8 if self._quantised else np.uint16))

    def _number(self, blocks: dict[int, int], piece: Piece) -> int:
        """The row of a document's block in the table of channel scales; new blocks are numbered as they come."""
        return blocks.setdefault(int(self.documents.block[piece.document]), len(blocks))

    def _fill(self, arrays: dict[str, Array], row: Row, read: Sequence[dict[str, Array]], epoch: int) -> int:
        """Lay out one row in its part of the arrays; returns how many of its documents offer no anchor."""
        eligible = [eligible_anchors(found["loss_mask"]) for found in read]
        shares = apportion([len(found) for found in eligible], self.shapes.anchors) if row else []
        slot = end = 0
        for piece, document, found, share in zip(row, read, eligible, shares, strict=True):
            end = piece.offset + piece.length
            arrays["context_positions"][piece.offset : end] = np.arange(piece.length)
            chosen = sample_anchors(found, share, self.seed, epoch, self.documents[piece.document].index)
            slots = slice(slot, slot + share)
            arrays["anchor_positions"][slots] = chosen
            arrays["anchor_tokens"][slots] = document["input_ids"][chosen]
            arrays["start"][slots] = piece.offset
            arrays["end"][slots] = piece.offset + chosen
            arrays["labels"][slots], arrays["counted"][slots] = labels(
                document["input_ids"], document["loss_mask"], chosen, self.shapes.block_size
            )
            slot += share
        arrays["features"][end:] = 0
        return sum(len(found) == 0 for found in eligible)

    def _read(self, arrays: dict[str, Array], piece: Piece, block: int) -> dict[str, Array]:
        """One document; its features go from the file straight into their place."""
        ref = dataclasses.replace(self.documents[piece.document], length=piece.length)
        where = slice(piece.offset, piece.offset + piece.length)
        features = arrays["features"][where].reshape(piece.length, self._taps, -1)
        if not self._quantised:
            out = {"hidden_states": features}
        else:
            arrays["blocks"][where] = block
            out = {"hidden_states_q": features, "hidden_states_scale": arrays["scales"][where]}
        return self.store.read_document(ref, ("input_ids", "loss_mask", *out), out)

    def _channels(self, blocks: Sequence[int]) -> Tensor:
        """float32 [U,F*H] of these blocks, in their order; a batch without a document has one row, of ones."""
        table = torch.ones((max(len(blocks), 1), self.shapes.feature_size), pin_memory=self.pinned)
        for row, block in zip(table.numpy(), blocks, strict=False):
            row[:] = self.store.read_block_array(block, "hidden_states_channel").reshape(-1)
        return table


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
