"""Key-value storage of a target while it decodes, and which targets we can roll back exactly.

Called by stage2_train.target_decoder. Keys and values live at slot = absolute position, so that forgetting rejected
tokens is a shorter length and copies nothing. Layers of every attention kind keep all positions; windows are the
mask's business, which is exact in every transformers version (5.17's rolling cache fails past the window).
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from shared.errors import TargetUnsupported
from shared.slot_cache import SlotLayer, Slots
from shared.target import Target


def unsupported(target: Target, what: str) -> TargetUnsupported:
    """The refusal of a target we cannot decode exactly: model type, version and reason."""
    return TargetUnsupported(
        f"decoding with model type {target.text_config.model_type!r} in transformers {transformers.__version__}: "
        f"{what}; speculative decoding would be wrong, so it is refused"
    )


def layer_types(target: Target) -> set[str]:
    """Kinds of layers of the target, read off the cache that transformers would make for it."""
    kinds = {
        DynamicLayer: "full_attention",
        DynamicSlidingWindowLayer: "sliding_attention",
        LinearAttentionLayer: "linear_attention",
    }
    declared = set(getattr(target.text_config, "layer_types", None) or ())
    if unknown := declared - set(kinds.values()):
        raise unsupported(target, f"it has layers of type {', '.join(sorted(unknown))}")
    found = set()
    for layer in DynamicCache(config=target.text_config).layers:
        # Exact classes: a subclass keeps more state (index keys, chunks) than we roll back.
        if type(layer) not in kinds:
            raise unsupported(target, f"its cache has layers of kind {type(layer).__name__}")
        found.add(kinds[type(layer)])
    if "linear_attention" in found and "sliding_attention" in found:
        raise unsupported(target, "it mixes recurrent and sliding-window layers")
    return found


def cache_layers(target: Target, slots: Slots) -> list[Any]:
    """One cache layer per decoder layer, attention layers replaced by ours."""
    layers = DynamicCache(config=target.text_config).layers
    if len(layers) != target.num_hidden_layers:
        raise unsupported(target, f"its {target.num_hidden_layers} layers share {len(layers)} caches")
    return [layer if isinstance(layer, LinearAttentionLayer) else SlotLayer(slots) for layer in layers]


def sliding_window(target: Target) -> int | None:
    """The window W of sliding layers (a query at p sees keys at p-W+1 .. p), None without such layers."""
    windows = {
        layer.sliding_window
        for layer in DynamicCache(config=target.text_config).layers
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    if len(windows) > 1:
        raise unsupported(target, f"it has several window sizes {sorted(windows)}")
    return windows.pop() if windows else None


def attention_implementation(target: Target) -> str:
    """`sdpa` or `eager`: which form of mask the target reads. Raises TargetUnsupported for others."""
    name = target.model.config._attn_implementation
    if name not in ("sdpa", "eager"):
        raise unsupported(target, f"attention {name!r} does not take per-row masks (use sdpa or eager)")
    return str(name)
