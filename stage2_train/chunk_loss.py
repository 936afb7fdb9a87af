"""The loss of one chunk of blocks, from the head's raw products to their gradient: the region compiled on CUDA.

Called by loss.py for every chunk, always with gradients disabled and, on CUDA, with the same shapes. Pure functions of
tensors; which formulas run is decided by the Objective, a constant.

Shapes: b blocks, T trained slots, m = b*T, V vocabulary, K stored top logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage2_train.objectives import Objective

# The drafter's mass outside the teacher's top K is 1 - sum in float32, good to about 1e-7: from here down it is taken
# for this. Then the tail's pull on the drafter, p_tail at most, fades instead of following a rounding error.
TAIL_FLOOR = 1e-6
# bf16 has 8 significant bits: rounding to the nearest moves a number by at most this share of it.
BF16_HALF_ULP = 2.0**-8


@dataclass(frozen=True)
class Shaping:
    """How a target turns the raw products of its head into logits: a multiplier, then a soft cap."""

    multiplier: float = 1.0
    softcap: float | None = None

    def shape(self, raw: Tensor) -> Tensor:
        """Raw products -> logits."""
        if self.multiplier != 1.0:
            raw = raw * self.multiplier
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def unshape(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient of logits -> gradient of the raw products."""
        if self.softcap is not None:
            gradient = gradient * (1.0 - (logits / self.softcap).square())
        return gradient * self.multiplier if self.multiplier != 1.0 else gradient


Recipe = tuple[Objective, Shaping, torch.dtype]


class Targets(NamedTuple):
    """What b blocks are to predict, at their trained slots."""

    labels: Tensor
    """[b,T] int64"""
    counted: Tensor
    """[b,T] bool"""
    distributions: tuple[Tensor, Tensor, Tensor] | None
    """The teacher's ids int32 [b,T,K], logits bf16 [b,T,K] and logsumexp float32 [b,T]."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """The same with every tensor changed: all have blocks and slots as their first two axes."""
        given = self.distributions
        changed = None if given is None else (change(given[0]), change(given[1]), change(given[2]))
        return Targets(change(self.labels), change(self.counted), changed)


def dpace(probability: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [b,T] from the drafter's probability of each label [b,T], arXiv 2605.18810.

    w_j = sum over counted m >= j of prod over counted i <= m of q~_i, with q~ = (1 - alpha) q + alpha. At alpha = 0 the
    sum over all m of the products is the expected number of accepted tokens of the block, and w_j its derivative by
    log q_j. A slot that does not count is passed over: factor 1 in the product, nothing in the sum.
    """
    smoothed = torch.where(counted, (1.0 - alpha) * probability + alpha, 1.0)
    reached = torch.where(counted, smoothed.cumprod(dim=1), 0.0)
    return reached.flip(1).cumsum(dim=1).flip(1)


def slot_weights(objective: Objective, static: Tensor, nll: Tensor, counted: Tensor) -> Tensor:
    """[b,T] weights of the slots' losses before the division; 0 where a slot does not count. Never differentiated."""
    weights = dpace(torch.exp(-nll), counted, objective.alpha) if objective.weighting == "dpace" else static
    return torch.where(counted, weights, 0.0)


def teacher(logits: Tensor, logsumexp: Tensor, vocabulary: int, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """The teacher's probabilities of its top K [m,K], the largest first, and of all other tokens together [m,1].

    Logits of a bf16 target are stored as they are: what their sum lacks is the tail. `rounded`: they were float32, and
    their sum is off by up to 6 % either way; the tail is `rounded_tail`, and the top shares the rest.
    """
    top = torch.exp(logits - logsumexp)
    total = top.sum(-1, keepdim=True)
    if top.shape[-1] == vocabulary:
        return top / total, torch.zeros_like(total)
    if rounded:
        tail = rounded_tail(logits, top, total, vocabulary)
        return top * ((1.0 - tail) / total), tail
    top = top / total.clamp(min=1.0)
    return top, (1.0 - top.sum(-1, keepdim=True)).clamp(min=0.0)


def rounded_tail(logits: Tensor, top: Tensor, total: Tensor, vocabulary: int) -> Tensor:
    """The mass [m,1] outside top K logits that were rounded to bf16, from their probabilities `top` and their `total`.

    Between 1 - total e^h and 1 - total e^-h, where h bounds the rounding of a logit, and at most (V - K) times the
    smallest of the top. Inside these bounds: what follows when probabilities go on falling as a power of their rank, as
    they do from rank K/2 to K. The bundled target in float32, K = 64: 0.00021 of mass outside, 0.00027 by this, 0.0147
    by 1 - total, and as a drafter of itself it had a divergence of 0.114 nats a token by that, 0.00003 by this.
    """
    count = logits.shape[-1]
    slack = torch.exp(BF16_HALF_ULP * logits.abs().amax(-1, keepdim=True))
    smallest = top.amin(-1, keepdim=True)
    middle = logits[:, max(count // 2, 1) - 1, None]
    power = ((middle - logits.amin(-1, keepdim=True)) / math.log(2)).clamp(min=1.01) - 1.0
    estimate = smallest * count / power * (1.0 - (vocabulary / count) ** -power)
    estimate = torch.minimum(estimate, (vocabulary - count) * smallest)
    return torch.minimum(torch.maximum(estimate, 1.0 - total * slack), 1.0 - total / slack).clamp(0.0, 1.0)


def coarse_kl(top: Tensor, tail: Tensor, log_q: Tensor, q_tail: Tensor) -> Tensor:
    """KL(p || q) [m,1] over K + 1 outcomes: the teacher's top K tokens, and "any other".

    sum_k p_k log(p_k / q_k) + p_tail log(p_tail / q_tail), q_tail at least TAIL_FLOOR. Merging outcomes only loses
    information (data processing inequality), so this is at most the divergence over the whole vocabulary; what is
    missing is exactly p_tail * KL(p within the tail || q within the tail), which no stored number tells. Gradient by
    a logit: q_j - p_j in the top, q_j (1 - p_tail / q_tail) in the tail.
    """
    divergence = (torch.xlogy(top, top) - top * log_q).sum(-1, keepdim=True)
    return divergence + torch.xlogy(tail, tail) - tail * torch.log(q_tail)


def score(
    raw: Tensor, targets: Targets, static: Tensor, scale: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted loss (0-dim), nll [b,T], argmax == label [b,T], gradient by `raw` [m,V] in the recipe's dtype.

    raw [m,V] float32 (or float64); static [T], the weights that the objective fixes; scale 0-dim, 1 / denominator.

    The gradient is (q - p) * weight. It is written twice: for all words as if p were 0, then over it, with values
    worked out in float32, at the words where it is not: the label and the teacher's top words. Subtracting p there
    from bf16 would cancel, and adding would need atomics. A label among the top words is written twice, the same bits.
    """
    objective, shaping, dtype = recipe
    soft, hard = objective.soft, 1.0 - objective.soft
    logits = shaping.shape(raw)
    label = targets.labels.reshape(-1, 1)
    words = label if targets.distributions is None else torch.cat((label, targets.distributions[0].flatten(0, 1)), 1)
    # Everything relative to the largest logit: a rounded logsumexp would put 1e-6 on every probability, and on the
    # tail's all of it. Written as amax, sub, exp, sum, these become one pass over the logits in Triton.
    largest = logits.amax(dim=-1, keepdim=True)
    spread = (logits - largest).exp_()
    total = spread.sum(-1, keepdim=True)
    chosen = logits.gather(1, words)
    q = torch.exp(chosen - largest) / total
    log_q = chosen - largest - torch.log(total)
    nll = -log_q[:, 0].view_as(targets.labels)
    match = (logits.argmax(dim=-1, keepdim=True) == label).view_as(targets.labels)
    factor = (slot_weights(objective, static, nll, targets.counted) * scale).view(-1, 1)
    if targets.distributions is None:
        loss, special, elsewhere = -log_q, torch.expm1(log_q), factor
    else:
        stored, logsumexp = (tensor.flatten(0, 1) for tensor in targets.distributions[1:])
        top, tail = teacher(stored.to(raw.dtype), logsumexp[:, None], logits.shape[1], objective.rounded_logits)
        q_tail = (1.0 - q[:, 1:].sum(-1, keepdim=True)).clamp(min=TAIL_FLOOR)
        loss = soft * coarse_kl(top, tail, log_q[:, 1:], q_tail) - hard * log_q[:, :1]
        outside = 1.0 - tail / q_tail
        among = words[:, 1:] == label
        inside = torch.cat((among.any(-1, keepdim=True), torch.ones_like(among)), 1)
        p = torch.cat((torch.where(among, top, 0.0).sum(-1, keepdim=True), top), 1)
        special = soft * torch.where(inside, q - p, q * outside) + hard * torch.where(
            words == label, torch.expm1(log_q), q
        )
        elsewhere = (hard + soft * outside) * factor
    gradient = shaping.unshape(spread.mul_(elsewhere / total), logits).to(dtype)
    gradient.scatter_(1, words, shaping.unshape(special * factor, chosen).to(dtype))
    return (loss * factor).sum(), nll, match, gradient


class Scorer:
    """`score` for one objective and head; `compile` makes it one graph, of one shape, run with gradients disabled."""

    def __init__(self, objective: Objective, shaping: Shaping, weight: Tensor) -> None:
        """`weight` is the head's: gradients come in its dtype, sums in float32 (float64 for float64)."""
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.objective = objective
        self.static = torch.tensor(objective.static_weights(), dtype=wide, device=weight.device)
        self.compiled = False
        self.tick: Callable[[], None] = lambda: None
        """Called for every chunk: on a CPU the head of one micro-batch takes half a minute."""
        self._recipe: Recipe = (objective, shaping, weight.dtype)
        self._score: Callable[..., Any] = score

    def compile(self, backend: str = "inductor") -> None:
        """Mark for compilation at the first call. fullgraph: a break raises instead of running eagerly."""
        self._score = torch.compile(score, fullgraph=True, dynamic=False, backend=backend)
        self.compiled = True

    def __call__(self, raw: Tensor, targets: Targets, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`score`."""
        self.tick()
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self._score(raw, targets, self.static, scale, self._recipe)
        return found
