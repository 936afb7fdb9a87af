"""The learning-rate schedules as functions of the step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigRefused
from stage2_train.config import TrainConfig
from stage2_train.learning_rate import Rate, learning_rate

COSINE = Rate(total=100, peak=1.0, warmup_ratio=0.04)
WSD = replace(COSINE, schedule="wsd")

ratios = st.floats(0, 1)
schedules = st.builds(
    Rate,
    total=st.integers(1, 500),
    peak=st.floats(1e-6, 10),
    warmup_ratio=ratios,
    min_ratio=ratios,
    schedule=st.sampled_from(["cosine", "wsd"]),
    decay_ratio=ratios,
    decay=st.sampled_from(["linear", "sqrt"]),
)


def rates(rate: Rate) -> list[float]:
    return [learning_rate(step, rate) for step in range(rate.total)]


def test_cosine_rises_and_falls() -> None:
    found = rates(COSINE)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[52] == pytest.approx(0.5)
    assert 0 < found[-1] < 1e-3
    assert learning_rate(0, replace(COSINE, total=1)) == 1.0
    assert learning_rate(99, replace(COSINE, warmup_ratio=0.0, min_ratio=0.1)) == pytest.approx(0.1, abs=1e-3)


def test_wsd_stays_at_the_peak_until_its_last_share() -> None:
    for decay, middle in (("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))):
        found = rates(replace(WSD, decay=decay))
        assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
        assert found[4:81] == [1.0] * 77, "the first update of the decay still has the peak: progress 0"
        assert found[81] < 1.0
        assert found[90] == pytest.approx(middle)
    assert rates(replace(WSD, decay="linear"))[-1] == pytest.approx(1 / 20)
    assert rates(replace(WSD, decay_ratio=0.0))[4:] == [1.0] * 96


def test_a_warmup_that_reaches_into_the_decay_shortens_it() -> None:
    found = rates(replace(WSD, warmup_ratio=0.9, decay_ratio=0.5, decay="linear"))
    assert found[89] == 1.0
    assert found[90:] == pytest.approx([1 - x / 10 for x in range(10)])


@given(schedules)
def test_every_schedule_rises_then_falls_between_its_bounds(rate: Rate) -> None:
    found = rates(rate)
    warmup = round(rate.total * rate.warmup_ratio)
    assert all(a < b for a, b in itertools.pairwise(found[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(found[max(0, warmup - 1) :]))
    assert all(0 < value <= rate.peak * (1 + 1e-12) for value in found[:-1])
    assert all(value >= rate.peak * rate.min_ratio * (1 - 1e-12) for value in found[warmup:])
    assert max(found) == pytest.approx(rate.peak)


@given(schedules, st.floats(0.1, 10))
def test_the_peak_scales_the_whole_schedule(rate: Rate, factor: float) -> None:
    scaled = rates(replace(rate, peak=rate.peak * factor))
    assert scaled == pytest.approx([value * factor for value in rates(rate)])


def test_the_knobs_of_the_command_reach_the_schedule() -> None:
    knobs = {"learning_rate": 2.0, "warmup_ratio": 0.1, "min_lr_ratio": 0.2, "schedule": "wsd", "decay_ratio": 0.5}
    config = TrainConfig(store="x", decay_shape="linear", **knobs)  # type: ignore[arg-type]
    assert config.rate(40) == Rate(
        total=40, peak=2.0, warmup_ratio=0.1, min_ratio=0.2, schedule="wsd", decay_ratio=0.5, decay="linear"
    )
    with pytest.raises(ConfigRefused, match=r"--decay-ratio is 1\.5"):
        TrainConfig(store="x", decay_ratio=1.5)
