"""Objectives the slow way: float64, whole vocabularies, one slot at a time, gradients by autograd. For tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stage2_train.chunk_loss import Targets
from stage2_train.objectives import Objective


@dataclass(frozen=True)
class SlowHead:
    """Weight [V,H] float64, multiplier, soft cap."""

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    def log_probabilities(self, state: Tensor) -> Tensor:
        """log q [V] for one state [H]."""
        logits = (self.weight @ state) * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return torch.log_softmax(logits, dim=0)


def slow_dpace(probabilities: list[float], counted: list[bool], alpha: float) -> list[float]:
    """w_j = sum_{m >= j} prod_{i <= m} q~_i over the counted slots of one block, by its double sum."""
    found = []
    for j in range(len(probabilities)):
        total = 0.0
        for m in range(j, len(probabilities)):
            if counted[m]:
                total += math.prod((1 - alpha) * probabilities[i] + alpha for i in range(m + 1) if counted[i])
        found.append(total if counted[j] else 0.0)
    return found


def slow_coarse_kl(log_q: Tensor, ids: list[int], logits: Tensor, logsumexp: float) -> Tensor:
    """KL over the top words and one bucket for all others, each probability written out."""
    p = [math.exp(float(value) - logsumexp) for value in logits]
    total = sum(p)
    if len(p) == len(log_q) or total > 1:
        p = [value / total for value in p]
    rest = 1.0 - sum(p)
    result = log_q.new_zeros(())
    for word, probability in zip(ids, p, strict=True):
        if probability > 0:
            result = result + probability * (math.log(probability) - log_q[word])
    if rest > 1e-12:
        others = torch.ones(len(log_q), dtype=torch.bool)
        others[ids] = False
        result = result + rest * (math.log(rest) - torch.logsumexp(log_q[others], dim=0))
    return result


def slow_loss(states: Tensor, targets: Targets, objective: Objective, head: SlowHead) -> tuple[Tensor, float]:
    """(sum of weighted losses, denominator) of blocks with trained states [N,T,H]; differentiable in them."""
    total, denominator = states.new_zeros(()), 0.0
    for block in range(len(states)):
        counted = targets.counted[block].tolist()
        log_q = [head.log_probabilities(state) for state in states[block]]
        nll = [-row[label] for row, label in zip(log_q, targets.labels[block].tolist(), strict=True)]
        weights = {
            "uniform": [1.0] * len(nll),
            "decay": [math.exp(-(max(distance, 1) - 1) / objective.gamma) for distance in objective.distances],
            "dpace": slow_dpace([math.exp(-value.item()) for value in nll], counted, objective.alpha),
        }[objective.weighting]
        if objective.weighting == "dpace":
            denominator += any(counted)
        for slot, counts in enumerate(counted):
            if not counts:
                continue
            if objective.weighting != "dpace":
                denominator += weights[slot]
            loss = (1 - objective.soft) * nll[slot]
            if objective.soft:
                assert targets.distributions is not None
                ids, logits, logsumexp = (tensor[block, slot] for tensor in targets.distributions)
                loss = loss + objective.soft * slow_coarse_kl(log_q[slot], ids.tolist(), logits, float(logsumexp))
            total = total + weights[slot] * loss
    return total, denominator
