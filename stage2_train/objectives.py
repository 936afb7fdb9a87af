"""What a drafter is trained for: loss, weights of the slots, labels, and which slots count. No torch.

Read by config.py (checks), data.py (labels), step.py (denominator) and chunk_loss.py (the formulas on tensors).

Shapes: R rows, N anchor slots, B slots of a block, T trained slots of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shared.errors import ConfigRefused

if TYPE_CHECKING:
    import numpy as np

LossName = Literal["ce", "kl", "mixed"]
WeightingName = Literal["decay", "dpace", "uniform"]
LabelsName = Literal["data", "teacher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The one description of the training objective.

    loss: "ce", -log q(label); "kl", the divergence of the stored teacher distribution from the drafter's q; "mixed",
    (1 - soft_weight) ce + soft_weight kl.
    weighting: "decay", exp(-(d-1)/gamma) for a slot that predicts the d-th token after the anchor (DFlash,
    arXiv 2602.06036); "dpace", from the drafter's own probabilities (D-PACE, arXiv 2605.18810, chunk_loss.dpace);
    "uniform", 1.
    labels: "data", the tokens of the documents; "teacher", the most probable tokens of the stored distributions.
    shift_labels: slot k predicts token a + k + 1 instead of a + k. slot_0: slot 0 is trained too.
    rounded_logits: the store rounded the teacher's logits (those of a target that ran in float32), which says nothing
    exact about the mass outside them; a fact of the store, not a choice.

    Raises ConfigRefused for a value that makes no sense.
    """

    block_size: int
    loss: LossName = "ce"
    weighting: WeightingName = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    soft_weight: float = 0.5
    labels: LabelsName = "data"
    shift_labels: bool = False
    slot_0: bool = False
    rounded_logits: bool = False

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ConfigRefused(f"--gamma is {self.gamma}; it must be above 0 (a large one weighs all slots alike)")
        if not 0 < self.alpha <= 1:
            raise ConfigRefused(
                f"--alpha is {self.alpha}; it must lie in 0 < alpha <= 1 (at 0 one slot that the drafter gives no "
                "chance takes the weight of all behind it away, for good)"
            )
        if not 0 < self.soft_weight < 1:
            raise ConfigRefused(
                f"--soft-weight is {self.soft_weight}; it must lie between 0 and 1 (those are --loss ce and kl)"
            )
        if self.shift_labels and not self.slot_0:
            raise ConfigRefused(
                "--shift-labels without --slot-0: slot 0 then predicts the first token after the anchor, and without "
                "it nothing drafts that token"
            )

    @property
    def first_slot(self) -> int:
        """The first trained slot; the others follow without a gap."""
        return 0 if self.slot_0 else 1

    @property
    def distances(self) -> tuple[int, ...]:
        """For each trained slot, how many tokens after the anchor the one it predicts stands."""
        return tuple(slot + self.shift_labels for slot in range(self.first_slot, self.block_size))

    @property
    def first_draft(self) -> int:
        """Which of the trained slots is the first to predict a token that is not known yet (0, or 1)."""
        return sum(distance < 1 for distance in self.distances)

    @property
    def drafts(self) -> int:
        """Tokens a block drafts."""
        return len(self.distances) - self.first_draft

    @property
    def soft(self) -> float:
        """The share of the loss that is divergence from the teacher."""
        return {"ce": 0.0, "kl": 1.0, "mixed": self.soft_weight}[self.loss]

    @property
    def needs_distributions(self) -> bool:
        """Whether batches must carry the teacher's stored distributions."""
        return self.loss != "ce"

    @property
    def needs_topk(self) -> bool:
        """Whether the store must hold the teacher's top logits at all."""
        return self.needs_distributions or self.labels == "teacher"

    def static_weights(self) -> tuple[float, ...]:
        """The weight of each trained slot where it does not depend on the drafter; 1 for D-PACE.

        An early mistake costs the whole rest of the block: hence the decay. A known token (slot 0 of an unshifted
        block) weighs no more than the first draft.
        """
        if self.weighting != "decay":
            return (1.0,) * len(self.distances)
        return tuple(math.exp(-(max(distance, 1) - 1) / self.gamma) for distance in self.distances)

    def denominator(self, counted: np.ndarray[Any, Any]) -> float:
        """What a batch adds to the divisor of the loss, from `counted` bool [R,N,B] alone.

        decay, uniform: the sum of the weights, so that the loss is their weighted mean over slots. dpace: the number
        of blocks with a counted slot, because a block's weighted loss is as a whole (minus) the expected number of
        accepted tokens to be raised. Every rank can add these up before the forward pass.
        """
        trained = counted[..., self.first_slot :]
        if self.weighting == "dpace":
            return float(trained.any(axis=-1).sum())
        return float((trained * self.static_weights()).sum())
