"""The proof that speculative text is the target's own: token for token, or a numerical tie that is shown.

Called by stage2_train.evaluate after both loops of decode.py have run. A verified block and a single token pass
through differently shaped kernels, so in low precision two nearly equal logits may swap places; nothing else may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.target import Target

# bfloat16: measured gaps at such swaps are 0 - 0.125; float32: none of 480 positions swapped.
TIE_TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.03, torch.float32: 1e-3}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two texts differ; `gap` is by how much the target prefers its best token there.

    `gap` = highest logit minus the lower of the two tokens' logits, from a fresh forward without any cache.
    """

    prompt_id: str
    position: int
    target_token: int | None
    speculative_token: int | None
    gap: float | None
    tie: bool

    def sentence(self) -> str:
        """One line for people."""
        gap = "one text is shorter" if self.gap is None else f"gap {self.gap:.4g}"
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
        return Difference(prompt_id, common, a, b, None, False)
    last = next_token_logits(target, [*prompt, *own[:common]])
    gap = float(last.max() - torch.minimum(last[a], last[b]))
    return Difference(prompt_id, common, a, b, gap, gap <= tolerance)


def next_token_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Logits [V] in float32 after `ids`, by a forward that shares nothing with the decoding loops."""
    hidden = target.decoder(torch.tensor([list(ids)], device=target.device), use_cache=False).last_hidden_state
    return target.logits(hidden[0, -1]).float()


def tie_tolerance(dtype: torch.dtype, asked: float | None) -> float:
    """The gap up to which a difference counts as a tie in this dtype."""
    return TIE_TOLERANCE[dtype] if asked is None else asked
