"""The drafter once more, written slowly from the formulas, and one packed row to compare on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stage2_train.attention import Layout, build_masks
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def config_of(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": 24,
        "target_hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "block_size": 4,
        "mask_token_id": 49,
        "target_layer_ids": (1, 2),
        "num_target_layers": 6,
        "rope_theta": 1000.0,
    }
    return DrafterConfig(**{**fields, **changes})


CASES = {
    "full": config_of(),
    "grouped heads, 3 to 1": config_of(num_attention_heads=6, num_key_value_heads=2),
    "one key/value head": config_of(num_attention_heads=3, num_key_value_heads=1),
    "sliding, causal": config_of(layer_types=(SLIDING, SLIDING), sliding_window=5),
    "sliding, not causal": config_of(layer_types=(SLIDING, SLIDING), sliding_window=3, is_causal=False),
    "window of one": config_of(layer_types=(SLIDING, FULL), sliding_window=1),
    "window wider than all": config_of(layer_types=(SLIDING, SLIDING), sliding_window=100, is_causal=False),
    "mixed": config_of(layer_types=(SLIDING, FULL), sliding_window=4),
    "causal everywhere": config_of(is_causal=True),
}

# Three documents in a row of 32, then padding: (first row index, tokens), and anchors as (document, position):
# the first and the last place there are, neighbours whose blocks overlap, blocks cut by the end of the document.
DOCUMENTS = ((0, 9), (9, 14), (23, 5))
ANCHORS = ((0, 0), (0, 1), (0, 7), (1, 4), (1, 5), (1, 12), (2, 0), (2, 3))
LENGTH, UNUSED = 32, 2


def a_batch(config: DrafterConfig, seed: int = 0) -> dict[str, Any]:
    """One packed row: features [1,S,F*Ht], block embeddings [1,Q,H], positions, layout; the last blocks are unused."""
    generator = torch.Generator().manual_seed(seed)
    blocks = len(ANCHORS) + UNUSED
    positions = torch.zeros(1, LENGTH, dtype=torch.int32)
    for first, tokens in DOCUMENTS:
        positions[0, first : first + tokens] = torch.arange(tokens)
    anchors = torch.tensor([[position for _, position in ANCHORS] + [0] * UNUSED], dtype=torch.int32)
    start = torch.tensor([[DOCUMENTS[document][0] for document, _ in ANCHORS] + [0] * UNUSED], dtype=torch.int32)
    end = start + anchors
    taps = len(config.target_layer_ids) * config.target_hidden_size
    return {
        "features": torch.randn(1, LENGTH, taps, generator=generator),
        "embeds": torch.randn(1, blocks * config.block_size, config.hidden_size, generator=generator),
        "context_positions": positions,
        "block_positions": (anchors[:, :, None] + torch.arange(config.block_size)).flatten(1),
        "layout": Layout(start, end, LENGTH, config.block_size),
    }


def run(drafter: Drafter, batch: dict[str, Any]) -> Tensor:
    """[blocks,B,H] of the one row."""
    dtype = drafter.fc.weight.dtype
    masks = build_masks(batch["layout"], drafter.kinds, "sdpa", dtype)
    hidden = drafter(
        drafter.project_context(batch["features"].to(dtype)),
        batch["embeds"].to(dtype),
        batch["context_positions"],
        batch["block_positions"],
        masks,
    )
    return hidden[0].unflatten(0, (-1, drafter.config.block_size))


# --- the reference: one block, one head, one slot at a time, from the formulas -----------------------------------


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) by position * theta^(-2i/d)."""
    half = len(x) // 2
    angles = [position * theta ** (-2 * i / len(x)) for i in range(half)]
    first = [x[i] * math.cos(angles[i]) - x[i + half] * math.sin(angles[i]) for i in range(half)]
    second = [x[i + half] * math.cos(angles[i]) + x[i] * math.sin(angles[i]) for i in range(half)]
    return torch.stack(first + second)


def sees(config: DrafterConfig, layer: int, query: int, key: int, same_block: bool) -> bool:
    """Positions in the document; a context key is known to lie before the anchor."""
    sliding = config.layer_types[layer] == SLIDING
    causal = config.is_causal if config.is_causal is not None else sliding
    if same_block and causal and key > query:
        return False
    if sliding:
        window = config.sliding_window or 0
        return query - key < window and key - query < window
    return True


def reference(
    weights: dict[str, Tensor], config: DrafterConfig, features: Tensor, embeds: Tensor, anchor: int
) -> Tensor:
    """One block [B,H]: `features` [anchor, F*Ht] of its document strictly before the anchor, `embeds` [B,H]."""
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    context = [norm(weights["fc.weight"] @ feature, weights["hidden_norm.weight"]) for feature in features]
    states = list(embeds)
    for layer in range(config.num_hidden_layers):
        w = {name.split(".", 2)[2]: tensor for name, tensor in weights.items() if name.startswith(f"layers.{layer}.")}
        normed = [norm(state, w["input_layernorm.weight"]) for state in states]
        sources = [(j, c, False) for j, c in enumerate(context)] + [(anchor + k, x, True) for k, x in enumerate(normed)]
        after = []
        for slot, x in enumerate(normed):
            heads = []
            for head in range(config.num_attention_heads):
                q = turn(
                    norm(
                        (w["self_attn.q_proj.weight"] @ x)[head * dim : (head + 1) * dim], w["self_attn.q_norm.weight"]
                    ),
                    anchor + slot,
                    config.rope_theta,
                )
                kv = slice(head // group * dim, (head // group + 1) * dim)
                visible = [(p, s) for p, s, own in sources if sees(config, layer, anchor + slot, p, own)]
                keys = [
                    turn(
                        norm((w["self_attn.k_proj.weight"] @ s)[kv], w["self_attn.k_norm.weight"]), p, config.rope_theta
                    )
                    for p, s in visible
                ]
                values = [(w["self_attn.v_proj.weight"] @ s)[kv] for _, s in visible]
                scores = torch.stack([q @ key / math.sqrt(dim) for key in keys]).exp()
                heads.append(sum(score * value for score, value in zip(scores / scores.sum(), values, strict=True)))
            attended = states[slot] + w["self_attn.o_proj.weight"] @ torch.cat(heads)
            x = norm(attended, w["post_attention_layernorm.weight"])
            gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
            after.append(attended + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        states = after
    return torch.stack([norm(state, weights["norm.weight"]) for state in states])


def reference_row(
    weights: dict[str, Tensor],
    config: DrafterConfig,
    batch: dict[str, Any],
    numbers: tuple[int, ...] = tuple(range(len(ANCHORS))),
) -> Tensor:
    embeds = batch["embeds"][0].to(torch.float64).unflatten(0, (-1, config.block_size))
    features = batch["features"][0].to(torch.float64)
    blocks = []
    for number in numbers:
        document, anchor = ANCHORS[number]
        first = DOCUMENTS[document][0]
        blocks.append(reference(weights, config, features[first : first + anchor], embeds[number], anchor))
    return torch.stack(blocks)


def a_drafter(config: DrafterConfig, seed: int = 1) -> Drafter:
    drafter = Drafter(config).initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # large enough that every part of the formula shows in the result
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    return drafter
