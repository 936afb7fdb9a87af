"""Visibility: the dense mask, the tiles and the kernels against the rule written with document ids and loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from stage2_train.attention import (
    TILE,
    Layout,
    additive,
    block_mask,
    build_masks,
    dense_mask,
    grouped_mask,
    mask_mod,
)
from stage2_train.drafter import attention
from stage2_train.drafter_config import LayerKind

KINDS = [
    LayerKind(False, None),
    LayerKind(True, None),
    LayerKind(False, 3),
    LayerKind(True, 3),
    LayerKind(True, 60),
    LayerKind(False, 1),
]


def a_layout(lengths: list[int], blocks: int, size: int, seed: int, padding: int = 3) -> tuple[Layout, Tensor]:
    """One row of documents with sorted random anchors, the last block unused; and the document ids (-1 padding)."""
    generator = torch.Generator().manual_seed(seed)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    anchors = torch.randint(0, sum(lengths), (blocks,), generator=generator).sort().values
    firsts = torch.tensor([0, *lengths]).cumsum(0)
    start = firsts[document[anchors]]
    start[-1] = anchors[-1] = 0
    return Layout(start[None].int(), anchors[None].int(), len(document), size), document


def by_the_rule(layout: Layout, document: Tensor, kind: LayerKind) -> Tensor:
    """[Q,KV] with loops: method section 3.2, document by document."""
    length, size = layout.context_length, layout.block_size
    queries = layout.end.shape[1] * size
    seen = torch.zeros(queries, length + queries, dtype=torch.bool)
    for query in range(queries):
        block, slot = divmod(query, size)
        anchor = int(layout.end[0, block])
        for key in range(length):
            same = anchor > 0 and document[key] == document[anchor]
            near = kind.window is None or anchor + slot - key < kind.window
            seen[query, key] = bool(key < anchor and same and near)
        for other in range(size):
            allowed = not kind.causal or other <= slot
            if kind.window is not None:
                allowed = allowed and abs(slot - other) < kind.window
            seen[query, length + block * size + other] = allowed
    return seen


layouts = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(2, 9), st.integers(0, 2**20)
)


@given(layouts, st.sampled_from(KINDS))
@settings(max_examples=40, deadline=None)
def test_dense_mask_and_mask_mod_are_the_rule(drawn: tuple[list[int], int, int, int], kind: LayerKind) -> None:
    layout, document = a_layout(*drawn)
    want = by_the_rule(layout, document, kind)
    assert torch.equal(dense_mask(layout, kind)[0, 0], want)
    queries, keys = torch.meshgrid(*(torch.arange(n) for n in want.shape), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask_mod(layout, kind)(zero, zero, queries, keys), want)
    assert want.any(dim=1).all()  # no query is blind, so no softmax is over nothing


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(2, 20),
    st.integers(0, 2**20),
    st.sampled_from([*KINDS, LayerKind(False, 200), LayerKind(True, 130)]),
)
@settings(max_examples=40, deadline=None)
def test_tiles_hold_every_visible_pair_and_full_tiles_nothing_else(
    lengths: list[int], blocks: int, size: int, seed: int, kind: LayerKind
) -> None:
    layout, _ = a_layout(lengths, blocks, size, seed)
    dense, tiles = dense_mask(layout, kind)[0, 0], block_mask(layout, kind)
    assert tiles.full_kv_num_blocks is not None
    partial, full = (
        _tiles(n, i)
        for n, i in ((tiles.kv_num_blocks, tiles.kv_indices), (tiles.full_kv_num_blocks, tiles.full_kv_indices))
    )
    assert not (partial & full).any()
    for q_tile in range(partial.shape[0]):
        for kv_tile in range(partial.shape[1]):
            pairs = dense[q_tile * TILE : (q_tile + 1) * TILE, kv_tile * TILE : (kv_tile + 1) * TILE]
            assert pairs.any() == (partial | full)[q_tile, kv_tile]
            if full[q_tile, kv_tile]:
                assert pairs.all()
                assert pairs.shape[1] == TILE  # a full tile is never tested, so it must not reach past the keys


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(2, 20),
    st.integers(0, 2**20),
    st.sampled_from([*KINDS, LayerKind(False, 200), LayerKind(True, 130)]),
)
@settings(max_examples=30, deadline=None)
def test_all_eight_lists_are_those_of_create_block_mask(
    lengths: list[int], blocks: int, size: int, seed: int, kind: LayerKind
) -> None:
    layout, _ = a_layout(lengths, blocks, size, seed)
    queries = blocks * size
    slow = create_block_mask(mask_mod(layout, kind), 1, None, queries, queries + layout.context_length, "cpu", TILE)
    fast = block_mask(layout, kind)
    assert fast.shape == slow.shape
    for side in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = getattr(fast, f"{side}_num_blocks"), getattr(fast, f"{side}_indices")
        assert torch.equal(numbers, getattr(slow, f"{side}_num_blocks"))
        want = getattr(slow, f"{side}_indices")
        assert (indices.shape, indices.dtype, indices.is_contiguous()) == (want.shape, torch.int32, True)
        listed = torch.arange(indices.shape[-1]) < numbers[..., None]
        assert torch.equal(indices.where(listed, -1), want.where(listed, -1))
        assert torch.equal(indices.sort(-1).values, torch.arange(indices.shape[-1]).expand_as(indices).int())


def _tiles(numbers: Tensor, indices: Tensor) -> Tensor:
    chosen = torch.zeros(indices.shape[2], indices.shape[3], dtype=torch.bool)
    for tile in range(indices.shape[2]):
        chosen[tile, indices[0, 0, tile, : int(numbers[0, 0, tile])].long()] = True
    return chosen


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([2, 7, 16, 200]),
    st.integers(0, 2**20),
    st.sampled_from([*KINDS, LayerKind(False, 100)]),
)
@settings(max_examples=30, deadline=None)
def test_groups_attend_like_one_dense_mask(
    lengths: list[int], blocks: int, size: int, seed: int, kind: LayerKind
) -> None:
    layout, _ = a_layout(lengths, min(blocks, 800 // size), size, seed)
    generator = torch.Generator().manual_seed(seed)
    queries = layout.end.shape[1] * size
    q = torch.randn(1, 2, queries, 8, generator=generator)
    k, v = (torch.randn(1, 1, layout.context_length + queries, 8, generator=generator) for _ in "kv")
    got = attention(q, k, v, grouped_mask(layout, kind, torch.float32))
    torch.testing.assert_close(got, attention(q, k, v, dense_mask(layout, kind)), rtol=1e-5, atol=1e-5)


def test_shapes_of_the_tile_lists_never_depend_on_the_anchors() -> None:
    shapes = set()
    for seed in range(5):
        mask = block_mask(a_layout([300, 200], 20, 16, seed)[0], KINDS[0])
        assert mask.full_kv_indices is not None
        shapes.add((tuple(mask.kv_indices.shape), tuple(mask.full_kv_indices.shape), mask.kv_indices.dtype))
    assert len(shapes) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_gradients_are_those_of_float64_softmax(kind: LayerKind) -> None:
    layout, document = a_layout([9, 14], 5, 4, seed=1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 20, 8), (1, 2, layout.context_length + 20, 8), (1, 2, layout.context_length + 20, 8))
    wide = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    narrow = [tensor.detach().float().requires_grad_() for tensor in wide]
    q, k, v = wide[0], *(tensor.repeat_interleave(2, dim=1) for tensor in wide[1:])
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~by_the_rule(layout, document, kind), float("-inf"))
    scale = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    ((scores.softmax(-1) @ v) * scale).sum().backward()
    (attention(*narrow, additive(dense_mask(layout, kind), torch.float32)) * scale.float()).sum().backward()
    for exact, found in zip(wide, narrow, strict=True):
        assert exact.grad is not None
        assert found.grad is not None
        assert (found.grad.double() - exact.grad).norm() <= 1e-5 * max(
            1.0, exact.grad.norm()
        )  # window 1: one key, no gradient


def test_a_mask_of_nothing_but_unused_slots_is_finite() -> None:
    layout = Layout(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), 10, 4)
    for mask in build_masks(layout, KINDS, "sdpa", torch.float32).values():
        q, kv = torch.randn(2, 2, 12, 8, requires_grad=True), torch.randn(2, 2, 22, 8)
        out = attention(q, kv, kv, mask)
        out.sum().backward()
        assert torch.isfinite(out).all()
        assert q.grad is not None
        assert torch.isfinite(q.grad).all()


def test_layers_of_one_kind_share_a_mask() -> None:
    layout, _ = a_layout([20], 2, 4, 0)
    masks = build_masks(layout, [KINDS[0], KINDS[3], KINDS[0]], "flex", torch.float32)
    assert list(masks) == [KINDS[0], KINDS[3]]
    assert all(isinstance(mask, BlockMask) for mask in masks.values())
