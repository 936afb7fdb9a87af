"""The break-even of a store is the epoch that counting finds, and the disk it needs the one where it starts to win."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage1_extract.break_even import Costs, Workload, byte_hours, disk_needed, hours, money


def work(**changes: Any) -> Workload:
    numbers: dict[str, Any] = {
        "num_tokens": 3_600_000_000,
        "write_bytes": 36_000_000_000_000,
        "read_bytes_per_epoch": 18_000_000_000_000,
        "tokens_per_second": 100_000.0,
        "disk": 5e9,
        "processes": 8,
        **changes,
    }
    return Workload(**numbers)


def test_hours_of_a_worked_example() -> None:
    given = work()  # 10 h of computing, 2 h of writing beside it, 1 h of reading an epoch
    assert (given.compute_hours, given.extract_hours, given.read_hours) == (10.0, 10.0, 1.0)
    assert given.write_rate == 1e9
    costs = hours(given)
    assert costs == Costs(10.0, 1.0, 10.0)
    assert (costs.store(3), costs.recompute(3), costs.cheaper_from()) == (13.0, 30.0, 2)
    assert byte_hours(given, 3) == 36e12 * (5.0 + 3.0)
    assert hours(work(disk=0.5e9)) == Costs(20.0, 10.0, 10.0)  # the disk sets the pace
    assert hours(work(disk=0.5e9)).cheaper_from() is None  # type: ignore[union-attr]
    assert hours(work(train_tokens_per_second=50_000.0)) == Costs(10.0, 20.0, 30.0)
    unknown = work(disk=None)
    assert (hours(unknown), byte_hours(unknown, 3), money(unknown)) == (None, None, None)


def test_money_of_a_worked_example() -> None:
    assert money(work()) is None
    costs = money(work(gpu_price_per_hour=3.0, disk_price_per_tb_month=73.0))
    assert costs is not None
    # 24 an hour for eight GPUs, 3.6 an hour for 36 TB, half of that while the store grows.
    assert (costs.once, costs.each, costs.again) == pytest.approx((10 * 24 + 10 * 1.8, 24 + 3.6, 240.0))


@settings(max_examples=300, deadline=None)
@given(
    once=st.floats(0.0, 1e4),
    each=st.floats(0.0, 1e3),
    again=st.floats(1e-3, 1e3),
)
def test_the_break_even_is_the_first_epoch_that_counting_finds(once: float, each: float, again: float) -> None:
    costs = Costs(once, each, again)
    found = costs.cheaper_from()
    counted = next((epochs for epochs in range(1, 2000) if costs.store(epochs) < costs.recompute(epochs)), None)
    if counted is not None:
        assert found == counted
    else:
        assert found is None or found >= 2000


@pytest.mark.parametrize("each", [1.0, math.nextafter(1.0, 0.0), 1 - 1e-15])
def test_a_break_even_beyond_counting_ends(each: float) -> None:
    found = Costs(1e9, each, 1.0).cheaper_from()
    assert found is None or found > 10**9


@settings(max_examples=300, deadline=None)
@given(
    write=st.floats(1e6, 1e15),
    read_share=st.floats(0.01, 1.0),
    rate=st.floats(10.0, 1e6),
    train=st.none() | st.floats(10.0, 1e6),
    epochs=st.integers(1, 20),
)
def test_the_disk_needed_is_where_the_store_starts_to_win(
    write: float, read_share: float, rate: float, train: float | None, epochs: int
) -> None:
    def wins(disk: float) -> bool:
        given = work(
            write_bytes=int(write),
            read_bytes_per_epoch=int(write * read_share),
            tokens_per_second=rate,
            train_tokens_per_second=train,
            disk=disk,
        )
        costs = hours(given)
        assert costs is not None
        return costs.store(epochs) < costs.recompute(epochs)

    needed = disk_needed(
        work(
            write_bytes=int(write),
            read_bytes_per_epoch=int(write * read_share),
            tokens_per_second=rate,
            train_tokens_per_second=train,
            disk=None,
        ),
        epochs,
    )
    if needed is None:
        assert not wins(1e30)
    else:
        assert wins(needed * 1.001)
        assert not wins(needed * 0.999)
