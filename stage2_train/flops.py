"""How much arithmetic a training step is: the model's own products, from its geometry and the batch.

Called by train.py for TFLOP/s and by benchmarks/. numpy only. Next: benchmarks/step.py.

Shapes: R rows, S context tokens, N anchor slots, B slots, Q = N*B; H hidden, Ht target hidden, F taps, I MLP width,
V vocabulary, nh query heads, nkv key/value heads, d head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from stage2_train.drafter_config import DrafterConfig, LayerKind

Ints = np.ndarray[Any, Any]
# Attention's backward makes the scores anew (one product) and dV, dP, dQ, dK (four); the forward is two.
ATTENTION_WITH_BACKWARD = 3.5


class Laid(Protocol):
    """What a Batch says about its layout."""

    @property
    def start(self) -> Ints:
        """[R,N]: row index of the document's first token."""

    @property
    def end(self) -> Ints:
        """[R,N]: row index of the anchor."""

    @property
    def context_positions(self) -> Ints:
        """[R,S]."""


class Shape(NamedTuple):
    """A layout as Laid."""

    start: Ints
    end: Ints
    context_positions: Ints


def unused(rows: int, tokens: int, anchors: int) -> Shape:
    """A batch of these shapes in which no slot is used: what is computed whatever is in it."""
    slots = np.zeros((rows, anchors), np.int64)
    return Shape(slots, slots, np.zeros((rows, tokens), np.int64))


def visible_pairs(start: Ints, end: Ints, block_size: int, kind: LayerKind) -> int:
    """Query-key pairs that one layer of this kind lets through, over all rows, for one head.

    start, end [R,N] as in attention.Layout. An unused slot (start = end) sees its own block and is counted with it.
    """
    context = (end.astype(np.int64) - start)[..., None]
    slots = np.arange(block_size)
    distance = slots[:, None] - slots
    own = distance >= 0 if kind.causal else np.ones_like(distance, bool)
    if kind.window is not None:
        context = np.minimum(context, np.maximum(kind.window - 1 - slots, 0))
        own &= np.abs(distance) < kind.window
    else:
        context = np.broadcast_to(context, (*end.shape, block_size))
    return int(context.sum()) + end.size * int(own.sum())


def forward_flops(config: DrafterConfig, batch: Laid, head_slots: int) -> dict[str, int]:
    """Floating-point operations of one forward pass by part: fc, layers, attention, head.

    fc         2 R S (F Ht) H
    layers     per layer 2 R Q H (2 nh d + 2 nkv d + 3 I) for the block slots, 2 R S H (2 nkv d) for the context
    attention  per layer 4 nh d for each visible pair: what a mask forbids is no work, whatever a kernel does with it
    head       2 R N head_slots H V, with head_slots the drafted slots of a block (B - 1, or B when slot 0 drafts)

    Rows and slots are fixed shapes: padding and unused slots count, as they are computed. Norms, rotary and softmax
    are left out.
    """
    rows, anchors = batch.start.shape
    context, queries = batch.context_positions.size, rows * anchors * config.block_size
    wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, layers = config.hidden_size, config.num_hidden_layers
    slot = hidden * (2 * wide + 2 * narrow + 3 * config.intermediate_size)
    kinds = config.layer_kinds()
    pairs = {kind: visible_pairs(batch.start, batch.end, config.block_size, kind) for kind in set(kinds)}
    return {
        "fc": 2 * context * len(config.target_layer_ids) * config.target_hidden_size * hidden,
        "layers": layers * 2 * (queries * slot + context * hidden * 2 * narrow),
        "attention": sum(4 * wide * pairs[kind] for kind in kinds),
        "head": 2 * rows * anchors * head_slots * hidden * config.vocab_size,
    }


def flops_by_part(config: DrafterConfig, batch: Laid, head_slots: int) -> dict[str, float]:
    """The same for forward and backward of one micro-batch; add up over micro-batches and ranks.

    fc x 2 (its input needs no gradient), layers x 3, attention x 3.5, head x 2 (its weight is frozen). Recomputation
    by activation checkpointing is not counted: it is not the model's.
    """
    found = forward_flops(config, batch, head_slots)
    return {
        "fc": 2.0 * found["fc"],
        "layers": 3.0 * found["layers"],
        "attention": ATTENTION_WITH_BACKWARD * found["attention"],
        "head": 2.0 * found["head"],
    }


def step_flops(config: DrafterConfig, batch: Laid, head_slots: int) -> float:
    """`flops_by_part` in one number."""
    return sum(flops_by_part(config, batch, head_slots).values())


def backward_flops(config: DrafterConfig, batch: Laid) -> float:
    """What of it is left when the loss is known: head and loss give their gradient within the forward pass."""
    found = forward_flops(config, batch, head_slots=0)
    return found["fc"] + 2.0 * found["layers"] + (ATTENTION_WITH_BACKWARD - 1.0) * found["attention"]
