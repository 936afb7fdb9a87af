"""Who sees whom: the one definition of visibility, and the masks made from it.

A row holds S context tokens (several documents) and N blocks of B slots. A slot sees the context of its own
document strictly before its anchor, and its own block; never another block, never the anchor's own feature.
Called by drafter.py (draft), data.py (layout), train.py. Next: drafter.py.

Shapes: R rows, S context tokens, N blocks, B slots, Q = N*B queries, KV = S + Q keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stage2_train.drafter_config import LayerKind

TILE = 128
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TileLists = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where the blocks of a batch stand in their rows.

    A block sees the context tokens at row indices start <= j < end: start is its document's first token, end its
    anchor. A document is contiguous in its row, so the range says "same document and strictly before the anchor"
    without document ids. An unused slot has start = end = 0 and still sees its own block: no row is ever empty.
    """

    start: Tensor
    """[R,N] int32: row index of the first token of the block's document."""
    end: Tensor
    """[R,N] int32: row index of the block's anchor (exclusive end of its context)."""
    context_length: int
    block_size: int


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks attended together: their queries, the context that any of them sees, and who sees what."""

    queries: slice
    context: slice
    mask: Tensor
    """[R,1,q,c+q] additive, over the context slice and then the group's own slots."""


@dataclass(frozen=True)
class GroupedMask:
    """The mask of a row in parts. All pairs of slots would be mostly forbidden ones: blocks never see each other."""

    groups: tuple[Group, ...]
    context_length: int


Mask = Tensor | BlockMask | GroupedMask | None
Masks = Mapping[LayerKind, Mask]


def context_visible(start: Tensor, end: Tensor, slot: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Slot `slot` of a block sees context row index `key` (all int tensors that broadcast; bool result).

    The window counts the query (Hugging Face convention): visible iff query - key < window, with the query at
    position anchor + slot, so the far edge moves with the slot.
    """
    visible = (key >= start) & (key < end)
    if window is not None:
        visible = visible & (end + slot - key < window)
    return visible


def own_visible(slot: Tensor, other: Tensor, kind: LayerKind) -> Tensor:
    """Slot `slot` sees slot `other` of the same block: all of them, or up to itself when causal; within the window."""
    distance = slot - other
    visible = distance >= 0 if kind.causal else distance == distance
    if kind.window is not None:
        visible = visible & (distance < kind.window) & (-distance < kind.window)
    return visible


def mask_mod(layout: Layout, kind: LayerKind) -> MaskMod:
    """The visibility rule as flex_attention's function of (row, head, query index, key index).

    Closes over tensors that change each step and Python numbers that never do: a changing number would recompile.
    """
    start, end, block_size, context_length = layout.start, layout.end, layout.block_size, layout.context_length

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        slot = query - block * block_size
        own = key - context_length
        in_context = (own < 0) & context_visible(start[row, block], end[row, block], slot, key, kind.window)
        in_block = (own >= 0) & (own // block_size == block) & own_visible(slot, own - block * block_size, kind)
        return in_context | in_block

    return visible


def dense_mask(layout: Layout, kind: LayerKind) -> Tensor:
    """[R,1,Q,KV] bool for scaled_dot_product_attention, built part by part (the rule on all Q x KV is 8 passes)."""
    rows, blocks = layout.start.shape
    size, length, device = layout.block_size, layout.context_length, layout.start.device
    queries = blocks * size
    slots = torch.arange(size, dtype=torch.int32, device=device)
    keys = torch.arange(length, dtype=torch.int32, device=device)
    mask = torch.zeros(rows, blocks, size, length + queries, dtype=torch.bool, device=device)
    start, end = layout.start[:, :, None, None], layout.end[:, :, None, None]
    mask[..., :length] = context_visible(
        start, end, slots[:, None] if kind.window is not None else slots[:1, None], keys, kind.window
    )
    own = own_visible(slots[:, None], slots[None, :], kind)
    diagonal = mask[..., length:].unflatten(-1, (blocks, size)).diagonal(dim1=1, dim2=3)
    diagonal.copy_(own[None, :, :, None].expand(rows, size, size, blocks))
    return mask.view(rows, 1, queries, length + queries)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as 0 / -inf, once per step instead of once per layer inside SDPA."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def grouped_mask(layout: Layout, kind: LayerKind, dtype: torch.dtype) -> GroupedMask:
    """The rule for groups of about 128 queries, each over the context that its blocks can see (anchors are sorted).

    Reads positions back from the device; meant for CPUs, where it makes attention 3-4 times cheaper than a dense mask.
    """
    blocks, size = layout.start.shape[1], layout.block_size
    low = layout.start if kind.window is None else torch.maximum(layout.start, layout.end - (kind.window - 1))
    low = torch.where(layout.end > 0, low, layout.context_length)
    together = max(1, TILE // size)
    groups = []
    for first in range(0, blocks, together):
        part = slice(first, min(first + together, blocks))
        right = int(layout.end[:, part].max())
        left = min(int(low[:, part].min()), right)
        inner = Layout(layout.start[:, part] - left, layout.end[:, part] - left, right - left, size)
        queries = slice(part.start * size, part.stop * size)
        groups.append(Group(queries, slice(left, right), additive(dense_mask(inner, kind), dtype)))
    return GroupedMask(tuple(groups), layout.context_length)


class Tiles:
    """`tile_tables`; `compile` makes it one graph for each kind of layer."""

    def __init__(self) -> None:
        self._tables: Callable[..., TileLists] = tile_tables

    def compile(self, backend: str = "inductor") -> None:
        """Mark for compilation at the first call."""
        self._tables = torch.compile(tile_tables, fullgraph=True, dynamic=False, backend=backend)

    def __call__(self, layout: Layout, kind: LayerKind) -> TileLists:
        """`tile_tables` of a layout."""
        return self._tables(layout.start, layout.end, layout.context_length, layout.block_size, kind)


def block_mask(layout: Layout, kind: LayerKind, tiles: Tiles | None = None) -> BlockMask:
    """The same rule as flex_attention tiles of 128 x 128, listed by `tiles`.

    Built by the constructor: from_kv_blocks would work out the query side again, in a dozen kernels more.
    """
    queries = layout.start.shape[1] * layout.block_size
    lists = (tiles or Tiles())(layout, kind)
    return BlockMask(
        (queries, layout.context_length + queries),
        *lists,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod(layout, kind),
    )


def tile_tables(start: Tensor, end: Tensor, context_length: int, block_size: int, kind: LayerKind) -> TileLists:
    """The eight int32 lists of a BlockMask, in its order, from ranges [R,N] instead of testing Q x KV pairs.

    Every query's visible keys are two intervals (context, own block). A tile is skipped when no interval touches it,
    needs no test when the context interval of all its queries covers it, and is tested pair by pair otherwise.
    Lists keep full width and the full-tile ones are always given: both change the graph of a layer otherwise.

    The region "mask builder" of the compile contract, one graph per kind of layer: ranges are tensors, sizes constants.
    """
    rows, blocks = start.shape
    queries = blocks * block_size
    q_tiles, kv_tiles = -(-queries // TILE), -(-(context_length + queries) // TILE)
    query = torch.arange(q_tiles * TILE, dtype=torch.int32, device=start.device)
    block = torch.clamp(query // block_size, max=blocks - 1)
    slot = query - block * block_size
    low, high = start[:, block], end[:, block]
    own_low = context_length + block * block_size
    own_high = own_low + (slot + 1 if kind.causal else block_size)
    if kind.window is not None:
        nearest = slot - (kind.window - 1)
        low = torch.maximum(low, high + nearest)
        own_high = torch.minimum(own_high, own_low + slot + kind.window)
        own_low = torch.maximum(own_low, own_low + nearest)
    real = query < queries
    left = torch.arange(kv_tiles, dtype=torch.int32, device=start.device) * TILE
    right = left + TILE
    low, high = low[..., None], high[..., None]
    touched = torch.minimum(high, right.clamp(max=context_length)) > torch.maximum(low, left)
    touched = touched | (torch.minimum(own_high[:, None], right) > torch.maximum(own_low[:, None], left))
    covered = (low <= left) & (high >= right) & (right <= context_length)
    full = (covered | ~real[:, None]).view(rows, q_tiles, TILE, kv_tiles).all(2)
    partial = (touched & real[:, None]).view(rows, q_tiles, TILE, kv_tiles).any(2) & ~full
    chosen = torch.stack((partial, full))
    (part_counts, full_counts), (part_order, full_order) = _tile_lists(chosen)
    (part_counts_t, full_counts_t), (part_order_t, full_order_t) = _tile_lists(chosen.mT)
    by_query = (part_counts, part_order, full_counts, full_order)
    by_key = (part_counts_t, part_order_t, full_counts_t, full_order_t)
    return (*by_query, *by_key)


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[2,R,1,QT] counts and [2,R,1,QT,KT] tile indices, the chosen ones first and both parts ascending.

    By counting, twice over all pairs of tiles of a line: who goes before me is my place, who has place j goes there.
    Sums compile in seconds; four stable sorts took 29 s at the 27B shape, and torch 2.11 cannot compile a running sum
    with a scatter for a GPU.
    """
    index = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    earlier = index[:, None] > index[None, :]
    ahead = (chosen[..., None, :] & earlier).sum(-1, dtype=torch.int32)
    count = chosen.sum(-1, dtype=torch.int32)
    place = torch.where(chosen, ahead, count[..., None] + index - ahead)
    order = ((place[..., None, :] == index[:, None]) * index).sum(-1, dtype=torch.int32)
    return count[:, :, None], order[:, :, None]


def build_masks(
    layout: Layout, kinds: Sequence[LayerKind], backend: str, dtype: torch.dtype, tiles: Tiles | None = None
) -> dict[LayerKind, Mask]:
    """One mask per kind of layer: BlockMask for backend "flex" (by `tiles`), GroupedMask in `dtype` for "sdpa"."""
    distinct = dict.fromkeys(kinds)
    if backend == "flex":
        return {kind: block_mask(layout, kind, tiles) for kind in distinct}
    return {kind: grouped_mask(layout, kind, dtype) for kind in distinct}
