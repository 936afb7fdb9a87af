"""From the teacher store to batches: documents read, packed, cut into blocks with labels, prefetched by a thread.

Called by train.py and estimate.py. The thread reads files and copies only: compiled code and flex_attention belong to
the main thread. Next: objective.py (what happens to a batch).

Shapes: R rows, S = max_length tokens, N anchor slots, B slots, F taps, H target hidden, K top logits, U store blocks
of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from shared.documents import Documents
from shared.store import TeacherStore
from stage2_train.anchors import eligible_anchors, some_anchors, spread_anchors
from stage2_train.batch import Array, Batch
from stage2_train.block_layout import BlockLayout
from stage2_train.objectives import Objective
from stage2_train.packing import Piece, Row, batches_in, epoch_rows, rank_rows

Draw = Callable[[Sequence[Array], Sequence[int]], list[Array]]


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes that never change during a run, and what the blocks are to learn (by default: Objective's defaults)."""

    max_length: int
    anchors: int
    block_size: int
    feature_size: int
    objective: Objective | None = None

    def goal(self) -> Objective:
        """The objective that was given, or the default one."""
        return self.objective or Objective(block_size=self.block_size)


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
        self.documents_read = 0
        """By training and estimates together: what moves while the loop waits for a slow store."""
        self.tick: Callable[[], None] = lambda: None
        """Called for every document that has been read."""
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="reader")
        self._taps = len(store.identity["target_layer_ids"])
        self._quantised = store.identity.get("precision") == "int8"
        self._blocks = BlockLayout(
            anchors=shapes.anchors,
            objective=shapes.goal(),
            topk=int(store.identity.get("topk") or 0),
            pinned=pinned,
        )

    def lengths(self) -> Array:
        """Tokens of every document, int32 [D]."""
        return self.documents.length

    def build(self, rows: Sequence[Row], epoch: int) -> Batch:
        """Read and lay out `rows`, with anchors for training. Raises StoreDamaged naming what cannot be read."""
        draw = functools.partial(spread_anchors, slots=self.shapes.anchors, seed=self.seed, epoch=epoch)
        return self._with_blocks(rows, *self._context(rows), draw)

    def follow(self, rows: Sequence[Row], batches: int) -> Iterator[Batch]:
        """Read `rows` once and give `batches` batches of them, which together have every possible anchor in order."""
        context = self._context(rows)
        for number in range(batches):
            draw = functools.partial(some_anchors, first=number * self.shapes.anchors, slots=self.shapes.anchors)
            yield self._with_blocks(rows, *context, draw)

    def _context(self, rows: Sequence[Row]) -> tuple[dict[str, Tensor], list[list[dict[str, Array]]]]:
        """What does not depend on the anchors, and the arrays of each row's documents that blocks are made from."""
        tensors = self._allocate(len(rows))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        places = [{name: array[number] for name, array in arrays.items()} for number in range(len(rows))]
        blocks: dict[int, int] = {}
        reads = [
            [self._readers.submit(self._read, place, piece, self._number(blocks, piece)) for piece in row]
            for place, row in zip(places, rows, strict=True)
        ]
        for place, row in zip(places, rows, strict=True):
            for piece in row:
                place["context_positions"][piece.offset : piece.offset + piece.length] = np.arange(piece.length)
            place["features"][sum(piece.length for piece in row) :] = 0
        documents = [[self._finished(document) for document in row] for row in reads]
        if self._quantised:
            tensors["channels"] = self._channels(list(blocks))
        return tensors, documents

    def _finished(self, document: Future[dict[str, Array]]) -> dict[str, Array]:
        arrays = document.result()
        self.documents_read += 1
        self.tick()
        return arrays

    def _with_blocks(
        self, rows: Sequence[Row], context: dict[str, Tensor], read: list[list[dict[str, Array]]], draw: Draw
    ) -> Batch:
        tensors = context | self._blocks.allocate(len(rows))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        covered, coverable, empty = 0, 0, 0
        names = tuple(tuple(self.documents[piece.document].index for piece in row) for row in rows)
        for number, (row, documents) in enumerate(zip(rows, read, strict=True)):
            eligible = [eligible_anchors(document["loss_mask"]) for document in documents]
            place = {name: arrays[name][number] for name in arrays if name != "channels"}
            found, possible = self._blocks.fill(place, row, documents, draw(eligible, names[number]))
            covered, coverable = covered + found, coverable + possible
            empty += sum(len(anchors) == 0 for anchors in eligible)
        return Batch(
            tensors=tensors,
            documents=names,
            tokens=sum(piece.length for row in rows for piece in row),
            without_anchors=empty,
            covered=covered,
            coverable=coverable,
            **arrays,
        )

    def _allocate(self, count: int) -> dict[str, Tensor]:
        """What the rows' documents fill: zeros, except for the features, which _context writes in full."""
        tokens = (count, self.shapes.max_length)
        tensors = {
            "features": self._features((*tokens, self.shapes.feature_size)),
            "context_positions": torch.zeros(tokens, dtype=torch.int32, pin_memory=self.pinned),
        }
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
        return self.store.read_document(ref, (*self._blocks.stored(), *out), out)

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

    def placed(self) -> Iterator[Batch]:
        """The micro-batches in order, each where the step runs; once (device_feed.py copies meanwhile)."""
        return iter(self.parts)


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


Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Runs an iterator in one thread, a few items ahead; its error surfaces at the next `next`.

    `waiting` is called ten times a second while a `next` waits.
    """

    def __init__(self, source: Iterator[Item], ahead: int = 2, waiting: Callable[[], None] = lambda: None) -> None:
        self._items: queue.Queue[Item | BaseException] = queue.Queue(maxsize=ahead)
        self._source = source
        self._waiting = waiting
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

    def _put(self, item: Item | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __next__(self) -> Item:
        while True:
            try:
                item = self._items.get(timeout=0.1)
            except queue.Empty:
                if self._closing.is_set():  # so that a thread that waits here ends too
                    raise RuntimeError("closed while waiting for the next item") from None
                self._waiting()
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self) -> None:
        """Stop the thread; it is gone when this returns."""
        self._closing.set()
        self._thread.join()
