"""What training reads: a pure function of (seed, epoch, step, world size), whoever reads or writes beside it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_store import HIDDEN, counting_texts, make_store

from manifests.blocks import open_store
from shared.documents import Documents, write_index
from shared.store import TeacherStore
from stage2_train.config import TrainConfig
from stage2_train.data import BatchBuilder, Prefetcher, Shapes, Share, StepRows, stream
from stage2_train.packing import batches_in, epoch_rows, rank_rows
from stage2_train.selection import select, total_steps

ROWS = 8
WORLDS = (1, 2, 4, 8)
ARRAYS = ("features", "context_positions", "anchor_positions", "anchor_tokens", "start", "end", "labels", "counted")
# The store is only read, so examples may share it.
shared_store = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TeacherStore:
    return open_store(make_store(tmp_path_factory.mktemp("reader") / "x.zarr", counting_texts(48), blocks=5))


def a_builder(store: TeacherStore, seed: int = 0, max_length: int = 48) -> BatchBuilder:
    shapes = Shapes(max_length=max_length, anchors=6, block_size=4, feature_size=2 * HIDDEN)
    return BatchBuilder(store, select(store, "train")[0], shapes, seed)


def share(rank: int, world: int, per_pass: int | None = None) -> Share:
    return Share(batch_rows=ROWS, rows_per_pass=per_pass or ROWS // world, rank=rank, world_size=world)


def rows_of(step: StepRows) -> list[tuple[int, ...]]:
    """Documents of each row of one rank's step, in order."""
    return [documents for part in step.parts for documents in part.documents]


def values_of(step: StepRows) -> dict[str, Any]:
    return {name: np.concatenate([getattr(part, name) for part in step.parts]) for name in ARRAYS}


def steps_of(builder: BatchBuilder, world: int, epoch: int, batch: int, count: int) -> list[list[StepRows]]:
    """`count` steps of all ranks from a place in the order on."""
    ranks = [stream(builder, share(rank, world), epoch, batch) for rank in range(world)]
    return [[next(source) for source in ranks] for _ in range(count)]


@shared_store
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 5), max_length=st.integers(41, 90))
def test_every_world_size_reads_the_same_global_batches(
    store: TeacherStore, seed: int, epoch: int, max_length: int
) -> None:
    builder = a_builder(store, seed, max_length)
    rows = epoch_rows(builder.lengths(), max_length, seed, epoch)
    for batch in range(batches_in(rows, ROWS)):
        alone = rank_rows(rows, batch, ROWS, 0, 1)
        for world in WORLDS:
            shares = [rank_rows(rows, batch, ROWS, rank, world) for rank in range(world)]
            assert [shares[i % world][i // world] for i in range(ROWS)] == alone
            # Disjoint: a document is in one row, and no row is two ranks'.
            documents = Counter(piece.document for part in shares for row in part for piece in row)
            assert set(documents.values()) <= {1}
            assert documents.total() == sum(len(row) for row in alone)


@pytest.mark.parametrize("world", WORLDS)
def test_not_only_the_rows_but_every_value_of_them(store: TeacherStore, world: int) -> None:
    builder = a_builder(store, seed=11)
    alone = steps_of(builder, 1, 0, 0, 6)
    ranks = steps_of(a_builder(store, seed=11), world, 0, 0, 6)
    for (one,), several in zip(alone, ranks, strict=True):
        assert {(step.epoch, step.batch) for step in several} == {(one.epoch, one.batch)}
        for i in range(ROWS):
            assert rows_of(several[i % world])[i // world] == rows_of(one)[i]
            for name, values in values_of(several[i % world]).items():
                np.testing.assert_array_equal(values[i // world], values_of(one)[name][i], err_msg=name)


@shared_store
@given(
    seed=st.integers(0, 99),
    max_length=st.integers(41, 60),
    legs=st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(1, 3)), min_size=1, max_size=6),
    last=st.sampled_from(WORLDS),
)
def test_another_world_size_goes_on_with_exactly_the_rows_not_yet_seen(
    store: TeacherStore, seed: int, max_length: int, legs: list[tuple[int, int]], last: int
) -> None:
    """Train some steps with W1 processes, stop, go on with W2, ...: every epoch holds every document once."""
    builder = a_builder(store, seed, max_length)
    seen: dict[int, Counter[int]] = {}
    order: list[tuple[int, int]] = []
    epoch = batch = 0

    def take(world: int, count: int) -> None:
        nonlocal epoch, batch
        for several in steps_of(builder, world, epoch, batch, count):
            first = several[0]
            order.append((first.epoch, first.batch))
            counts = seen.setdefault(first.epoch, Counter())
            for step in several:
                for documents in rows_of(step):
                    counts.update(documents)
            epoch, batch = first.epoch, first.batch + 1  # what a checkpoint keeps (step.py)

    for world, count in legs:
        take(world, count)
    stopped = epoch
    while epoch == stopped:  # to the end of the epoch it was stopped in, and one step into the next
        take(last, 1)
    everything = set(builder.documents.index.tolist())
    for number in range(stopped + 1):
        assert set(seen[number]) == everything
        assert set(seen[number].values()) == {1}
    assert set(seen[stopped + 1].values()) == {1}
    assert order == sorted(set(order))


def test_each_epoch_has_another_order_and_each_seed_too(store: TeacherStore) -> None:
    lengths = a_builder(store).lengths()
    orders = [
        tuple(piece.document for row in epoch_rows(lengths, 48, seed, epoch) for piece in row)
        for seed, epoch in itertools.product(range(3), range(3))
    ]
    assert len(set(orders)) == 9


def same_steps(first: list[StepRows], second: list[StepRows]) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one.epoch, one.batch, rows_of(one)) == (other.epoch, other.batch, rows_of(other))
        for name, values in values_of(one).items():
            np.testing.assert_array_equal(values, values_of(other)[name], err_msg=name)


@pytest.mark.parametrize("ahead", [1, 2, 7])
@pytest.mark.parametrize("per_pass", [1, 2, 4])
def test_prefetch_depth_and_passes_change_nothing(store: TeacherStore, ahead: int, per_pass: int) -> None:
    plain = stream(a_builder(store), share(1, 2), 0, 0)
    wanted = [next(plain) for _ in range(12)]
    batches = Prefetcher(stream(a_builder(store), share(1, 2, per_pass), 0, 0), ahead)
    try:
        found = []
        for number in range(12):
            if number == 3:
                time.sleep(0.05)  # a slow step: the thread fills its queue meanwhile
            found.append(next(batches))
    finally:
        batches.close()
    same_steps(found, wanted)


def test_several_readers_of_one_store_change_nothing(tmp_path: Path, store: TeacherStore) -> None:
    """Six threads on one opened store, each somewhere else in the order, and torch with one or two threads."""
    plain = stream(a_builder(store), share(0, 1), 0, 0)
    wanted = [next(plain) for _ in range(8)]
    fresh = open_store(store.location)  # nothing of it is read yet: the threads meet in every first access
    found: dict[int, list[StepRows]] = {}
    errors: list[BaseException] = []

    def read_all(number: int) -> None:
        try:
            source = stream(a_builder(fresh), share(0, 1), 0, 0)
            found[number] = [next(source) for _ in range(8)]
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = [threading.Thread(target=read_all, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert errors == []
    for number in range(6):
        same_steps(found[number], wanted)


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> TeacherStore:
    """A store whose documents' cache lists a million of them: what opening, choosing and ordering have to do with."""
    path = make_store(tmp_path_factory.mktemp("million") / "x.zarr", counting_texts(4))
    opened = open_store(path)
    rng = np.random.default_rng(0)
    count = 1_000_000
    lengths = rng.integers(50, 4000, count)
    columns = {
        "index": rng.permutation(count),
        "block": np.arange(count) // 20,
        "start": np.zeros(count, np.int64),
        "length": lengths,
        "n_supervised": np.minimum(lengths, rng.integers(0, 900, count)),
        "heldout": rng.random(count) < 0.05,
    }
    write_index(path, opened.snapshot, Documents(columns))
    return open_store(path)


def test_a_million_documents_are_opened_chosen_and_ordered_in_moments(million: TeacherStore) -> None:
    """0.5 s of processor time in all: the cores are seldom ours alone."""
    opened = TeacherStore(million.location, million.blocks)
    times = [time.process_time()]
    assert len(opened.documents) == 1_000_000
    times.append(time.process_time())
    documents, left_out = select(opened, "train")
    times.append(time.process_time())
    assert 900_000 < len(documents) + left_out < 1_000_000
    assert (np.diff(documents.index) > 0).all()
    assert (documents.n_supervised >= 2).all()
    assert not documents.heldout.any()
    times.append(time.process_time())
    config = TrainConfig(store="x", epochs=1)
    assert total_steps(documents.length, config) > 80_000
    times.append(time.process_time())
    seconds = np.diff(times)
    assert seconds[0] < 1.0
    assert seconds[1] < 1.5
    assert seconds[3] < 2.0


def test_choosing_is_that_of_the_slow_way(store: TeacherStore) -> None:
    for split in ("train", "heldout"):
        fitting = sorted((ref for ref in store.documents if ref.split == split), key=lambda ref: ref.index)
        kept, left_out = select(store, split)
        assert list(kept) == [ref for ref in fitting if ref.n_supervised >= 2]
        assert left_out == len(fitting) - len(kept)
