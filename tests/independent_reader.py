"""Reads an exported drafter with only safetensors and config.json: formulas of the method, loops, no shared code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head vector [d], pair (i, i + d/2) by pair."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)), dtype=torch.float32)
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def read_and_draft(folder: Path, features: Tensor, block: Tensor, head: Tensor) -> Tensor:
    """Logits [B, V] of one block [B, H] behind S context features [S, F * H], by loops over slots, heads and keys."""
    c: dict[str, Any] = json.loads((folder / "config.json").read_text())
    w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    eps, theta, window = c["rms_norm_eps"], c["rope_theta"], c["sliding_window"]
    heads, kv_heads, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    anchor, size, h = len(context), len(block), block
    for layer, kind in enumerate(c["layer_types"]):
        p = f"layers.{layer}."
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        attention = {name: w[f"{p}self_attn.{name}.weight"] for name in names}
        x = norm(h, w[p + "input_layernorm.weight"], eps)
        both = torch.cat((context, x))  # the context is not normed again
        sliding = kind == "sliding_attention"
        causal = c.get("is_causal", sliding)
        rows = []
        for slot in range(size):
            outs = []
            for head_index in range(heads):
                cut = slice(head_index * d, (head_index + 1) * d)
                group = head_index // (heads // kv_heads)
                kv_cut = slice(group * d, (group + 1) * d)
                q = turn(norm(x[slot] @ attention["q_proj"][cut].T, attention["q_norm"], eps), anchor + slot, theta)
                scores, values = [], []
                for j in range(anchor + size):
                    if causal and j > anchor + slot:
                        continue
                    if sliding and abs(anchor + slot - j) >= window:
                        continue
                    k = turn(norm(both[j] @ attention["k_proj"][kv_cut].T, attention["k_norm"], eps), j, theta)
                    scores.append((q @ k) * d**-0.5)
                    values.append(both[j] @ attention["v_proj"][kv_cut].T)
                outs.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            rows.append(torch.cat(outs) @ attention["o_proj"].T)
        h = h + torch.stack(rows)
        y = norm(h, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        h = h + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"], eps) @ head.T
