"""Batches reach the step whole and in order, at most one ahead, and the waiting is measured."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_store import HIDDEN, counting_texts, make_store

from shared.errors import StoreDamaged
from stage2_train.batch import Batch
from stage2_train.data import BatchBuilder, Prefetcher, Shapes, Share, StepRows, stream
from stage2_train.device_feed import DeviceFeed, Feed, make_feed
from stage2_train.selection import open_store, select

CPU = torch.device("cpu")
SHARE = Share(batch_rows=4, rows_per_pass=2, rank=0, world_size=1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    texts = counting_texts(32)
    return {p: make_store(folder / f"{p}.zarr", texts, blocks=5, precision=p) for p in ("bfloat16", "int8")}


def steps_of(store: Path, pinned: bool = False) -> Iterator[StepRows]:
    opened = open_store(store)
    shapes = Shapes(max_length=48, anchors=6, block_size=4, feature_size=2 * HIDDEN)
    return stream(BatchBuilder(opened, select(opened, "train")[0], shapes, 5, pinned=pinned), SHARE, 0, 0)


def same(placed: Batch, want: Batch) -> bool:
    """Whether every tensor of a placed batch holds the bytes of that batch's array, read later and on the CPU."""
    return all(np.array_equal(tensor.cpu().numpy(), getattr(want, name)) for name, tensor in placed.tensors.items())


def summable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits in a type that every device can add."""
    return tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_every_micro_batch_arrives_whole_and_in_order(stores: dict[str, Path], precision: str) -> None:
    feed = DeviceFeed(Prefetcher(steps_of(stores[precision])), CPU)
    for want in itertools.islice(steps_of(stores[precision]), 12):
        rows = next(feed)
        assert (rows.epoch, rows.batch, len(rows.parts)) == (want.epoch, want.batch, 2)
        for placed, own, wanted in zip(rows.placed(), rows.parts, want.parts, strict=True):
            assert set(placed.tensors) == set(wanted.tensors)
            time.sleep(0.002)  # the thread has time to write where it must not
            assert same(placed, wanted)
            assert placed.features is own.features  # the CPU batch stays for the denominator and for blame
    feed.close()


def test_the_device_holds_two_micro_batches_and_no_more(stores: dict[str, Path]) -> None:
    taken: list[int] = []

    def counted() -> Iterator[StepRows]:
        for number, rows in enumerate(steps_of(stores["bfloat16"])):
            taken.append(number)
            yield rows

    feed = DeviceFeed(Prefetcher(counted(), ahead=1), CPU)
    places = set()
    for number in range(6):
        for placed in next(feed).placed():
            places.add(placed.tensors["features"].data_ptr())
            time.sleep(0.02)
        # At most: this step, one that waits for its buffers, one queued, one that waits for its place in the queue.
        assert len(taken) <= number + 4
    assert len(places) == 2
    feed.close()


def test_on_a_cpu_a_run_copies_nothing(stores: dict[str, Path]) -> None:
    feed = make_feed(Prefetcher(steps_of(stores["bfloat16"])), CPU)
    assert type(feed) is Feed
    rows = next(feed)
    assert [placed is part for placed, part in zip(rows.placed(), rows.parts, strict=True)] == [True, True]
    feed.close()


@pytest.mark.parametrize("kind", [Feed, DeviceFeed])
def test_waiting_is_measured_and_only_waiting(stores: dict[str, Path], kind: type[Feed]) -> None:
    ready, all_read = threading.Event(), threading.Event()

    def slow() -> Iterator[StepRows]:
        first, *others = itertools.islice(steps_of(stores["bfloat16"]), 3)
        yield first
        ready.wait()
        yield from others
        all_read.set()

    steps = Prefetcher(slow())
    feed = kind(steps) if kind is Feed else DeviceFeed(steps, CPU)
    list(next(feed).placed())
    feed.waited()
    time.sleep(0.1)
    assert feed.waited() == 0.0
    threading.Timer(0.5, ready.set).start()
    began = time.perf_counter()
    list(next(feed).placed())
    assert 0.2 < feed.waited() <= time.perf_counter() - began
    assert all_read.wait(60)
    time.sleep(0.1)  # the copying thread takes it over
    list(next(feed).placed())
    assert feed.waited() < 0.2
    feed.close()


def test_an_error_of_the_reader_reaches_the_loop(stores: dict[str, Path]) -> None:
    def failing() -> Iterator[StepRows]:
        yield next(steps_of(stores["bfloat16"]))
        raise StoreDamaged("block 3")

    feed = DeviceFeed(Prefetcher(failing()), CPU)
    list(next(feed).placed())
    with pytest.raises(StoreDamaged, match="block 3"):
        next(feed)
    feed.close()


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("stalled", [False, True], ids=["reading", "reader stalled"])
def test_closing_ends_every_thread_wherever_it_waits(stores: dict[str, Path], taken: int, stalled: bool) -> None:
    go = threading.Event()

    def source() -> Iterator[StepRows]:
        yield from itertools.islice(steps_of(stores["bfloat16"]), taken)
        if stalled:
            go.wait()
        yield from steps_of(stores["bfloat16"])

    before = set(threading.enumerate())
    feed = DeviceFeed(Prefetcher(source()), CPU)
    for _ in range(taken):
        list(next(feed).placed())
    time.sleep(0.05)
    threading.Timer(0.05, go.set).start()
    feed.close()
    ours = {thread for thread in threading.enumerate() if thread.name.startswith("prefetch")}
    assert ours <= before


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_no_copy_overtakes_the_kernels_that_read(stores: dict[str, Path], precision: str) -> None:
    """The CPU runs steps ahead of a busy GPU; sums of every placed tensor, computed late, must still be right."""
    device = torch.device("cuda", 0)
    feed = make_feed(Prefetcher(steps_of(stores[precision], pinned=True)), device)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(8):
        for placed in next(feed).placed():
            torch.cuda._sleep(20_000_000)
            found.append({name: summable(tensor).double().sum() for name, tensor in placed.tensors.items()})
    held = torch.cuda.memory_allocated()
    wanted = [part for rows in itertools.islice(steps_of(stores[precision]), 8) for part in rows.parts]
    for sums, want in zip(found, wanted, strict=True):
        for name, value in sums.items():
            whole = summable(torch.from_numpy(getattr(want, name)))
            assert value.item() == pytest.approx(whole.double().sum().item(), rel=1e-12), name
    for _ in range(8):
        list(next(feed).placed())
    assert torch.cuda.memory_allocated() <= held + 2**20
    assert feed.waited() < 5.0
    feed.close()


@pytest.mark.gpu
def test_copies_overlap_with_the_step(stores: dict[str, Path]) -> None:
    """Sixteen 256 MB micro-batches beside kernels that take longer: together hardly longer than the kernels alone."""
    device = torch.device("cuda", 0)
    big = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    batch = dataclasses.replace(next(steps_of(stores["bfloat16"])).parts[0], tensors={"features": big})
    feed = make_feed(Prefetcher(StepRows(0, number, (batch,)) for number in itertools.count()), device)

    def run(with_data: bool) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(16):
            for _placed in next(feed).placed() if with_data else (None,):
                torch.cuda._sleep(60_000_000)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(True)
    feed.waited()
    alone, together = run(False), run(True)
    assert together < 1.1 * alone
    assert feed.waited() < 0.1 * alone
    feed.close()
