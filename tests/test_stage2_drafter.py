"""The drafter against a slow reference written from the formulas, and against leaks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_drafter import ANCHORS, CASES, DOCUMENTS, LENGTH, UNUSED, a_batch, a_drafter, config_of, reference_row, run

from stage2_train.attention import Layout
from stage2_train.drafter import Drafter, RMSNorm, logits, rotary


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_the_reference(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    weights = {key: value.detach().to(torch.float64) for key, value in drafter.state_dict().items()}
    got = run(drafter, batch)
    want = reference_row(weights, config, batch)
    torch.testing.assert_close(got[: len(ANCHORS)].double(), want, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(got).all()  # unused slots too


@pytest.mark.parametrize("name", ["grouped heads, 3 to 1", "mixed"])
def test_gradients_equal_the_float64_reference(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    some = (0, 3, 7)
    scale = torch.randn(len(some), config.block_size, config.hidden_size, generator=torch.Generator().manual_seed(3))
    weights = {key: value.detach().to(torch.float64).requires_grad_() for key, value in drafter.named_parameters()}
    (reference_row(weights, config, batch, some) * scale).sum().backward()
    (run(drafter, batch)[list(some)] * scale).sum().backward()
    for key, parameter in drafter.named_parameters():
        want = weights[key].grad
        assert parameter.grad is not None
        assert want is not None
        assert (parameter.grad.double() - want).norm() <= 1e-5 * want.norm(), key


def test_float64_forward_is_the_reference_to_the_last_digits() -> None:
    config = CASES["mixed"]
    drafter = a_drafter(config).double()
    batch = a_batch(config)
    want = reference_row({k: v.detach() for k, v in drafter.state_dict().items()}, config, batch)
    # Norms and rotary angles stay float32 in every dtype, which bounds the agreement.
    torch.testing.assert_close(run(drafter, batch)[: len(ANCHORS)], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "sliding, causal", "mixed"])
def test_no_context_token_at_or_after_the_anchor_or_of_another_document_reaches_a_block(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    before = run(drafter, batch)
    for index in range(LENGTH):
        changed = dict(batch, features=batch["features"].clone())
        changed["features"][0, index] += 3.0
        moved = {
            n
            for n, (old, new) in enumerate(zip(before, run(drafter, changed), strict=True))
            if not torch.equal(old, new)
        }
        allowed = {
            n
            for n, (document, anchor) in enumerate(ANCHORS)
            if DOCUMENTS[document][0] <= index < DOCUMENTS[document][0] + anchor
        }
        assert moved == allowed if name == "full" else moved <= allowed, index


@pytest.mark.parametrize("name", ["full", "sliding, not causal"])
def test_no_block_reaches_another(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    before = run(drafter, batch)
    for block in range(len(ANCHORS) + UNUSED):
        changed = dict(batch, embeds=batch["embeds"].clone())
        changed["embeds"][0, block * config.block_size : (block + 1) * config.block_size] += 1.0
        moved = {
            n
            for n, (old, new) in enumerate(zip(before, run(drafter, changed), strict=True))
            if not torch.equal(old, new)
        }
        assert moved == {block}


@given(st.integers(1, 40), st.integers(0, 3), st.sampled_from(sorted(CASES)), st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_the_future_never_leaks(anchor: int, after: int, name: str, seed: int) -> None:
    """One document, one block: all features from the anchor on, replaced by anything, change nothing."""
    config = CASES[name]
    drafter, generator = a_drafter(config), torch.Generator().manual_seed(seed)
    length, taps = anchor + after + 1, 2 * config.target_hidden_size
    features = torch.randn(1, length, taps, generator=generator)
    other = features.clone()
    other[:, anchor:] = torch.randn(1, length - anchor, taps, generator=generator) * 10
    batch = {
        "features": features,
        "embeds": torch.randn(1, config.block_size, config.hidden_size, generator=generator),
        "context_positions": torch.arange(length)[None],
        "block_positions": anchor + torch.arange(config.block_size)[None],
        "layout": Layout(
            torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[anchor]], dtype=torch.int32), length, config.block_size
        ),
    }
    assert torch.equal(run(drafter, batch), run(drafter, dict(batch, features=other)))


@pytest.mark.parametrize("name", CASES)
def test_drafting_from_the_cache_equals_the_training_forward(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    want = run(drafter, batch)
    for number, (document, anchor) in enumerate(ANCHORS):
        first = DOCUMENTS[document][0]
        cache = drafter.new_cache(rows=1, capacity=2)
        for step in range(0, anchor, 3):
            drafter.extend(cache, batch["features"][:, first + step : first + min(step + 3, anchor)])
        size = config.block_size
        got = drafter.draft(
            cache,
            batch["embeds"][:, number * size : (number + 1) * size],
            batch["block_positions"][:, number * size : (number + 1) * size],
        )
        torch.testing.assert_close(got[0], want[number], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "sliding, causal", "mixed"])
def test_rows_of_different_length_share_a_cache(name: str) -> None:
    config = CASES[name]
    drafter, batch = a_drafter(config), a_batch(config)
    size, numbers = config.block_size, (2, 5, 6)
    anchors = [ANCHORS[n][1] for n in numbers]
    want = run(drafter, batch)
    features = torch.zeros(len(numbers), max(anchors) + 2, batch["features"].shape[-1])
    for row, number in enumerate(numbers):
        first = DOCUMENTS[ANCHORS[number][0]][0]
        features[row, : anchors[row]] = batch["features"][0, first : first + anchors[row]]
    cache = drafter.new_cache(rows=len(numbers), capacity=4)
    drafter.extend(cache, features[:, :5], torch.tensor([min(a, 5) for a in anchors]))
    rest = [max(a - 5, 0) for a in anchors]
    drafter.extend(cache, features[:, 5:], torch.tensor(rest))
    assert cache.lengths == anchors
    embeds = torch.stack([batch["embeds"][0, n * size : (n + 1) * size] for n in numbers])
    positions = torch.tensor(anchors)[:, None] + torch.arange(size)
    got = drafter.draft(cache, embeds, positions)
    torch.testing.assert_close(got, torch.stack([want[n] for n in numbers]), rtol=1e-5, atol=1e-5)


def test_the_published_tensors_and_no_others() -> None:
    config = config_of()
    shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    want = {"fc.weight": (24, 48), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    for layer in range(2):
        want |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (24,),
                "post_attention_layernorm": (24,),
                "self_attn.q_proj": (32, 24),
                "self_attn.k_proj": (16, 24),
                "self_attn.v_proj": (16, 24),
                "self_attn.o_proj": (24, 32),
                "self_attn.q_norm": (8,),
                "self_attn.k_norm": (8,),
                "mlp.gate_proj": (32, 24),
                "mlp.up_proj": (32, 24),
                "mlp.down_proj": (24, 32),
            }.items()
        }
    assert shapes == want


def test_rotary_angles_survive_a_cast_of_the_drafter() -> None:
    Drafter(config_of()).to(torch.bfloat16)
    cos, _ = rotary(torch.tensor([[30000]]), 8, 1000.0)
    want = [math.cos(30000 * 1000.0 ** (-i / 4)) for i in range(4)]
    torch.testing.assert_close(cos[0, 0, 0, :4].double(), torch.tensor(want, dtype=torch.float64), atol=2e-2, rtol=0)
    assert cos.dtype == torch.float32


def test_rmsnorm_works_in_float32_and_returns_the_dtype_of_its_input() -> None:
    module = RMSNorm(4, 1e-6)
    x = torch.tensor([300.0, 400.0, 0.0, 0.0], dtype=torch.float16)  # squares overflow float16
    assert module(x).dtype == torch.float16
    torch.testing.assert_close(module(x).float(), x.float() / 250.0, atol=1e-3, rtol=1e-3)


def test_multiplier_and_soft_cap_reach_the_logits() -> None:
    config = config_of(output_multiplier=0.5, final_logit_softcapping=2.0)
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 24), torch.randn(50, 24)
    torch.testing.assert_close(logits(hidden, head, config), 2.0 * torch.tanh(hidden @ head.T * 0.5 / 2.0))
