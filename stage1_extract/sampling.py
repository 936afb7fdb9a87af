"""From logits to the next tokens, so that a row's answer depends on its own seed and not on the batch around it.

Called by stage1_extract/decoding.py and decoding_padded.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, count: int) -> np.ndarray[Any, Any]:
    """The row's random numbers in [0, 1), one per token: a function of its seed alone, whatever the batch."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count, dtype=np.float32)


def pick(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Next token ids [R] from logits [R, V]: the largest, or the inverse cumulative distribution at `uniform` [R]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.float() / temperature, -1).cumsum(-1)
    at = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True).clamp_max(logits.shape[-1] - 1)[:, 0]
