"""Packing: every document once, rows never overfull, ranks disjoint, order a pure function of (seed, epoch)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage2_train.packing import Piece, Row, batches_in, epoch_rows, generator, pack, rank_rows

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def slow_pack(sizes: Sequence[int], order: Sequence[int], longest: int) -> list[Row]:
    """Next-fit as one would say it: a document at a time."""
    rows: list[Row] = []
    current: list[Piece] = []
    used = 0
    for document in order:
        length = min(sizes[document], longest)
        if current and used + length > longest:
            rows.append(tuple(current))
            current, used = [], 0
        current.append(Piece(document, used, length))
        used += length
    return [*rows, tuple(current)] if current else rows


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 70), st.integers(0, 99), st.integers(0, 5))
def test_rows_are_those_of_the_slow_way(sizes: list[int], longest: int, seed: int, epoch: int) -> None:
    order = generator(seed, 0, epoch).permutation(len(sizes)).tolist()
    rows = epoch_rows(sizes, longest, seed, epoch)
    assert list(rows) == slow_pack(sizes, order, longest)
    assert list(pack(np.asarray(sizes, np.int32), order, longest)) == list(rows)


@given(lengths, st.integers(5, 50))
def test_rows_are_a_sequence_like_any_other(sizes: list[int], longest: int) -> None:
    rows = pack(sizes, range(len(sizes)), longest)
    plain = list(rows)
    assert len(plain) == len(rows)
    assert [rows[i - len(rows)] for i in range(len(rows))] == plain
    assert rows[1:-1:2] == plain[1:-1:2]
    assert rows[len(rows) :] == []
    for beyond in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[beyond]


def test_a_million_documents_are_packed_at_once() -> None:
    """0.3 s of processor time; the slow way takes four. The bound is loose: other processes slow a core down."""
    sizes = np.random.default_rng(0).integers(100, 4000, 1_000_000).astype(np.int32)
    started = time.process_time()
    rows = epoch_rows(sizes, 3072, 0, 0)
    assert time.process_time() - started < 2.0
    assert len(rows) > 500_000
    assert sum(len(row) for row in rows[:100]) == int(rows.starts[100])


@given(lengths, st.integers(5, 50), st.integers(0, 99), st.integers(0, 5))
def test_every_document_is_in_exactly_one_row_and_rows_are_full_at_most(
    sizes: list[int], longest: int, seed: int, epoch: int
) -> None:
    rows = epoch_rows(sizes, longest, seed, epoch)
    pieces = [piece for row in rows for piece in row]
    assert sorted(piece.document for piece in pieces) == list(range(len(sizes)))
    for row in rows:
        used = 0
        for piece in row:
            assert piece.offset == used  # without gaps
            assert piece.length == min(sizes[piece.document], longest)
            used += piece.length
        assert 0 < used <= longest


@given(lengths, st.integers(5, 50))
def test_next_fit_opens_a_row_only_when_the_next_document_does_not_fit(sizes: list[int], longest: int) -> None:
    rows = pack(sizes, range(len(sizes)), longest)
    for before, after in itertools.pairwise(rows):
        assert before[-1].offset + before[-1].length + after[0].length > longest


@given(lengths, st.integers(5, 50), st.integers(1, 4), st.integers(1, 4))
def test_ranks_share_every_batch_without_overlap_and_stay_in_step(
    sizes: list[int], longest: int, each: int, world: int
) -> None:
    rows = epoch_rows(sizes, longest, 0, 0)
    batch_rows = each * world
    seen = []
    for batch in range(batches_in(rows, batch_rows)):
        shares = [rank_rows(rows, batch, batch_rows, rank, world) for rank in range(world)]
        assert {len(share) for share in shares} == {each}
        seen += [row for share in shares for row in share if row]
    assert sorted(seen, key=str) == sorted(rows, key=str)
    assert batches_in(rows, batch_rows) == -(-len(rows) // batch_rows)


def test_two_ranks_take_the_rows_one_rank_takes() -> None:
    rows = epoch_rows(list(range(1, 30)), 31, 3, 1)
    for batch in range(batches_in(rows, 4)):
        alone = rank_rows(rows, batch, 4, 0, 1)
        assert [*rank_rows(rows, batch, 4, 0, 2), *rank_rows(rows, batch, 4, 1, 2)] == [*alone[0::2], *alone[1::2]]


def test_order_depends_on_seed_and_epoch_only() -> None:
    sizes = [5] * 40
    first = list(epoch_rows(sizes, 20, 1, 2))
    assert first == list(epoch_rows(sizes, 20, 1, 2))
    assert first != list(epoch_rows(sizes, 20, 1, 3))
    assert first != list(epoch_rows(sizes, 20, 2, 2))
