"""A target's keys and values at [row, head, absolute position]: what both stages decode with.

Called by stage1_extract/decoding.py (many answers at once) and stage2_train/target_decoder.py (verify and roll back).
Forgetting tokens is a smaller `visible`, and a freed row is simply written over: neither copies anything.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from shared.target import Target


class Slots:
    """Where the next forward writes (index [R, 1, Q, 1]) and how many slots its queries may look at."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.visible = 0
        self.index: Tensor | None = None


class SlotLayer(DynamicLayer):
    """Keys and values [R, heads, capacity, head_dim] of one attention layer: given, or made at the first update."""

    def __init__(self, slots: Slots, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.slots = slots
        self.is_initialized: bool = False
        if keys is not None and values is not None:
            self._take(keys, values)

    def _take(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.device, self.is_initialized = keys, values, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            # zeros, not empty: a masked slot still meets a probability of 0, and 0 * NaN is NaN.
            self._take(
                *(x.new_zeros((*x.shape[:2], self.slots.capacity, x.shape[3])) for x in (key_states, value_states))
            )
        assert self.slots.index is not None
        self.keys.scatter_(2, self.slots.index.expand(key_states.shape), key_states)
        self.values.scatter_(2, self.slots.index.expand(value_states.shape), value_states)
        return self.keys[:, :, : self.slots.visible], self.values[:, :, : self.slots.visible]

    def get_seq_length(self) -> int:
        return self.slots.visible

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.visible, 0


def cache_argument(target: Target) -> str:
    """The forward's name for the cache: `cache` from transformers 5.2x on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(target.decoder.forward).parameters else "past_key_values"
