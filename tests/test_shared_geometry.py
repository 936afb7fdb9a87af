"""Tapped layers: the published values, and ids that cannot be captured."""

from __future__ import annotations

import pytest

from shared.errors import LayerIdsOutOfRange
from shared.geometry import check_target_layer_ids, default_target_layer_ids

# The layer ids of published drafters, by (target layers, taps).
PUBLISHED = {
    (36, 5): (1, 9, 17, 25, 33),
    (64, 5): (1, 16, 31, 46, 61),
    (32, 5): (1, 8, 15, 22, 29),
    (40, 8): (1, 6, 11, 16, 22, 27, 32, 37),
    (52, 5): (1, 13, 25, 37, 49),
    (24, 5): (1, 6, 11, 16, 21),
    (48, 8): (1, 7, 14, 20, 26, 32, 39, 45),
    (40, 5): (1, 10, 19, 28, 37),
}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_formula_gives_the_published_ids(shape: tuple[int, int]) -> None:
    assert default_target_layer_ids(*shape) == PUBLISHED[shape]


def test_single_tap_is_the_middle() -> None:
    assert default_target_layer_ids(30, 1) == (15,)


@pytest.mark.parametrize("ids", [(36,), (-1, 3), (35,), (), (3, 1), (2, 2)], ids=str)
def test_ids_that_cannot_be_captured_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(LayerIdsOutOfRange) as caught:
        check_target_layer_ids(ids, 36)
    assert "36" in str(caught.value)
    assert caught.value.exit_code == 22


def test_too_many_taps_for_a_shallow_target() -> None:
    with pytest.raises(LayerIdsOutOfRange):
        default_target_layer_ids(6, 5)
