"""The proof that speculative text is the target's own: token for token, or a numerical tie that is shown.

Called by stage2_train.evaluate after both loops of decode.py have run. A verified block and a single token pass
through differently shaped kernels, so in low precision two nearly equal logits may swap places; nothing else may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.target import Target

# bfloat16: of some 60 swaps seen with a 135M target all but one had gaps of 0 - 0.25, one 0.375; float32: no swap yet.
TIE_TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.03, torch.float32: 1e-3}
# How large a target's rounding is depends on the target, so it is measured where texts differ: a gap of up to this many
# times the measured change of a logit between two kernel shapes is a tie too. A wrong cache is off by whole logits.
NOISE_FACTOR = 3.0
NOISE_TOP = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two texts differ; `gap` is by how much the target prefers its best token there.

    `gap` = highest logit minus the lower of the two tokens' logits, from a fresh forward without any cache. `noise` =
    largest change of the 64 highest logits there when the same forward runs in another shape.
    """

    prompt_id: str
    position: int
    target_token: int | None
    speculative_token: int | None
    gap: float | None
    noise: float | None
    tie: bool

    def sentence(self) -> str:
        """One line for people."""
        gap = "one text is shorter" if self.gap is None else f"gap {self.gap:.3g}, rounding {self.noise:.2g}"
        return (
            f"prompt {self.prompt_id}, new token {self.position}: target {self.target_token}, speculative "
            f"{self.speculative_token}, {gap}" + (" (numerical tie)" if self.tie else "")
        )


@torch.inference_mode()
def first_difference(
    target: Target, prompt_id: str, prompt: Sequence[int], texts: tuple[Sequence[int], Sequence[int]], tolerance: float
) -> Difference | None:
    """Compare (target's own, speculative) texts of one prompt; None when they are equal."""
    own, speculative = texts
    common = next(
        (i for i, pair in enumerate(zip(own, speculative, strict=False)) if pair[0] != pair[1]),
        min(len(own), len(speculative)),
    )
    if common == len(own) == len(speculative):
        return None
    a = own[common] if common < len(own) else None
    b = speculative[common] if common < len(speculative) else None
    if a is None or b is None:
        return Difference(prompt_id, common, a, b, None, None, False)
    prefix = [*prompt, *own[:common]]
    last = next_token_logits(target, prefix)
    gap = float(last.max() - torch.minimum(last[a], last[b]))
    noise = rounding(target, prefix, own[common : common + 16], last)
    return Difference(prompt_id, common, a, b, gap, noise, gap <= max(tolerance, NOISE_FACTOR * noise))


def next_token_logits(target: Target, ids: Sequence[int], after: Sequence[int] = (), rows: int = 1) -> torch.Tensor:
    """Logits [V] in float32 after `ids`, by a forward that shares nothing with the decoding loops.

    `after` (tokens behind, which a causal target does not see) and `rows` (copies) change only the kernels' shapes.
    """
    tokens = torch.tensor([[*ids, *after]] * rows, device=target.device)
    hidden = target.decoder(tokens, use_cache=False).last_hidden_state
    return target.logits(hidden[0, len(ids) - 1]).float()


def rounding(target: Target, ids: Sequence[int], after: Sequence[int], alone: torch.Tensor) -> float:
    """Largest change of the highest logits of `alone` when the same forward runs on four rows with tokens behind."""
    top = alone.topk(min(NOISE_TOP, alone.shape[-1])).indices
    return float((next_token_logits(target, ids, after, rows=4)[top] - alone[top]).abs().max())


def tie_tolerance(dtype: torch.dtype, asked: float | None) -> float:
    """The gap up to which a difference counts as a tie in this dtype."""
    return TIE_TOLERANCE[dtype] if asked is None else asked
