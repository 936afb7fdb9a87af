"""8-bit codes of hidden states: small error on data like the real ones, nothing clipped, the same bits everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import quantise
from shared.quantise import SAMPLED_TOKENS, channel_scales, decode, encode

Array = np.ndarray[Any, Any]


def slow_decode(codes: Array, scales: Array, channels: Array) -> Array:
    """value = code * token scale * channel scale in float32, one number after the other, rounded to bf16 at the end."""
    out = np.zeros(codes.shape, np.float32)
    for place in np.ndindex(codes.shape):
        token, channel = place[:-1], place[1:]
        value = np.float32(codes[place]) * np.float32(scales[token]) * np.float32(channels[channel])
        bits = int(np.float32(value).view(np.uint32))
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # round half to even, as bf16 keeps the upper half
        out[place] = np.uint32(kept).view(np.float32)
    return out


def features(tokens: int, taps: int, hidden: int, seed: int = 0, massive: int = 0) -> torch.Tensor:
    """bf16 [tokens, taps, hidden] with heavy tails, channels of sizes over two decades, and massive activations.

    `massive` tokens have two channels of each tap 10,000 times the usual size, as first tokens of real texts do; in
    other tokens the same channels are merely among the larger ones.
    """
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 1.1, (taps, hidden)))
    sizes[:, :2] = 3 * sizes.mean()
    values = rng.standard_t(5, (tokens, taps, hidden)) * sizes * np.exp(rng.normal(0, 0.4, (tokens, taps, 1)))
    for token in rng.choice(tokens, massive, replace=False):
        values[token, :, :2] = 1e4 * sizes.mean() * rng.choice([-1, 1], (taps, 2))
    return torch.from_numpy(values).to(torch.bfloat16)


def error(values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Relative L2 error per token and tap, in float64."""
    exact = values.double()
    return (decoded.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


def test_heavy_tails_and_massive_activations_keep_a_small_error() -> None:
    values = features(1500, 3, 512, massive=30)
    channels = channel_scales(features(700, 3, 512, seed=0)[:256])  # of other tokens, with the same channels
    encoded = encode(values, channels)
    found = error(values, decode(encoded.codes, encoded.scales, channels))
    assert found.median() <= 0.015, found.median()
    assert found.quantile(0.99) <= 0.03
    assert found.max() <= 0.06
    torch.testing.assert_close(encoded.relative_error.double(), found, rtol=1e-3, atol=1e-6)


def test_nothing_is_clipped_and_the_largest_value_is_kept() -> None:
    values = features(400, 2, 128, massive=40)
    channels = channel_scales(values)
    encoded = encode(values, channels)
    decoded = decode(encoded.codes, encoded.scales, channels).float()
    assert encoded.codes.to(torch.int32).abs().max() == 127
    assert (encoded.codes != -128).all()
    step = encoded.scales.unsqueeze(-1) * channels
    assert ((decoded - values.float()).abs() <= 0.501 * step + 0.004 * values.float().abs()).all()
    largest = (values.float() / channels).abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(decoded.gather(-1, largest), values.float().gather(-1, largest), rtol=0.004, atol=0)


def test_a_token_of_zeros_is_zeros_again_and_a_silent_tap_harms_nothing() -> None:
    values = features(50, 3, 64)
    values[:, 1] = 0
    values[7] = 0
    values[9] = -0.0
    channels = channel_scales(values)
    encoded = encode(values, channels)
    decoded = decode(encoded.codes, encoded.scales, channels)
    for where in (
        decoded[:, 1],
        decoded[7],
        decoded[9],
        encoded.codes[7],
        encoded.scales[7],
        encoded.relative_error[7],
    ):
        assert (where == 0).all()
    assert torch.isfinite(decoded.float()).all()
    assert (channels[1] == 1).all()


def test_values_too_small_for_float32s_full_precision_become_zero_and_say_so() -> None:
    values = features(400, 1, 64)
    channels = channel_scales(values)
    values = values[:4]
    values[2] *= 1e-38
    encoded = encode(values, channels)
    assert encoded.scales[2] == 0
    assert (encoded.codes[2] == 0).all()
    assert encoded.relative_error[2] == pytest.approx(1.0)
    assert (encoded.relative_error[[0, 1, 3]] < 0.03).all()


def test_silent_channels_do_not_coarsen_the_others_when_they_speak() -> None:
    values = features(300, 1, 256)
    values[:, :, 5] = 0
    values[::50, :, 5] = values.float().abs().median().to(torch.bfloat16)
    channels = channel_scales(values)
    found = encode(values, channels).relative_error
    assert found[::50].max() < 0.03
    assert channels[0, 5] == channels.min()


@pytest.mark.parametrize("tokens", [8, 30, 600])
def test_short_documents_whose_first_tokens_are_massive_set_usable_scales(tokens: int) -> None:
    """One token in four is massive in the batch that the scales come from."""
    values = features(600, 2, 256, massive=60)
    sample = features(tokens, 2, 256, massive=tokens // 4)
    found = encode(values, channel_scales(sample)).relative_error
    assert found.median() <= 0.03


def test_values_that_are_not_finite_do_not_touch_scales_or_other_tokens() -> None:
    values = features(200, 2, 64)
    channels = channel_scales(values)
    broken = values.clone()
    broken[3, 0, 5], broken[4, 1, 6], broken[5] = torch.nan, torch.inf, -torch.inf
    bad = channel_scales(broken)
    assert torch.isfinite(bad).all()
    assert (bad / channels).log().abs().median() < 0.05
    whole = [row for row in range(200) if row not in (3, 4, 5)]
    assert torch.equal(encode(broken, channels).codes[whole], encode(values, channels).codes[whole])
    assert (channel_scales(torch.full((4, 2, 8), torch.nan)) == 1).all()


def test_rounding_is_half_to_even() -> None:
    values = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    encoded = encode(values, torch.ones(8))
    assert encoded.scales.tolist() == [1.0]
    assert encoded.codes[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@settings(max_examples=120, deadline=None)
@given(
    tokens=st.integers(1, 12),
    taps=st.integers(0, 3),
    hidden=st.integers(1, 20),
    exponent=st.integers(-28, 28),
    spread=st.floats(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_size_comes_back_within_half_a_step(
    tokens: int, taps: int, hidden: int, exponent: int, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (tokens, taps, hidden) if taps else (tokens, hidden)
    sizes = 10.0 ** (exponent + rng.uniform(-spread, spread, shape) / 4)
    values = torch.from_numpy(rng.normal(size=shape) * sizes * (rng.random(shape) > 0.1)).to(torch.bfloat16)
    channels = channel_scales(values)
    assert channels.shape == values.shape[1:]
    assert channels.dtype == torch.float32
    assert torch.isfinite(channels).all()
    assert (channels >= 1).all()
    encoded = encode(values, channels)
    assert (encoded.codes.dtype, encoded.scales.dtype) == (torch.int8, torch.float32)
    assert encoded.scales.shape == values.shape[:-1]
    assert (encoded.codes.to(torch.int32).abs() <= 127).all()
    decoded = decode(encoded.codes, encoded.scales, channels)
    assert (decoded.dtype, decoded.shape) == (torch.bfloat16, values.shape)
    np.testing.assert_array_equal(
        decoded.float().numpy(), slow_decode(encoded.codes.numpy(), encoded.scales.numpy(), channels.numpy())
    )
    step = (encoded.scales.unsqueeze(-1) * channels).double()
    off = (decoded.double() - values.double()).abs()
    assert (off <= 0.5001 * step + 2**-8 * (values.double().abs() + step)).all()
    assert torch.isfinite(encoded.relative_error).all()


def test_scales_chosen_per_token_decode_as_each_block_alone() -> None:
    tables, codes, scales, which, wanted = [], [], [], [], []
    for block in range(3):
        values = features(20 + block, 2, 32, seed=block)
        channels = channel_scales(values)
        encoded = encode(values, channels)
        tables.append(channels)
        codes.append(encoded.codes)
        scales.append(encoded.scales)
        which.append(torch.full((len(values),), block, dtype=torch.int32))
        wanted.append(decode(encoded.codes, encoded.scales, channels))
    order = torch.randperm(63, generator=torch.Generator().manual_seed(0))
    found = decode(
        torch.cat(codes)[order], torch.cat(scales)[order], torch.stack(tables), which=torch.cat(which)[order]
    )
    assert torch.equal(found, torch.cat(wanted)[order])


def test_work_in_pieces_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = features(333, 2, 48, massive=5)
    channels = channel_scales(values)
    whole = encode(values, channels)
    monkeypatch.setattr(quantise, "_CHUNK_ELEMENTS", {"cpu": 700, "cuda": 700})
    assert torch.equal(channel_scales(values), channels)
    pieces = encode(values, channels)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    assert torch.equal(pieces.relative_error, whole.relative_error)
    one_by_one = [encode(values[i : i + 1], channels) for i in range(0, 333, 7)]
    assert torch.equal(torch.cat([each.codes for each in one_by_one]), whole.codes[::7])


def test_scales_of_a_long_batch_come_from_evenly_strided_tokens() -> None:
    values = features(SAMPLED_TOKENS * 3 + 1, 1, 8)
    assert torch.equal(channel_scales(values), channel_scales(values[::4]))
    values[1::4] *= 100  # tokens that are not sampled
    assert torch.equal(channel_scales(values), channel_scales(values[::4]))


def test_empty_batches_have_empty_codes() -> None:
    encoded = encode(torch.empty(0, 2, 8, dtype=torch.bfloat16), torch.ones(2, 8))
    assert encoded.codes.shape == (0, 2, 8)
    assert decode(encoded.codes, encoded.scales, torch.ones(2, 8)).shape == (0, 2, 8)


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_cpu() -> None:
    values = features(3000, 2, 640, massive=20)
    channels = channel_scales(values)
    on_gpu = values.cuda()
    assert torch.equal(channel_scales(on_gpu).cpu(), channels)
    here, there = encode(values, channels), encode(on_gpu, channels.cuda())
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.scales.cpu(), here.scales)
    torch.testing.assert_close(there.relative_error.cpu(), here.relative_error, rtol=1e-4, atol=1e-7)
    assert torch.equal(
        decode(there.codes, there.scales, channels.cuda()).cpu(), decode(here.codes, here.scales, channels)
    )
