"""The learning rate of every update: a linear warm-up, then a cosine, or flat and a decay at the end (WSD).

Pure; called by step.py with the knobs of config.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["cosine", "wsd"]
Decay = Literal["linear", "sqrt"]

# AdamW divides the rate by as little as 0.1 (its first bias correction), Muon multiplies it by 0.2 sqrt(side): from
# 3.4e38 on that is no float32 any more, and torch's error names no option.
HIGHEST_LEARNING_RATE = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A schedule over `total` updates; ratios are shares of `total` (and `min_ratio` of `peak`)."""

    total: int
    peak: float
    warmup_ratio: float
    min_ratio: float = 0.0
    schedule: Schedule = "cosine"
    decay_ratio: float = 0.2
    """wsd: the share of the updates, at the end, in which the rate falls."""
    decay: Decay = "sqrt"
    """wsd: how it falls from 1 to 0 with progress x: linear 1 - x, sqrt 1 - sqrt(x)."""


def learning_rate(step: int, rate: Rate) -> float:
    """Rate of the update number `step` (0-based): linear to the peak, then down to peak * min_ratio.

    The first update has a rate above 0 and the lowest one is reached only after the last update (a rate of 0 would
    waste one). Cosine: half a period over all updates after the warm-up (SGDR, arXiv 1608.03983). WSD: the peak until
    the last `decay_ratio` of the updates (MiniCPM, arXiv 2404.06395; 1 - sqrt from arXiv 2405.18392); a warm-up that
    reaches into that share shortens it.
    """
    warmup = round(rate.total * rate.warmup_ratio)
    if step < warmup:
        return rate.peak * ((step + 1) / warmup)
    start = warmup if rate.schedule == "cosine" else max(warmup, rate.total - round(rate.total * rate.decay_ratio))
    progress = max(0.0, (step - start) / max(1, rate.total - start))
    if rate.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - (progress if rate.decay == "linear" else math.sqrt(progress))
    return rate.peak * (rate.min_ratio + (1.0 - rate.min_ratio) * share)
