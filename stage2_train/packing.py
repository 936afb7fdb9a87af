"""Documents to rows of one length, rows to global batches: a pure function of (seed, epoch).

Called by data.py. Every rank computes the same plan and takes its own rows, so nothing is ever communicated about
order, and a resumed run needs only (epoch, batch). Next: anchors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Piece:
    """One document in a row: number in the caller's list, row index of its first token, tokens kept."""

    document: int
    offset: int
    length: int


Row = tuple[Piece, ...]


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Independent random numbers for (seed, stream...); Philox is specified, so all machines draw the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *stream])))


def pack(lengths: Sequence[int], order: Sequence[int], max_length: int) -> list[Row]:
    """Next-fit: documents in `order` fill a row until one does not fit; longer ones are cut to `max_length`.

    Every document appears exactly once. Next-fit keeps the shuffled order; best-fit would sort long documents first.
    """
    rows: list[Row] = []
    current: list[Piece] = []
    used = 0
    for document in order:
        length = min(int(lengths[document]), max_length)
        if current and used + length > max_length:
            rows.append(tuple(current))
            current, used = [], 0
        current.append(Piece(int(document), used, length))
        used += length
    if current:
        rows.append(tuple(current))
    return rows


def epoch_rows(lengths: Sequence[int], max_length: int, seed: int, epoch: int) -> list[Row]:
    """All rows of an epoch: the documents in the epoch's own random order, packed."""
    order = generator(seed, 0, epoch).permutation(len(lengths))
    return pack(lengths, order.tolist(), max_length)


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
