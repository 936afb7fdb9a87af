"""Keys and values of the context during drafting: projected once, appended as the target accepts tokens.

Made by Drafter.new_cache, filled by Drafter.extend, read by Drafter.draft. Rows may have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage2_train.attention import Layout, dense_mask
from stage2_train.drafter_config import DrafterConfig, LayerKind


class ContextCache:
    """Preallocated [R,nkv,capacity,d] buffers per layer, doubled when full; `lengths` [R] are the accepted tokens."""

    def __init__(
        self, config: DrafterConfig, rows: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (rows, config.num_key_value_heads, max(capacity, 1), config.head_dim)
        count = config.num_hidden_layers
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(count)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(count)]
        self.lengths = [0] * rows
        self._masks: dict[tuple[LayerKind, int], Tensor | None] = {}

    @property
    def capacity(self) -> int:
        """Tokens per row that fit without growing."""
        return self.keys[0].shape[2]

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    def next_positions(self, count: int) -> Tensor:
        """[R,count] positions of the next `count` tokens of every row."""
        device = self.keys[0].device
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def append(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], counts: Tensor | Sequence[int] | None = None
    ) -> None:
        """Add per-layer [R,nkv,T,d] for the next positions; row r keeps its first counts[r] (all when None)."""
        added = [keys[0].shape[2]] * len(self.lengths) if counts is None else [int(count) for count in counts]
        self._reserve(max(old + new for old, new in zip(self.lengths, added, strict=True)))
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            for row, (old, new) in enumerate(zip(self.lengths, added, strict=True)):
                self.keys[index][row, :, old : old + new] = key[row, :, :new]
                self.values[index][row, :, old : old + new] = value[row, :, :new]
        self.lengths = [old + new for old, new in zip(self.lengths, added, strict=True)]
        self._masks.clear()

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget what lies beyond lengths[r] in row r (never longer than now)."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)
        self._masks.clear()

    def view(self, index: int, kind: LayerKind, block_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask (None: all visible) with which layer `index` drafts a block after the context."""
        first = 0 if kind.window is None else max(0, min(self.lengths) - (kind.window - 1))
        keys = self.keys[index][:, :, first : self.length]
        values = self.values[index][:, :, first : self.length]
        return keys, values, self._mask(kind, first, block_size)

    def _mask(self, kind: LayerKind, first: int, block_size: int) -> Tensor | None:
        if (kind, block_size) not in self._masks:
            self._masks[kind, block_size] = self._build(kind, first, block_size)
        return self._masks[kind, block_size]

    def _build(self, kind: LayerKind, first: int, block_size: int) -> Tensor | None:
        if not kind.causal and kind.window is None and min(self.lengths) == self.length:
            return None
        end = torch.tensor(self.lengths, dtype=torch.int32, device=self.keys[0].device)[:, None] - first
        return dense_mask(Layout(torch.zeros_like(end), end, self.length - first, block_size), kind)

    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        extra = max(needed, 2 * self.capacity) - self.capacity
        self.keys = [torch.nn.functional.pad(buffer, (0, 0, 0, extra)) for buffer in self.keys]
        self.values = [torch.nn.functional.pad(buffer, (0, 0, 0, extra)) for buffer in self.values]
