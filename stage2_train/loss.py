"""The loss through the target's frozen head, chunk by chunk, and what is counted beside it.

Called by objective.py. Logits exist for one chunk of blocks at a time, in float32, and their gradient is made in the
same pass: at a vocabulary of 248,320 the logits of one row would take gigabytes. Next: chunk_loss.py (the formulas).

Shapes: N blocks, B slots per block, T trained slots, D drafts, H hidden, V vocabulary, K stored top logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stage2_train.chunk_loss import Scorer, Shaping, Targets

# Logits of a chunk on a CPU: a few MB, so that they stay in its cache.
CHUNK_ELEMENTS_CPU = 2**22
# Slots of a chunk on a GPU. Products with float32 results: 672 TFLOP/s at 2,048 rows, 599 at 4,096 (H200).
CHUNK_SLOTS_CUDA = 2048


@dataclass(frozen=True)
class Head:
    """The target's output head: frozen weight [V,H], and the shaping its logits need."""

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    def shaping(self) -> Shaping:
        """What turns raw products into logits."""
        return Shaping(self.multiplier, self.softcap)

    def raw(self, hidden: Tensor) -> Tensor:
        """[m,H] -> raw products [m,V] in float32 (float64 stays float64)."""
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        raw = torch.mm(hidden, self.weight.t())
        return raw if raw.dtype == torch.float64 else raw.float()


class Found(NamedTuple):
    """What the head says about N blocks."""

    total: Tensor
    """0-dim: sum over counted slots of weight * loss / denominator; differentiable in the states."""
    nll: Tensor
    """[N,T] -log q(label)."""
    match: Tensor
    """[N,T] bool: argmax == label."""


def blocks_per_chunk(blocks: int, trained: int, head: Head) -> int:
    """Blocks of a chunk, so that chunks are whole blocks, nearly equal, and within the size that is fast."""
    slots = CHUNK_SLOTS_CUDA if head.weight.is_cuda else max(16, CHUNK_ELEMENTS_CPU // head.weight.shape[0])
    most = max(1, slots // trained)
    return -(-blocks // -(-blocks // most))


def _chunks(states: Tensor, targets: Targets, size: int, pad: bool) -> Iterator[tuple[slice, Tensor, Targets]]:
    """Parts of `size` blocks; with `pad` the last one is filled up with blocks that do not count."""
    for first in range(0, len(states), size):
        part = slice(first, min(first + size, len(states)))
        missing = size - (part.stop - part.start) if pad else 0

        def cut(tensor: Tensor, part: slice = part, missing: int = missing) -> Tensor:
            piece = tensor[part]
            return F.pad(piece, (0, 0) * (piece.ndim - 1) + (0, missing)) if missing else piece

        yield part, cut(states).flatten(0, 1), targets.each(cut)


def _run(
    states: Tensor, targets: Targets, scale: Tensor, head: Head, scorer: Scorer, gradient: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, nll and match over all chunks of trained states [N,T,H]; the gradient by them goes into `gradient`."""
    blocks, trained = targets.labels.shape
    size = blocks_per_chunk(blocks, trained, head)
    total, nll, match = scale.new_zeros(()), [], []
    for part, rows, aims in _chunks(states, targets, size, scorer.compiled):
        loss, part_nll, part_match, residual = scorer(head.raw(rows), aims, scale)
        if gradient is not None:
            kept = part.stop - part.start
            gradient[part] = torch.mm(residual, head.weight).view(-1, trained, head.weight.shape[1])[:kept]
        total = total + loss
        nll.append(part_nll)
        match.append(part_match)
    return total, torch.cat(nll)[:blocks], torch.cat(match)[:blocks]


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is made with the loss; `states` [N,B,H] may hold slots before the trained ones."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, targets: Targets, scale: Tensor, head: Head, scorer: Scorer
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(states)
        first = states.shape[1] - targets.labels.shape[1]
        total, nll, match = _run(states[:, first:], targets, scale, head, scorer, gradient[:, first:])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll, match)
        return total, nll, match

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(gradient.dtype), None, None, None, None


def blocks_loss(states: Tensor, targets: Targets, denominator: float | Tensor, head: Head, scorer: Scorer) -> Found:
    """The objective's loss of N blocks, divided by `denominator` (its sum over all ranks and micro-batches).

    states [N,B,H] in the head's dtype, of all slots: those before the trained ones get a gradient of 0.
    """
    if states.shape[0] == 0:
        return _nothing(states, targets)
    return Found(*_ChunkedLoss.apply(states, targets, _scale(denominator, head), head, scorer))


@torch.no_grad()
def blocks_measure(states: Tensor, targets: Targets, head: Head, scorer: Scorer) -> Found:
    """The same without a gradient and divided by 1; on CUDA it runs the very graph that training compiled."""
    if states.shape[0] == 0:
        return _nothing(states, targets)
    trained = states[:, states.shape[1] - targets.labels.shape[1] :]
    return Found(*_run(trained, targets, _scale(1.0, head), head, scorer, None))


def _nothing(states: Tensor, targets: Targets) -> Found:
    """Of no block: a zero that stays in the graph, so that a rank on which nothing is supervised stays in step."""
    empty = states.new_zeros(targets.labels.shape, dtype=torch.float32)
    return Found(states.sum(), empty, empty.bool())


def _scale(denominator: float | Tensor, head: Head) -> Tensor:
    wide = torch.float64 if head.weight.dtype == torch.float64 else torch.float32
    if isinstance(denominator, Tensor):
        return (1.0 / denominator.reshape(())).to(wide)
    return torch.full((), 1.0 / denominator, dtype=wide, device=head.weight.device)  # a fill: waits for no copy


def count(match: Tensor, nll: Tensor, counted: Tensor) -> Tensor:
    """Sums of a batch as one float64 vector of 3 D + 3, ready to be added over batches and ranks.

    match, nll [N,D] of the drafts, counted [N,D] bool. The vector: per draft correct, per draft accepted (it and all
    before it correct), per draft counted; then blocks with a counted draft, tokens accepted in them, summed nll.
    """
    match = match & counted
    accepted = match.to(torch.int8).cumprod(dim=1)
    blocks = counted.any(dim=1).sum()
    tail = torch.stack([blocks, accepted.sum(), torch.where(counted, nll, 0.0).sum()]).double()
    per_draft = (match.sum(0), accepted.sum(0), counted.sum(0))
    return torch.cat([*(part.double() for part in per_draft), tail])


def count_size(drafts: int) -> int:
    """Length of `count`'s vector."""
    return 3 * drafts + 3


def read_counts(sums: Tensor) -> dict[str, float]:
    """Names for the vector of `count`: tokens_per_block, nll, accuracy_slot_01.., acceptance_slot_01.. .

    Slot 01 is the first token after the anchor, whichever slot of the block predicts it. acceptance_slot_k is the
    share of blocks whose first k drafts are all right, among those whose k-th counts. tokens_per_block is the mean
    over blocks of 1 + the number of leading right drafts. It is no acceptance length: these blocks start anywhere in
    the text, those of decoding where the last one failed (estimate.walk). Drafts and blocks never counted are left
    out, not 0.
    """
    drafts = (len(sums) - 3) // 3
    correct, accepted, counted = sums[: 3 * drafts].view(3, drafts).tolist()
    blocks, tokens, nll = sums[3 * drafts :].tolist()
    found: dict[str, float] = {}
    if blocks:
        found["tokens_per_block"] = 1.0 + tokens / blocks
        found["nll"] = nll / sum(counted)
    for slot, total in enumerate(counted, start=1):
        if total:
            found[f"accuracy_slot_{slot:02d}"] = correct[slot - 1] / total
            found[f"acceptance_slot_{slot:02d}"] = accepted[slot - 1] / total
    return found
