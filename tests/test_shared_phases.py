"""How long a phase may stay silent."""

from __future__ import annotations

import math

import pytest

from shared.phases import DONE, FLOOR_S, SPAWN, STEP, WAIT_FOR_ROOM, limit_s


def test_the_floor_holds_until_longer_silences_turned_out_well() -> None:
    assert limit_s(STEP, 0.0, 1.0) == FLOOR_S[STEP] == 60
    assert limit_s(STEP, 12.0, 1.0) == 60
    assert limit_s(STEP, 30.0, 1.0) == 150


def test_the_scale_scales_and_zero_is_never() -> None:
    assert limit_s("checkpoint", 0.0, 0.02) == pytest.approx(3.6)
    assert limit_s("checkpoint", 100.0, 2.0) == 1000
    assert limit_s("checkpoint", 0.0, 0.0) == math.inf


def test_a_start_has_some_seconds_whatever_the_scale() -> None:
    assert limit_s(SPAWN, 0.0, 1.0) == 60
    assert limit_s(SPAWN, 0.0, 0.02) == 5
    assert limit_s(SPAWN, 0.0, 0.0) == math.inf


def test_waiting_for_room_has_no_limit_and_an_unknown_phase_has_one() -> None:
    assert limit_s(WAIT_FOR_ROOM, 0.0, 1.0) == math.inf
    assert limit_s("a phase of a newer version", 0.0, 1.0) == 300


def test_every_phase_but_the_wait_has_a_floor() -> None:
    assert set(FLOOR_S) == {
        *("spawn", "import", "rendezvous", "load", "compile", "warm-up", "step", "checkpoint", "eval", "drain", DONE)
    }
