"""From a batch to a loss: the one place where training, warm-up and estimate run the drafter.

Called by train.py and estimate.py. Next: loss.py (the head), attention.py (the masks).

Shapes: R rows, S context tokens, N anchor slots, B slots, Q = N*B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.quantise import decode
from stage2_train.attention import Layout, Tiles, build_masks
from stage2_train.batch import Batch
from stage2_train.chunk_loss import Scorer, Targets
from stage2_train.drafter import Drafter, embed_blocks
from stage2_train.loss import Found, Head, blocks_loss, blocks_measure, count
from stage2_train.objectives import Objective


@dataclass(frozen=True)
class DeviceBatch:
    """A Batch on the device, in the compute dtype."""

    features: Tensor
    """[R,S,F*H]"""
    context_positions: Tensor
    """[R,S]"""
    block_positions: Tensor
    """[R,Q]"""
    block_ids: Tensor
    """[R,Q]: anchor token, then mask tokens."""
    layout: Layout
    targets: Targets
    """Of R*N blocks, at their trained slots."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the drafter is run: frozen tables of the target, kernel, dtype, device."""

    embed_tokens: Tensor
    head: Head
    objective: Objective
    attention: str
    """"flex" or "sdpa"."""
    dtype: torch.dtype
    device: torch.device
    scorer: Scorer = field(init=False)
    """The loss of a chunk; compiled where the layers are."""
    tiles: Tiles = field(init=False, default_factory=Tiles)
    """The mask builder; compiled where the layers are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", Scorer(self.objective, self.head.shaping(), self.head.weight))


def move(batch: Batch, mask_token_id: int, engine: Engine) -> DeviceBatch:
    """Copy a batch to the device; feature bits travel as they are and become numbers there."""
    sent = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.tensors.items()}
    rows, anchors, size = batch.labels.shape
    slots = torch.arange(size, device=engine.device)
    anchor_positions, anchor_tokens = sent["anchor_positions"], sent["anchor_tokens"]
    ids = torch.full((rows, anchors, size), mask_token_id, dtype=torch.int64, device=engine.device)
    ids[:, :, 0] = anchor_tokens
    layout = Layout(sent["start"], sent["end"], batch.features.shape[1], size)
    return DeviceBatch(
        features=_numbers(sent).to(engine.dtype),
        context_positions=sent["context_positions"],
        layout=layout,
        block_positions=(anchor_positions[:, :, None] + slots).flatten(1),
        block_ids=ids.flatten(1),
        targets=_targets(sent, engine.objective),
    )


def _targets(sent: dict[str, Tensor], objective: Objective) -> Targets:
    def trained(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[:, objective.first_slot :].contiguous()

    distributions = None
    if objective.needs_distributions:
        logits = sent["teacher_logits"].view(torch.bfloat16)
        distributions = (sent["teacher_ids"], logits, sent["teacher_logsumexp"])
    return Targets(sent["labels"], sent["counted"], distributions).each(trained)


def _numbers(sent: dict[str, Tensor]) -> Tensor:
    """bf16 [R,S,F*H] of the features as they are stored."""
    features = sent["features"]
    if "scales" not in sent:
        return features.view(torch.bfloat16)
    rows, tokens, taps = sent["scales"].shape
    codes = features.view(rows * tokens, taps, -1)
    channels = sent["channels"].view(len(sent["channels"]), taps, -1)
    return decode(codes, sent["scales"].flatten(0, 1), channels, sent["blocks"].flatten()).view(features.shape)


def block_states(drafter: Drafter, batch: DeviceBatch, engine: Engine) -> Tensor:
    """Final states [R*N,B,H] of every slot, used or not."""
    embeds = embed_blocks(batch.block_ids, engine.embed_tokens, drafter.config).to(engine.dtype)
    if engine.attention == "flex":
        # The first layer's input must look like the others' to the compiler: without this it makes two graphs.
        embeds.requires_grad_(torch.is_grad_enabled())
    masks = build_masks(batch.layout, drafter.kinds, engine.attention, engine.dtype, engine.tiles)
    with torch.autocast(engine.device.type, engine.dtype, enabled=engine.dtype != torch.float32):
        hidden = drafter.on_features(batch.features, embeds, batch.context_positions, batch.block_positions, masks)
    return hidden.view(-1, batch.layout.block_size, hidden.shape[-1])


def denominator(parts: Sequence[Batch], objective: Objective) -> float:
    """One rank's part of the divisor of the loss, over its micro-batches; added over ranks it divides every loss."""
    return sum(objective.denominator(part.counted) for part in parts)


def loss_and_counts(
    hidden: Tensor, batch: DeviceBatch, engine: Engine, divisor: float | Tensor
) -> tuple[Tensor, Tensor]:
    """This batch's part of the loss (0-dim), and loss.count's vector.

    Parts add up over micro-batches and ranks because all are divided by the same global `divisor`. On CUDA the head
    runs over all blocks, used or not, so that shapes stay fixed; on a CPU over those with a slot that counts.
    """
    kept = _kept(batch, engine)
    targets = _take(batch.targets, kept)
    found = blocks_loss(hidden if kept is None else hidden[kept], targets, divisor, engine.head, engine.scorer)
    return found.total, _count(found, targets, engine.objective)


def counts_only(hidden: Tensor, batch: DeviceBatch, engine: Engine) -> tuple[Tensor, Tensor]:
    """loss.count's vector, and how many leading drafts of each block are right [R*N] int64; without a gradient."""
    kept = _kept(batch, engine)
    targets = _take(batch.targets, kept)
    found = blocks_measure(hidden if kept is None else hidden[kept], targets, engine.head, engine.scorer)
    first = engine.objective.first_draft
    right = (found.match & targets.counted)[:, first:].long().cumprod(dim=1).sum(dim=1)
    if kept is not None:
        right = right.new_zeros(len(hidden)).index_copy(0, kept, right)
    return _count(found, targets, engine.objective), right


def _kept(batch: DeviceBatch, engine: Engine) -> Tensor | None:
    if engine.device.type != "cpu" or engine.scorer.compiled:
        return None
    return batch.targets.counted.any(dim=1).nonzero().squeeze(1)


def _take(targets: Targets, kept: Tensor | None) -> Targets:
    return targets if kept is None else targets.each(lambda tensor: tensor[kept])


def _count(found: Found, targets: Targets, objective: Objective) -> Tensor:
    first = objective.first_draft
    return count(found.match[:, first:], found.nll[:, first:], targets.counted[:, first:])
