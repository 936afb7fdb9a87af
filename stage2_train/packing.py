"""Documents to rows of one length, rows to global batches: a pure function of (seed, epoch).

Called by data.py. Every rank computes the same plan and takes its own rows, so nothing is ever communicated about
order, and a resumed run needs only (epoch, batch). Next: anchors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Piece:
    """One document in a row: number in the caller's list, row index of its first token, tokens kept."""

    document: int
    offset: int
    length: int


Row = tuple[Piece, ...]


class Rows(Sequence[Row]):
    """All rows of an epoch as columns; a row becomes pieces when it is asked for. A million documents take 20 MB.

    documents, lengths: int64 [D], the documents in their order and the tokens kept of each. starts: int64 [R + 1], row
    r holds documents [starts[r], starts[r + 1]).
    """

    def __init__(self, documents: Ints, lengths: Ints, starts: Ints) -> None:
        self.documents, self.lengths, self.starts = documents, lengths, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        row = range(len(self))[row]  # negative numbers count from the end, others beyond it are an IndexError
        pieces, offset = [], 0
        here = slice(self.starts[row], self.starts[row + 1])
        for document, length in zip(self.documents[here].tolist(), self.lengths[here].tolist(), strict=True):
            pieces.append(Piece(document, offset, length))
            offset += length
        return tuple(pieces)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Independent random numbers for (seed, stream...); Philox is specified, so all machines draw the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *stream])))


def pack(lengths: Sequence[int] | Ints, order: Sequence[int] | Ints, max_length: int) -> Rows:
    """Next-fit: documents in `order` fill a row until one does not fit; longer ones are cut to `max_length`.

    Every document appears exactly once. Next-fit keeps the shuffled order; best-fit would sort long documents first.
    """
    documents = np.asarray(order, dtype=np.int64)
    kept = np.minimum(np.asarray(lengths, dtype=np.int64)[documents], max_length)
    ends = np.concatenate([[0], np.cumsum(kept)])
    # Where the row would end if one began at this document: found for all at once, then followed from row to row.
    following = (np.searchsorted(ends, ends[:-1] + max_length, side="right") - 1).tolist()
    starts = [0]
    while starts[-1] < len(documents):
        starts.append(following[starts[-1]])
    return Rows(documents, kept, np.asarray(starts, dtype=np.int64))


def epoch_rows(lengths: Sequence[int] | Ints, max_length: int, seed: int, epoch: int) -> Rows:
    """All rows of an epoch: the documents in the epoch's own random order, packed."""
    return pack(lengths, generator(seed, 0, epoch).permutation(len(lengths)), max_length)


def batches_in(rows: Sequence[Row], batch_rows: int) -> int:
    """Global batches of an epoch; the last one may be ragged."""
    return -(-len(rows) // batch_rows)


def rank_rows(rows: Sequence[Row], batch: int, batch_rows: int, rank: int, world_size: int) -> list[Row]:
    """The rows that `rank` takes of global batch `batch`: r::W, empty rows where a ragged last batch has none.

    All ranks get batch_rows / world_size rows, so that shapes and step counts never differ between them.
    """
    chosen = list(rows[batch * batch_rows : (batch + 1) * batch_rows])
    chosen += [()] * (batch_rows - len(chosen))
    return chosen[rank::world_size]
