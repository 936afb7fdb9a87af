"""Decayed cross-entropy through the target's frozen head, and what is counted beside it.

Called by train.py and estimate.py. Logits exist for one chunk of slots at a time, in float32, and their gradient is
made in the same pass: at a vocabulary of 248,320 the logits of one row would take gigabytes.

Shapes: M slots, H hidden, V vocabulary, N blocks, B slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS_CPU = 2**22
CHUNK_ELEMENTS_CUDA = 2**29


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """[B] float32: 0 for the anchor's slot, exp(-(k-1)/gamma) for slot k; an early mistake costs the whole rest."""
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / gamma)
    weights[0] = 0.0
    return weights


@dataclass(frozen=True)
class Head:
    """The target's output head: frozen weight [V,H], and the shaping its logits need."""

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    def chunk_rows(self) -> int:
        """Slots per chunk: a few MB of logits on a CPU (cache), about 2 GiB on a GPU (large matrix products)."""
        elements = CHUNK_ELEMENTS_CUDA if self.weight.is_cuda else CHUNK_ELEMENTS_CPU
        return max(16, elements // self.weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[m,H] -> [m,V] in float32 (float64 stays float64)."""
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            raw = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            raw = torch.mm(hidden, self.weight.t())
            raw = raw if raw.dtype == torch.float64 else raw.float()
        if self.multiplier != 1.0:
            raw = raw * self.multiplier
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def unshape(self, gradient: Tensor, shaped: Tensor) -> Tensor:
        """Gradient of shaped logits -> gradient of the raw products."""
        if self.softcap is not None:
            gradient = gradient * (1.0 - (shaped / self.softcap).square())
        return gradient * self.multiplier if self.multiplier != 1.0 else gradient


def _measure(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, negative log-likelihood and argmax-equals-label of one chunk."""
    normaliser = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(1, labels[:, None]).squeeze(1)
    return normaliser, normaliser - picked, logits.argmax(dim=-1) == labels


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, weights: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        losses, matches = [], []
        for hidden_part, labels_part, weights_part, gradient_part in zip(
            *(tensor.split(head.chunk_rows()) for tensor in (hidden, labels, weights, gradient)), strict=True
        ):
            logits = head.logits(hidden_part)
            normaliser, loss, match = _measure(logits, labels_part)
            residual = torch.exp(logits - normaliser[:, None])
            residual.scatter_add_(1, labels_part[:, None], torch.full_like(loss, -1.0)[:, None])
            residual.mul_(weights_part[:, None])
            torch.mm(head.unshape(residual, logits).to(hidden.dtype), head.weight, out=gradient_part)
            losses.append(loss)
            matches.append(match)
        loss, match = torch.cat(losses), torch.cat(matches)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(loss, match)
        return (loss * weights).sum(), loss, match

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(gradient.dtype), None, None, None


def cross_entropy(hidden: Tensor, labels: Tensor, weights: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """sum_i weights_i * nll_i (0-dim, differentiable in hidden), nll [M], argmax == label [M].

    hidden [M,H] in the head's dtype; labels [M] int64; weights [M] already divided by their sum over all ranks.
    """
    if hidden.shape[0] == 0:  # all unsupervised: stay in the graph with a zero, so that this rank stays in step
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return hidden.sum(), empty, empty.bool()
    total, loss, match = _ChunkedCrossEntropy.apply(hidden, labels, weights, head)
    return total, loss, match


@torch.no_grad()
def measure(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """nll [M] and argmax == label [M] without a gradient."""
    parts = [
        _measure(head.logits(h), y)[1:]
        for h, y in zip(hidden.split(head.chunk_rows()), labels.split(head.chunk_rows()), strict=True)
    ]
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty.bool()
    return torch.cat([loss for loss, _ in parts]), torch.cat([match for _, match in parts])


def count(match: Tensor, loss: Tensor, counted: Tensor) -> Tensor:
    """Sums of a batch as one float64 vector of 3 (B-1) + 3, ready to be added over batches and ranks.

    match, loss [N,B] at every slot, counted [N,B] bool (slot 0 False). The vector: per slot 1..B-1 correct, per slot
    accepted (it and all before it correct), per slot counted; then blocks with a counted slot, tokens accepted in
    them, summed nll.
    """
    match = match & counted
    accepted = match[:, 1:].to(torch.int8).cumprod(dim=1)
    blocks = counted.any(dim=1).sum()
    tail = torch.stack([blocks, accepted.sum(), torch.where(counted, loss, 0.0).sum()]).double()
    per_slot = (match[:, 1:].sum(0), accepted.sum(0), counted[:, 1:].sum(0))
    return torch.cat([*(part.double() for part in per_slot), tail])


def read_counts(sums: Tensor, block_size: int) -> dict[str, float]:
    """Names for the vector of `count`: acceptance_length_estimate, nll, accuracy_slot_01.., acceptance_slot_01.. .

    acceptance_length_estimate is the mean over blocks of 1 + the number of leading slots whose argmax is the label:
    what a verifier would accept (the bonus token included) if its tokens were the stored ones. A block cut by the end
    of its document can reach only its own counted slots. Slots and blocks never counted are left out, not 0.
    """
    correct, accepted, counted = sums[: 3 * (block_size - 1)].view(3, block_size - 1).tolist()
    blocks, tokens, nll = sums[3 * (block_size - 1) :].tolist()
    found: dict[str, float] = {}
    if blocks:
        found["acceptance_length_estimate"] = 1.0 + tokens / blocks
        found["nll"] = nll / sum(counted)
    for slot, total in enumerate(counted, start=1):
        if total:
            found[f"accuracy_slot_{slot:02d}"] = correct[slot - 1] / total
            found[f"acceptance_slot_{slot:02d}"] = accepted[slot - 1] / total
    return found
