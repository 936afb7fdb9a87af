"""Where blocks start and what they must predict. Pure numpy; called by data.py.

Anchor a is the last token the target has given; slot k of its block predicts token a + k (unshifted), slot 0 is
known. A document's anchors depend on (seed, epoch, document) only, never on the row it shares. Next: data.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stage2_train.packing import generator

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def eligible_anchors(loss_mask: np.ndarray[Any, Any]) -> Ints:
    """Positions a with a and a + 1 both supervised: the anchor is a token of the target, and slot 1 has a label."""
    mask = loss_mask.astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def apportion(eligible: Sequence[int], slots: int) -> list[int]:
    """Anchors for each document of a row, given how many positions each offers.

    One each first, so that a short answer beside a long one is not starved (the largest first when slots are short),
    then the rest in proportion to what is left, by largest remainder, ties to the earlier document. Never more than
    offered; the sum is min(slots, sum(eligible)).
    """
    offered = np.asarray(eligible, dtype=np.int64)
    if offered.sum() <= slots:
        return [int(count) for count in offered]
    first = np.zeros_like(offered)
    holders = np.flatnonzero(offered)
    first[holders[np.argsort(-offered[holders], kind="stable")][:slots]] = 1
    left = slots - int(first.sum())
    rest = offered - first
    if left == 0:
        return [int(count) for count in first]
    shares = rest * left  # kept whole: floats would break ties by rounding
    whole, remainder = np.divmod(shares, rest.sum())
    extra = np.zeros_like(whole)
    extra[np.argsort(-remainder, kind="stable")[: left - int(whole.sum())]] = 1
    return [int(count) for count in first + whole + extra]


def sample_anchors(eligible: Ints, count: int, seed: int, epoch: int, document: int) -> Ints:
    """`count` of the eligible positions without replacement, ascending.

    The draw is the start of one permutation of the document, so a smaller count gives a subset of a larger one.
    Ascending, because neighbouring blocks then share context tiles: about half the attention work.
    """
    drawn = generator(seed, 1, epoch, document).permutation(eligible)[:count]
    return np.sort(drawn)


def labels(
    input_ids: np.ndarray[Any, Any], loss_mask: np.ndarray[Any, Any], anchors: Ints, block_size: int
) -> tuple[Ints, Bools]:
    """Labels [A,B] (token a + k) and which count [A,B], for anchors [A] of one document.

    Slot 0 never counts. Slot k counts while a + k lies in the document and every token a+1 .. a+k is supervised: at
    the first unsupervised one the target had stopped, so what follows is a continuation it would never have produced.
    """
    length = len(input_ids)
    mask = loss_mask.astype(bool)
    # end[i]: the first unsupervised position at or after i (or the length).
    stops = np.where(mask, length, np.arange(length))
    end = np.minimum.accumulate(stops[::-1])[::-1]
    positions = anchors[:, None] + np.arange(block_size)
    inside = np.minimum(positions, length - 1)
    counts = positions < end[np.minimum(anchors + 1, length - 1)][:, None]
    counts &= (positions < length) & (np.arange(block_size) > 0)
    return input_ids[inside].astype(np.int64), counts
