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


def spread_anchors(eligible: Sequence[Ints], documents: Sequence[int], slots: int, seed: int, epoch: int) -> list[Ints]:
    """Anchors for training: `slots` of a row apportioned to its documents, drawn from all over each of them."""
    shares = apportion([len(found) for found in eligible], slots) if eligible else []
    return [
        sample_anchors(found, share, seed, epoch, document)
        for found, share, document in zip(eligible, shares, documents, strict=True)
    ]


def some_anchors(eligible: Sequence[Ints], documents: Sequence[int], first: int, slots: int) -> list[Ints]:
    """Of all eligible positions of a row's documents, counted through, those numbered first .. first + slots - 1."""
    drawn, before = [], 0
    for found in eligible:
        drawn.append(found[max(0, first - before) : max(0, first + slots - before)])
        before += len(found)
    return drawn


def labels(
    input_ids: np.ndarray[Any, Any],
    loss_mask: np.ndarray[Any, Any],
    anchors: Ints,
    block_size: int,
    *,
    shift: bool = False,
    slot_0: bool = False,
) -> tuple[Ints, Bools]:
    """Labels [A,B] and which count [A,B], for anchors [A] of one document.

    The label of slot k is the token a + k, or a + k + 1 with `shift`. A slot counts while its label lies in the
    document and every token from a + 1 up to it is supervised: at the first unsupervised one the target had stopped,
    so what follows is a continuation it would never have produced. Slot 0 counts only with `slot_0`; unshifted its
    label is the anchor itself, which the document's first token cannot be: no distribution was stored for it.
    """
    length = len(input_ids)
    positions = anchors[:, None] + np.arange(block_size) + shift
    inside = np.minimum(positions, length - 1)
    counts = positions < run_ends(loss_mask, anchors)[:, None]
    counts &= (positions > 0) & (np.arange(block_size) >= (0 if slot_0 else 1))
    return input_ids[inside].astype(np.int64), counts


def run_ends(loss_mask: np.ndarray[Any, Any], anchors: Ints) -> Ints:
    """For each anchor the first position after it that is not supervised (or the document's length), int64 [A]."""
    length = len(loss_mask)
    # ends[i]: the first unsupervised position at or after i.
    stops = np.where(loss_mask.astype(bool), length, np.arange(length))
    ends = np.minimum.accumulate(stops[::-1])[::-1]
    return np.asarray(ends[np.minimum(anchors + 1, length - 1)], dtype=np.int64)


def coverage(loss_mask: np.ndarray[Any, Any], anchors: Ints, reach: int) -> tuple[int, int]:
    """(supervised tokens that are the label of at least one block, those that some anchor would give a label).

    `anchors` ascending; a block labels up to `reach` tokens after its anchor.
    """
    possible = len(eligible_anchors(loss_mask))
    if len(anchors) == 0:
        return 0, possible
    stop = np.minimum(anchors + 1 + reach, run_ends(loss_mask, anchors))
    fresh = np.maximum(anchors[1:] + 1, stop[:-1])
    return int(stop[0] - anchors[0] - 1 + np.maximum(stop[1:] - fresh, 0).sum()), possible
