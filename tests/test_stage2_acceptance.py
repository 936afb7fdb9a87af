"""Acceptance counting against hand-counted cycles and a slow recount."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_train.acceptance import (
    Cycle,
    acceptance_length,
    acceptance_length_macro,
    acceptance_per_position,
    bootstrap_interval,
    mean_cycles,
)


def test_perfect_drafter_gains_a_whole_block_each_cycle() -> None:
    cycles = [Cycle(accepted=7, kept=8)] * 3
    assert acceptance_length([cycles]) == 8.0
    plain, conditional = acceptance_per_position([cycles], drafts=7)
    assert plain == [1.0] * 7
    assert conditional == [1.0] * 7


def test_useless_drafter_gains_the_bonus_only() -> None:
    cycles = [Cycle(accepted=0, kept=1)] * 5
    assert acceptance_length([cycles]) == 1.0
    plain, conditional = acceptance_per_position([cycles], drafts=3)
    assert plain == [0.0, 0.0, 0.0]
    assert conditional == [0.0, None, None]


def test_pooled_and_macro_differ_and_are_both_right() -> None:
    long = [Cycle(0, 1)] * 9 + [Cycle(1, 2)]
    short = [Cycle(3, 4)]
    assert acceptance_length([long, short]) == pytest.approx(15 / 11)
    assert acceptance_length_macro([long, short]) == pytest.approx((1.1 + 4.0) / 2)
    assert mean_cycles([long, short]) == 5.5


def test_tokens_after_the_end_count_neither_as_gain_nor_as_rejection() -> None:
    # Five drafts passed but the text ended at the second token: slots 3.. were not judged.
    cycles = [Cycle(accepted=5, kept=2), Cycle(accepted=1, kept=2)]
    assert acceptance_length([cycles]) == 2.0
    plain, conditional = acceptance_per_position([cycles], drafts=7)
    assert plain[:3] == [1.0, 0.5, 0.0]
    # slot 2 was reached by both (passed in one, refused in the other); slot 3 by none
    assert conditional[:3] == [1.0, 0.5, None]


def test_nothing_measured_is_none_and_not_zero() -> None:
    assert acceptance_length([]) is None
    assert acceptance_length([[], []]) is None
    assert acceptance_length_macro([[]]) is None
    assert mean_cycles([]) is None
    assert bootstrap_interval([[Cycle(0, 1)]], seed=0) is None
    assert acceptance_per_position([], drafts=2) == ([None, None], [None, None])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 9).flatmap(
        lambda block: st.tuples(
            st.just(block),
            st.lists(st.lists(st.tuples(st.integers(0, block - 1), st.integers(1, block)), max_size=6), max_size=6),
        )
    )
)
def test_per_position_equals_a_slow_recount(case: tuple[int, list[list[tuple[int, int]]]]) -> None:
    block, raw = case
    prompts = [[Cycle(a, min(kept, a + 1)) for a, kept in cycles] for cycles in raw]
    plain, conditional = acceptance_per_position(prompts, block - 1)
    for k in range(1, block):
        judged = passed = given_previous = 0
        for cycle in (cycle for cycles in prompts for cycle in cycles):
            if cycle.kept < cycle.accepted + 1 and k > cycle.kept:
                continue
            judged += 1
            passed += k <= cycle.accepted
            given_previous += k - 1 <= cycle.accepted
        assert plain[k - 1] == (passed / judged if judged else None)
        assert conditional[k - 1] == (passed / given_previous if given_previous else None)
    for value in [*plain, *conditional]:
        assert value is None or 0.0 <= value <= 1.0


def test_bootstrap_is_seeded_and_holds_the_estimate() -> None:
    rng = np.random.default_rng(3)
    prompts = [[Cycle(int(a), int(a) + 1) for a in rng.integers(0, 5, size=20)] for _ in range(30)]
    first = bootstrap_interval(prompts, seed=7)
    assert first is not None
    assert first == bootstrap_interval(prompts, seed=7)
    assert first != bootstrap_interval(prompts, seed=8)
    length = acceptance_length(prompts)
    assert length is not None
    assert first.low < length < first.high
    assert first.high - first.low < 0.6


def test_equal_prompts_have_no_spread() -> None:
    interval = bootstrap_interval([[Cycle(1, 2)]] * 4, seed=0)
    assert interval is not None
    assert interval.low == interval.high == 2.0
