"""Anchors and labels against their definitions, written as loops."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stage2_train.anchors import (
    apportion,
    coverage,
    eligible_anchors,
    labels,
    run_ends,
    sample_anchors,
    some_anchors,
    spread_anchors,
)

masks = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda bits: np.asarray(bits, np.uint8))


@given(masks)
def test_an_anchor_and_its_first_label_are_supervised(mask: np.ndarray) -> None:
    want = [a for a in range(len(mask)) if mask[a] and a + 1 < len(mask) and mask[a + 1]]
    assert eligible_anchors(mask).tolist() == want


@given(masks, st.integers(2, 9), st.booleans(), st.booleans())
def test_labels_are_the_tokens_from_the_anchor_on_up_to_the_first_unsupervised_one(
    mask: np.ndarray, size: int, shift: bool, slot_0: bool
) -> None:
    ids = np.arange(100, 100 + len(mask), dtype=np.int32)
    anchors = eligible_anchors(mask)
    found, counted = labels(ids, mask, anchors, size, shift=shift, slot_0=slot_0)
    assert found.shape == counted.shape == (len(anchors), size)
    for row, anchor in enumerate(anchors):
        for slot in range(size):
            at = anchor + slot + shift
            going = at < len(mask) and bool(mask[anchor : at + 1].all())
            if slot == 0:  # unshifted it is the anchor: known, and never predicted at the very first token
                going = going and slot_0 and at > 0
            assert counted[row, slot] == going
            if going:
                assert found[row, slot] == 100 + at
        assert counted[row, 1 - shift] or (shift and not slot_0)  # an eligible anchor always has its first label


@given(masks)
def test_an_answer_ends_at_its_first_unsupervised_token(mask: np.ndarray) -> None:
    anchors = eligible_anchors(mask)
    for anchor, end in zip(anchors, run_ends(mask, anchors), strict=True):
        assert mask[anchor:end].all()
        assert end == len(mask) or not mask[end]


@given(masks, st.integers(0, 20), st.integers(1, 9), st.integers(0, 5))
def test_coverage_counts_tokens_that_are_a_label(mask: np.ndarray, count: int, reach: int, seed: int) -> None:
    eligible = eligible_anchors(mask)
    anchors = sample_anchors(eligible, min(count, len(eligible)), seed, 0, 0)
    found, counted = labels(np.arange(len(mask)), mask, anchors, reach + 1)
    possible, used = labels(np.arange(len(mask)), mask, eligible, reach + 1)
    assert coverage(mask, anchors, reach) == (len(set(found[counted])), len(set(possible[used])))


@given(st.lists(masks, max_size=5), st.integers(1, 60))
def test_slices_of_a_row_are_all_its_anchors_once(row: list[np.ndarray], slots: int) -> None:
    eligible = [eligible_anchors(mask) for mask in row]
    total = sum(map(len, eligible))
    slices = [some_anchors(eligible, range(len(row)), first, slots) for first in range(0, total, slots)]
    assert all(sum(map(len, part)) == slots for part in slices[:-1])
    for number, found in enumerate(eligible):
        assert np.concatenate([found[:0], *(part[number] for part in slices)]).tolist() == found.tolist()


def test_training_anchors_are_spread_as_apportioned() -> None:
    eligible = [np.arange(100), np.arange(0), np.arange(300)]
    found = spread_anchors(eligible, [7, 8, 9], 40, 1, 2)
    assert [len(chosen) for chosen in found] == [10, 0, 30]
    assert found[2].tolist() == sample_anchors(eligible[2], 30, 1, 2, 9).tolist()
    assert spread_anchors([], [], 40, 1, 2) == []


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 200))
def test_slots_are_used_up_and_nobody_is_starved(offered: list[int], slots: int) -> None:
    shares = apportion(offered, slots)
    assert sum(shares) == min(slots, sum(offered))
    assert all(0 <= share <= have for share, have in zip(shares, offered, strict=True))
    holders = [share for share, have in zip(shares, offered, strict=True) if have]
    if slots >= len(holders):
        assert all(share >= 1 for share in holders)
    # More to offer never means fewer slots.
    ranked = sorted(zip(offered, shares, strict=True))
    assert all(a[1] <= b[1] + (a[0] == b[0]) for a, b in itertools.pairwise(ranked))


def test_shares_are_in_proportion() -> None:
    assert apportion([100, 300], 40) == [10, 30]
    assert apportion([1, 399], 40) == [1, 39]
    assert apportion([5, 5, 5], 2) == [1, 1, 0]
    assert apportion([0, 3], 2) == [0, 2]


@given(masks, st.integers(0, 20), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_anchors_are_sorted_distinct_eligible_and_nested(
    mask: np.ndarray, count: int, seed: int, epoch: int, document: int
) -> None:
    eligible = eligible_anchors(mask)
    count = min(count, len(eligible))
    drawn = sample_anchors(eligible, count, seed, epoch, document)
    assert len(drawn) == count
    assert (np.diff(drawn) > 0).all()
    assert set(drawn) <= set(eligible)
    assert set(drawn) <= set(sample_anchors(eligible, len(eligible), seed, epoch, document))
    if count:
        assert set(sample_anchors(eligible, count - 1, seed, epoch, document)) <= set(drawn)


def test_anchors_change_with_seed_epoch_and_document_and_cover_evenly() -> None:
    eligible = np.arange(50)
    draws = {tuple(sample_anchors(eligible, 10, *key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(draws) == 4
    hits = np.zeros(50)
    for epoch in range(400):
        hits[sample_anchors(eligible, 10, 0, epoch, 0)] += 1
    assert hits.min() > 40  # 80 expected, 4.5 sigma
    assert hits.max() < 120
