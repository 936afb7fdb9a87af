"""The arithmetic of a step against counting: pairs against the masks, products against torch's own counter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from stage2_train.attention import Layout, build_masks, dense_mask
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig, LayerKind
from stage2_train.flops import backward_flops, flops_by_part, forward_flops, visible_pairs

KINDS = [LayerKind(causal=causal, window=window) for causal in (False, True) for window in (None, 1, 3, 6, 40)]


def geometry(**changes: Any) -> DrafterConfig:
    given: dict[str, Any] = {
        "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "block_size": 4,
        "mask_token_id": 49, "target_layer_ids": (1, 2), "num_target_layers": 4,
        **changes,
    }  # fmt: skip
    return DrafterConfig(**given)


def batch_of(start: list[list[int]], end: list[list[int]], tokens: int) -> Any:
    return SimpleNamespace(
        start=np.asarray(start, np.int32),
        end=np.asarray(end, np.int32),
        context_positions=np.zeros((len(start), tokens), np.int32),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), size=st.integers(1, 6))
def test_pairs_are_what_the_mask_lets_through(data: st.DataObject, kind: LayerKind, size: int) -> None:
    tokens = 24
    edges = data.draw(
        st.lists(st.tuples(st.integers(0, tokens - 1), st.integers(0, tokens - 1)), min_size=1, max_size=4)
    )
    batch = batch_of([[min(pair) for pair in edges]], [[max(pair) for pair in edges]], tokens)
    layout = Layout(torch.from_numpy(batch.start), torch.from_numpy(batch.end), tokens, size)
    assert visible_pairs(batch.start, batch.end, size, kind) == int(dense_mask(layout, kind).sum())


def test_products_are_what_torch_counts() -> None:
    """All but attention, which torch counts dense; fc and head without the gradient that nobody needs."""
    config, tokens, head_slots = geometry(), 12, 3
    batch = batch_of([[0, 0, 5]], [[3, 4, 9]], tokens)
    drafter = Drafter(config).initialise(0)
    weight = torch.randn(config.vocab_size, config.hidden_size)
    layout = Layout(torch.from_numpy(batch.start), torch.from_numpy(batch.end), tokens, config.block_size)
    masks = build_masks(layout, drafter.kinds, "sdpa", torch.float32)
    embeds = torch.randn(1, 3 * config.block_size, config.hidden_size, requires_grad=True)
    positions = torch.zeros(1, tokens, dtype=torch.int32), torch.zeros(1, embeds.shape[1], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        context = drafter.project_context(torch.randn(1, tokens, 64))
        hidden = drafter(context, embeds, *positions, masks).unflatten(1, (3, -1))[:, :, -head_slots:]
        logits = torch.mm(hidden.flatten(0, 2), weight.t())
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(int(value) for name, value in counts.items() if "mm" in str(name))
    found = flops_by_part(config, batch, head_slots)
    attention = sum(int(value) for name, value in counts.items() if "mm" not in str(name))
    assert found["fc"] + found["layers"] + found["head"] + attention == pytest.approx(products + attention)
    behind = sum(int(value) for name, value in backward.get_flop_counts()["Global"].items() if "mm" in str(name))
    own = backward_flops(config, batch) - found["attention"] * 2.5 / 3.5
    assert own + found["head"] / 2 == pytest.approx(behind)


def test_the_27b_shape_is_what_was_measured() -> None:
    """Against measured.md: 1,021 ms at 564 TFLOP/s, ideal parts at 790 TFLOP/s of 133, 266 and 211 ms."""
    config = geometry(
        hidden_size=5120, target_hidden_size=5120, intermediate_size=17408, num_hidden_layers=5, vocab_size=248320,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, block_size=16, target_layer_ids=(1, 2, 3, 4, 5),
    )  # fmt: skip
    end = np.linspace(0, 16384 - 2, 2048).astype(np.int32)[None]
    batch = batch_of(np.zeros_like(end).tolist(), end.tolist(), 16384)
    forward, both = forward_flops(config, batch, 16), flops_by_part(config, batch, 16)
    assert (forward["fc"] + forward["layers"]) / 790e12 == pytest.approx(0.133, rel=0.06)
    assert both["head"] / 790e12 == pytest.approx(0.211, rel=0.01)
    assert sum(both.values()) / 1.021 == pytest.approx(564e12, rel=0.03)
