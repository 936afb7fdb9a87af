"""Which targets decode in slots (shared/slot_cache.py), and attention of one new token per row over their cache.

Called by stage1_extract/decoding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer

from shared.target import Target

_GROUPED = "dflash_grouped"


def is_attention_only(target: Target) -> bool:
    """Whether every layer keeps plain keys and values of all positions."""
    layers = DynamicCache(config=target.text_config).layers
    return len(layers) == target.num_hidden_layers and all(type(layer) is DynamicLayer for layer in layers)


def bytes_per_position(target: Target) -> int:
    """Bytes of keys and values of one position over all layers."""
    config = target.text_config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * heads * head_dim * target.dtype.itemsize * target.num_hidden_layers)


@contextmanager
def grouped_attention(target: Target) -> Iterator[None]:
    """Inside, the target's layers attend with `attend_grouped`; its own prefill attention is back afterwards."""
    config = target.decoder.config
    AttentionInterface.register(_GROUPED, attend_grouped)
    before = config._attn_implementation
    config._attn_implementation = _GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_grouped(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """One query token per row, query heads grouped over their key-value head, so that keys are read once.

    query [R, Hq, 1, D], key and value [R, Hkv, S, D], mask bool [R, 1, 1, S] (true = visible) -> [R, 1, Hq, D]. The
    library's way copies keys and values for every query head first: two thirds of a step of SmolLM2 on an H200.
    """
    rows, heads, _, width = query.shape
    kept = key.shape[1]
    scores = (query.reshape(rows, kept, heads // kept, width) @ key.transpose(2, 3)).float() * scaling
    weights = scores.masked_fill_(~attention_mask, float("-inf")).softmax(-1).to(value.dtype)
    return (weights @ value).reshape(rows, 1, heads, value.shape[3]), None
