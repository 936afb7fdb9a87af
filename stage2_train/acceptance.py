"""What an accepted length is, counted from the cycles of speculative decoding. Pure: no torch, no files.

Called by stage2_train.evaluate with the cycles that stage2_train.decode recorded.

Definitions. A cycle is one verification by the target: of the anchor (known) and D drafts behind it, of which draft k
is the k-th token after the anchor. D is B-1 for a block of B slots, and B with shifted labels. `accepted` drafts pass,
then the target adds one token of its own, the bonus (or the correction): a cycle gains accepted + 1 tokens, so a length
lies between 1 and D+1. Tokens after an end-of-sequence token or beyond the token limit are not counted. The token
sampled by the prefill is not part of any cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Cycle:
    """One verification: drafts that passed (0..D) and tokens kept of accepted + 1 (fewer at the end of a text)."""

    accepted: int
    kept: int

    @property
    def cut(self) -> bool:
        """Whether the text ended inside this cycle's tokens."""
        return self.kept < self.accepted + 1


@dataclass(frozen=True, slots=True)
class Interval:
    """A bootstrap percentile interval and how it was made."""

    low: float
    high: float
    level: float
    resamples: int
    seed: int


def acceptance_length(prompts: Sequence[Sequence[Cycle]]) -> float | None:
    """Pooled length: tokens kept per cycle over all prompts; None without a cycle."""
    cycles = sum(len(cycles) for cycles in prompts)
    return sum(cycle.kept for cycles in prompts for cycle in cycles) / cycles if cycles else None


def acceptance_length_macro(prompts: Sequence[Sequence[Cycle]]) -> float | None:
    """Mean over prompts of each prompt's own length; prompts without a cycle have none and are left out."""
    lengths = [sum(cycle.kept for cycle in cycles) / len(cycles) for cycles in prompts if cycles]
    return sum(lengths) / len(lengths) if lengths else None


def acceptance_per_position(
    prompts: Sequence[Sequence[Cycle]], drafts: int
) -> tuple[list[float | None], list[float | None]]:
    """P(draft k accepted) and P(draft k accepted | draft k-1 accepted) for k = 1 .. `drafts`.

    A cycle judges draft k unless its text ended before it. Drafts never judged give None, not 0.
    """
    judged, reached, accepted = np.zeros((3, drafts + 1), dtype=np.int64)
    for cycles in prompts:
        for cycle in cycles:
            last = cycle.kept if cycle.cut else drafts
            judged[1 : last + 1] += 1
            reached[1 : min(cycle.accepted + 1, last) + 1] += 1
            accepted[1 : min(cycle.accepted, last) + 1] += 1
    plain = [float(accepted[k] / judged[k]) if judged[k] else None for k in range(1, drafts + 1)]
    conditional = [float(accepted[k] / reached[k]) if reached[k] else None for k in range(1, drafts + 1)]
    return plain, conditional


def bootstrap_interval(
    prompts: Sequence[Sequence[Cycle]], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> Interval | None:
    """Interval of the pooled length when prompts are drawn anew with replacement; None for fewer than two prompts."""
    kept = np.array([sum(cycle.kept for cycle in cycles) for cycles in prompts if cycles], dtype=np.float64)
    count = np.array([len(cycles) for cycles in prompts if cycles], dtype=np.float64)
    if len(kept) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(kept), size=(resamples, len(kept)))
    lengths = kept[draws].sum(axis=1) / count[draws].sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(lengths, [tail, 1 - tail])
    return Interval(float(low), float(high), level, resamples, seed)


def mean_cycles(prompts: Sequence[Sequence[Cycle]]) -> float | None:
    """Verifications per prompt."""
    return sum(len(cycles) for cycles in prompts) / len(prompts) if prompts else None
