"""Batches from a real store: packing, labels, features, prefetching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_store import HIDDEN, MASK, Text, counting_text, counting_texts, make_store

from manifests.commit import files_of
from shared.errors import StoreDamaged, StoreIncomplete, StoreMissing
from shared.store_layout import block_name
from stage2_train.batch import Batch
from stage2_train.data import BatchBuilder, Prefetcher, Shapes, Share, StepRows, stream
from stage2_train.loss import Head
from stage2_train.objective import Engine, denominator, move
from stage2_train.objectives import Objective
from stage2_train.packing import epoch_rows
from stage2_train.selection import open_store, select

TAPS = 2


def a_builder(
    path: Path, *, max_length: int = 32, anchors: int = 6, split: str = "train", **objective: Any
) -> BatchBuilder:
    store = open_store(path)
    shapes = Shapes(
        max_length=max_length,
        anchors=anchors,
        block_size=4,
        feature_size=TAPS * HIDDEN,
        objective=Objective(block_size=4, **objective),
    )
    return BatchBuilder(store, select(store, split)[0], shapes, seed=5)


def an_engine(**objective: Any) -> Engine:
    return Engine(
        embed_tokens=torch.zeros(40, HIDDEN),
        head=Head(torch.zeros(40, HIDDEN)),
        objective=Objective(block_size=4, **objective),
        attention="sdpa",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "x.zarr", counting_texts(24), blocks=3)


def test_rows_hold_what_the_store_holds(store: Path) -> None:
    builder = a_builder(store)
    rows = epoch_rows(builder.lengths(), 32, 5, 0)
    batch = builder.build(rows, epoch=0)
    assert batch.tokens == sum(min(n, 32) for n in builder.lengths())
    for number, row in enumerate(rows):
        filled = 0
        for piece in row:
            ref = builder.documents[piece.document]
            arrays = builder.store.read_document(ref)
            where = slice(piece.offset, piece.offset + piece.length)
            np.testing.assert_array_equal(
                batch.features[number, where], arrays["hidden_states"][: piece.length].reshape(piece.length, -1)
            )
            assert batch.context_positions[number, where].tolist() == list(range(piece.length))
            filled += piece.length
        assert (batch.features[number, filled:] == 0).all()


def test_anchors_stand_in_their_document_and_labels_follow_them(store: Path) -> None:
    builder = a_builder(store)
    rows = epoch_rows(builder.lengths(), 32, 5, 0)
    batch = builder.build(rows, epoch=0)
    used = 0
    for number, row in enumerate(rows):
        texts = {piece.offset: (builder.store.read_document(builder.documents[piece.document]), piece) for piece in row}
        for slot in np.flatnonzero(batch.counted[number].any(axis=1)):
            arrays, piece = texts[int(batch.start[number, slot])]
            anchor = int(batch.anchor_positions[number, slot])
            assert batch.end[number, slot] == piece.offset + anchor
            assert batch.anchor_tokens[number, slot] == arrays["input_ids"][anchor]
            ids, mask = arrays["input_ids"][: piece.length], arrays["loss_mask"][: piece.length]
            assert mask[anchor]
            for k in range(1, 4):
                counts = anchor + k < piece.length and bool(mask[anchor + 1 : anchor + k + 1].all())
                assert batch.counted[number, slot, k] == counts
                if counts:
                    assert batch.labels[number, slot, k] == ids[anchor + k]
            used += 1
        starts = batch.start[number]
        assert (np.diff(batch.end[number][batch.counted[number].any(axis=1)]) > 0).all()  # sorted
        assert set(starts.tolist()) <= {piece.offset for piece in row} | {0}
    assert used > 0
    assert not batch.counted[:, :, 0].any()


def test_a_document_has_the_same_anchors_in_whatever_company(store: Path) -> None:
    builder = a_builder(store, anchors=64, max_length=64)
    rows = epoch_rows(builder.lengths(), 64, 5, 0)
    together = builder.build(rows, epoch=3)
    piece = rows[0][1]
    alone = builder.build((tuple([type(piece)(piece.document, 0, piece.length)]),), epoch=3)
    mine = (together.start[0] == piece.offset) & together.counted[0].any(axis=1)
    assert (
        together.anchor_positions[0][mine].tolist() == alone.anchor_positions[0][alone.counted[0].any(axis=1)].tolist()
    )


def test_empty_rows_and_documents_without_anchors_stay_in_step(tmp_path: Path) -> None:
    lonely = Text([1, 2, 3, 4], [1, 0, 1, 0])  # two supervised tokens, never two in a row
    builder = a_builder(make_store(tmp_path / "x.zarr", [lonely, counting_text(0, 1, 2, 9)]))
    rows = [*epoch_rows(builder.lengths(), 32, 5, 0), ()]
    batch = builder.build(rows, epoch=0)
    assert batch.without_anchors == 1
    assert not batch.counted[-1].any()
    assert batch.features.shape == (2, 32, TAPS * HIDDEN)
    only = builder.build(((),), epoch=0)
    assert denominator((only,), Objective(block_size=4)) == 0.0
    assert (only.end == 0).all()


def test_documents_longer_than_a_row_are_cut(tmp_path: Path) -> None:
    builder = a_builder(make_store(tmp_path / "x.zarr", [counting_text(0, 1, 2, 60)]))
    batch = builder.build(epoch_rows(builder.lengths(), 32, 5, 0), epoch=0)
    assert batch.tokens == 32
    positions = batch.anchor_positions[0][:, None] + np.arange(4)
    assert not batch.counted[0][positions >= 32].any()


@pytest.mark.parametrize("shift", [False, True])
def test_a_batch_holds_the_distribution_that_the_target_had_for_each_label(tmp_path: Path, shift: bool) -> None:
    path = make_store(tmp_path / "x.zarr", counting_texts(12), blocks=2, topk=5)
    slots = {"shift_labels": True, "slot_0": True} if shift else {}
    builder = a_builder(path, max_length=64, loss="mixed", **slots)
    rows = epoch_rows(builder.lengths(), 64, 5, 0)
    batch, ids_only = builder.build(rows, 0), a_builder(path, max_length=64, labels="teacher", **slots).build(rows, 0)
    assert batch.teacher_ids is not None
    assert batch.teacher_logits is not None
    assert batch.teacher_logsumexp is not None
    assert ids_only.teacher_ids is None
    np.testing.assert_array_equal(ids_only.counted, batch.counted)
    seen = differing = 0
    for number, row in enumerate(rows):
        for piece in row:
            stored = builder.store.read_document(
                builder.documents[piece.document], ("input_ids", "topk_ids", "topk_logits", "logsumexp")
            )
            mine = (batch.start[number] == piece.offset) & (batch.remaining[number] > 0)
            for slot, k in zip(*np.nonzero(batch.counted[number] & mine[:, None]), strict=True):
                at = batch.anchor_positions[number, slot] + k + shift
                where = (number, slot, k)
                assert batch.labels[where] == stored["input_ids"][at]
                np.testing.assert_array_equal(batch.teacher_ids[where], stored["topk_ids"][at - 1])
                np.testing.assert_array_equal(batch.teacher_logits[where], stored["topk_logits"][at - 1])
                assert batch.teacher_logsumexp[where] == stored["logsumexp"][at - 1]
                assert ids_only.labels[where] == stored["topk_ids"][at - 1, 0]
                seen += 1
                differing += ids_only.labels[where] != batch.labels[where]
    assert 0 < differing < seen


def test_distributions_reach_the_trained_slots_on_the_device(tmp_path: Path) -> None:
    path = make_store(tmp_path / "x.zarr", counting_texts(12), topk=5)
    builder = a_builder(path, loss="kl")
    batch = builder.build(epoch_rows(builder.lengths(), 32, 5, 0)[:2], 0)
    moved = move(batch, MASK, an_engine(loss="kl"))
    assert moved.targets.distributions is not None
    ids, logits, logsumexp = moved.targets.distributions
    assert batch.teacher_ids is not None
    assert batch.teacher_logits is not None
    assert batch.teacher_logsumexp is not None
    np.testing.assert_array_equal(ids.numpy(), batch.teacher_ids[:, :, 1:].reshape(12, 3, 5))
    want = (batch.teacher_logits[:, :, 1:].astype(np.uint32) << 16).view(np.float32).reshape(12, 3, 5)
    np.testing.assert_array_equal(logits.float().numpy(), want)
    np.testing.assert_array_equal(logsumexp.numpy(), batch.teacher_logsumexp[:, :, 1:].reshape(12, 3))


def test_following_gives_every_anchor_once_and_says_where_its_answer_ends(tmp_path: Path) -> None:
    two_answers = Text(list(range(20)), [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0])
    builder = a_builder(make_store(tmp_path / "x.zarr", [two_answers, counting_text(0, 1, 2, 9)]))
    rows = epoch_rows(builder.lengths(), 32, 5, 0)
    found: dict[int, list[tuple[int, int]]] = {}
    features = []
    for batch in builder.follow(rows, 4):
        for row, slot in zip(*np.nonzero(batch.remaining), strict=True):
            facts = (int(batch.anchor_positions[row, slot]), int(batch.remaining[row, slot]))
            found.setdefault(int(batch.start[row, slot]), []).append(facts)
        features.append(batch.features)
    short = [(a, 10 - a) for a in range(2, 10)]
    long = [(a, 5 - a) for a in range(2, 5)] + [(a, 16 - a) for a in range(9, 16)]
    assert sorted(found.values(), key=len) == [short, long]
    assert all(part is features[0] or np.shares_memory(part, features[0]) for part in features)  # read once


def test_coverage_is_counted_over_the_documents_of_a_batch(store: Path) -> None:
    builder = a_builder(store, anchors=3)
    rows = epoch_rows(builder.lengths(), 32, 5, 0)
    batch, all_of_them = builder.build(rows, 0), a_builder(store, anchors=64).build(rows, 0)
    assert 0 < batch.covered < batch.coverable
    assert all_of_them.covered == all_of_them.coverable == batch.coverable
    assert builder.build(((),), 0).coverable == 0


def test_selection_keeps_splits_apart_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    texts = [counting_text(0, 1, 2, 9), Text([1, 2, 3], [0, 0, 1]), counting_text(1, 1, 2, 9, "heldout")]
    store = open_store(make_store(tmp_path / "x.zarr", texts))
    train, left_out = select(store, "train")
    assert ([ref.index for ref in train], left_out) == ([0], 1)
    assert [ref.index for ref in select(store, "heldout")[0]] == [2]


def test_the_order_of_documents_does_not_depend_on_the_blocks(tmp_path: Path) -> None:
    texts = counting_texts(10)
    one, three = (a_builder(make_store(tmp_path / f"{n}.zarr", texts, blocks=n)) for n in (1, 3))
    rows = epoch_rows(one.lengths(), 32, 5, 0)
    for name in ("features", "labels", "counted", "start", "end"):
        np.testing.assert_array_equal(getattr(one.build(rows, 0), name), getattr(three.build(rows, 0), name))


def test_unfinished_and_missing_stores_are_refused(store: Path) -> None:
    with pytest.raises(StoreMissing):
        open_store(store.parent / "nothing.zarr")
    ledger = files_of(store, "shards")[0]
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(StoreIncomplete, match="2 of 3"):
        open_store(store)


def test_the_stream_goes_on_where_it_is_told_to(store: Path) -> None:
    builder = a_builder(store)
    share = Share(batch_rows=4, rows_per_pass=2, rank=0, world_size=1)
    source = stream(builder, share, 0, 0)
    first = [next(source) for _ in range(9)]
    assert {len(item.parts) for item in first} == {2}
    assert first[-1].epoch > 0
    for at in (3, 7):
        item = next(stream(builder, share, first[at].epoch, first[at].batch))
        for got, want in zip(item.parts, first[at].parts, strict=True):
            np.testing.assert_array_equal(got.labels, want.labels)
            np.testing.assert_array_equal(got.features, want.features)


def test_two_ranks_read_different_rows_of_the_same_batch(store: Path) -> None:
    builder = a_builder(store)
    shares = [Share(batch_rows=4, rows_per_pass=2, rank=rank, world_size=2) for rank in range(2)]
    parts = [next(stream(builder, share, 0, 0)).parts for share in shares]
    alone = next(stream(builder, Share(batch_rows=4, rows_per_pass=4, rank=0, world_size=1), 0, 0)).parts[0]
    for rank in range(2):
        assert parts[rank][0].documents == alone.documents[rank::2]
        np.testing.assert_array_equal(parts[rank][0].labels, alone.labels[rank::2])


def test_the_prefetcher_hands_over_errors_and_ends(store: Path) -> None:
    def failing() -> Iterator[StepRows]:
        yield StepRows(0, 0, ())
        raise StoreDamaged("block 3")

    prefetcher = Prefetcher(failing())
    assert next(prefetcher).batch == 0
    with pytest.raises(StoreDamaged, match="block 3"):
        next(prefetcher)
    prefetcher.close()
    endless = Prefetcher(stream(a_builder(store), Share(batch_rows=2, rows_per_pass=2, rank=0, world_size=1), 0, 0))
    next(endless)
    endless.close()
    assert not endless._thread.is_alive()


def test_a_damaged_block_is_named(store: Path) -> None:
    for path in (store / block_name(1) / "hidden_states").rglob("*"):
        if path.is_file() and path.name != "zarr.json":
            path.write_bytes(path.read_bytes()[:-5])
    builder = a_builder(store)
    with pytest.raises(StoreDamaged, match="block 1"):
        builder.build(epoch_rows(builder.lengths(), 32, 5, 0), 0)


def test_features_arrive_on_the_device_as_the_numbers_they_were(store: Path) -> None:
    builder = a_builder(store)
    batch: Batch = builder.build(epoch_rows(builder.lengths(), 32, 5, 0)[:2], 0)
    moved = move(batch, MASK, an_engine())
    assert moved.features.dtype == torch.float32
    want = torch.from_numpy(batch.features.astype(np.int32) << 16).view(torch.float32)
    assert torch.equal(moved.features, want)
    ids = moved.block_ids.view(2, 6, 4)
    assert (ids[:, :, 1:] == MASK).all()
    np.testing.assert_array_equal(ids[:, :, 0].numpy(), batch.anchor_tokens)
    np.testing.assert_array_equal(
        moved.block_positions.view(2, 6, 4).numpy(), batch.anchor_positions[:, :, None] + np.arange(4)
    )
