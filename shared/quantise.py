"""8-bit codes of hidden states: value = code * token scale * channel scale. Pure torch, on whatever device the data is.

Stage 1 encodes before the features leave the target's device, stage 2 decodes after the codes reach the trainer's.
The channel scale takes out that some channels are a hundred times larger than others, for all tokens of a block; the
token scale is set by the token's largest value, so nothing is ever clipped, massive activations included.

Shapes: N tokens, T groups per token (taps, or none), H channels of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = 127
# Enough tokens for quantiles that no longer move; sorting all of a batch would cost more than the codes do.
SAMPLED_TOKENS = 2048
# A channel's scale is what nine of ten tokens stay below: on real features the error is a third smaller than with the
# median (0.66 % against 1.03 %), because fewer tokens have one channel far above its scale. In a batch of very short
# documents more than a tenth of the tokens can be massive activations, which the median alone survives: hence the cap.
QUANTILE = 0.9
CAP = 4.0
# No channel's scale is below this part of the middle channel's: its steps are small enough, and one token where an
# otherwise silent channel speaks would coarsen every other channel of that token.
FLOOR = 1 / 8
_WIDEST = 2.0**30
# Elements of one float32 temporary: 64 MB on a GPU, what stays in a CPU's second cache otherwise.
_CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 18}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Codes int8 [N, *T, H], scales float32 [N, *T], and the relative L2 error of what they decode to [N, *T]."""

    codes: Tensor
    scales: Tensor
    relative_error: Tensor


def channel_scales(values: Tensor) -> Tensor:
    """float32 [*T, H] from tokens [N, *T, H]: how large |x| usually is in each channel, over <= SAMPLED_TOKENS of them.

    Only ratios matter, so the smallest of a group is 1: no value can overflow when it is divided. Values that are not
    finite count for nothing. Tokens are taken at even strides and quantiles are values of the data: the same on every
    device.
    """
    sample = values[:: -(-len(values) // SAMPLED_TOKENS)].flatten(1)
    columns = max(1, _chunk_elements(values) // len(sample))
    usual = torch.cat([_usual_size(part) for part in sample.split(columns, dim=1)]).view(values.shape[1:])
    middle = torch.where(usual > 0, usual, torch.nan).nanmedian(dim=-1, keepdim=True).values
    floored = torch.maximum(usual, middle * FLOOR)
    scales = floored / floored.amin(dim=-1, keepdim=True)
    return scales.nan_to_num_(nan=1.0).clamp_(max=_WIDEST)  # a group without any value: all channels alike


def _usual_size(sample: Tensor) -> Tensor:
    """[C] of [n, C]: the QUANTILE of |x| over the finite values of each column, at most CAP medians, 0 without any."""
    size = sample.float().abs().T
    finite = size.isfinite()
    ordered = torch.where(finite, size, torch.inf).sort(dim=-1).values
    last = finite.sum(dim=-1) - 1
    high, middle = (
        ordered.gather(-1, (last * tenths // 10).clamp_(min=0).unsqueeze(-1)).squeeze(-1)
        for tenths in (round(10 * QUANTILE), 5)
    )
    return torch.where(last < 0, 0.0, torch.minimum(high, CAP * middle))


def encode(values: Tensor, channels: Tensor) -> Encoded:
    """Codes of tokens [N, *T, H] with the channel scales [*T, H] of their block; rounding is half to even.

    A token whose values are all zero, or below what float32 holds in full precision, gets scale 0 and decodes to 0.
    Rows with a value that is not finite give codes that mean nothing: the caller leaves such documents out.
    """
    out = Encoded(
        torch.empty(values.shape, dtype=torch.int8, device=values.device),
        torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device),
        torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device),
    )
    for part in _chunks(values):
        exact = values[part]
        scaled = exact / channels
        scale = torch.linalg.vector_norm(scaled, torch.inf, dim=-1) / torch.tensor(float(LEVELS), device=values.device)
        # Never above LEVELS after rounding: a scale in float32's normal range is off by less than 1e-7.
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
        codes = scaled.div_(torch.where(scale == 0, 1.0, scale).unsqueeze(-1)).round_()
        out.codes[part], out.scales[part] = codes, scale
        kept = codes.mul_(scale.unsqueeze(-1)).mul_(channels).to(torch.bfloat16)
        out.relative_error[part] = _relative_error(kept, exact)
    return out


def _relative_error(kept: Tensor, exact: Tensor) -> Tensor:
    """[n, *T] of [n, *T, H]: L2 norm of the difference over that of `exact`; 0 where that is 0."""
    largest = torch.linalg.vector_norm(exact, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    exact = exact / largest  # squares of what bf16 can hold would leave float32's range
    off = torch.linalg.vector_norm((kept / largest).sub_(exact), dim=-1)
    return (off / torch.linalg.vector_norm(exact, dim=-1)).nan_to_num_()


def decode(codes: Tensor, scales: Tensor, channels: Tensor, which: Tensor | None = None) -> Tensor:
    """bf16 [N, *T, H] of codes int8 [N, *T, H] and scales [N, *T]; the same bits on every device.

    `channels` is [*T, H]; or [U, *T, H] with `which` [N], the number of the scales of each token.
    """
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for part in _chunks(codes):
        factors = channels if which is None else channels.index_select(0, which[part])
        torch.mul(codes[part] * scales[part].unsqueeze(-1), factors, out=out[part])
    return out


def _chunks(values: Tensor) -> Iterator[slice]:
    """Token ranges whose float32 copies stay small."""
    step = max(1, _chunk_elements(values) // max(1, values[:1].numel()))
    for start in range(0, len(values), step):
        yield slice(start, start + step)


def _chunk_elements(values: Tensor) -> int:
    return _CHUNK_ELEMENTS["cuda" if values.is_cuda else "cpu"]
