"""From a batch to a loss: the one place where training, warm-up and estimate run the drafter.

Called by train.py and estimate.py. Next: loss.py (the head), attention.py (the masks).

Shapes: R rows, S context tokens, N anchor slots, B slots, Q = N*B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.quantise import decode
from stage2_train.attention import Layout, build_masks
from stage2_train.data import Batch
from stage2_train.drafter import Drafter, embed_blocks
from stage2_train.loss import Head, count, cross_entropy, measure


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
    labels: Tensor
    """[R*N,B]"""
    counted: Tensor
    """[R*N,B] bool"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the drafter is run: frozen tables of the target, kernel, dtype, device."""

    embed_tokens: Tensor
    head: Head
    slot_weights: Tensor
    """[B] float32"""
    attention: str
    """"flex" or "sdpa"."""
    dtype: torch.dtype
    device: torch.device


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
        labels=sent["labels"].flatten(0, 1),
        counted=sent["counted"].flatten(0, 1),
    )


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
    masks = build_masks(batch.layout, drafter.kinds, engine.attention, engine.dtype)
    with torch.autocast(engine.device.type, engine.dtype, enabled=engine.dtype != torch.float32):
        context = drafter.project_context(batch.features)
        hidden = drafter(context, embeds, batch.context_positions, batch.block_positions, masks)
    return hidden.view(-1, batch.layout.block_size, hidden.shape[-1])


def weight_sum(parts: tuple[Batch, ...], slot_weights: Tensor) -> float:
    """Sum of the loss weights of one rank's micro-batches; added over ranks it is the denominator of the loss."""
    weights = slot_weights.double().cpu().numpy()
    return float(sum((part.counted * weights).sum() for part in parts))


def loss_and_counts(hidden: Tensor, batch: DeviceBatch, engine: Engine, denominator: float) -> tuple[Tensor, Tensor]:
    """This batch's part of the loss (0-dim), and loss.count's vector.

    Parts add up over micro-batches and ranks because all are divided by the same global `denominator`. On a CPU the
    head runs over counted slots only; on CUDA over slots 1..B-1 of all blocks, so that shapes stay fixed.
    """
    chosen = _chosen_slots(batch, engine)
    weights = (batch.counted * engine.slot_weights).flatten()[chosen] / denominator
    total, loss, match = cross_entropy(
        hidden.flatten(0, 1)[chosen], batch.labels.flatten()[chosen], weights, engine.head
    )
    return total, _scatter_count(batch, chosen, loss, match)


def counts_only(hidden: Tensor, batch: DeviceBatch, engine: Engine) -> Tensor:
    """loss.count's vector without a gradient."""
    chosen = _chosen_slots(batch, engine)
    loss, match = measure(hidden.detach().flatten(0, 1)[chosen], batch.labels.flatten()[chosen], engine.head)
    return _scatter_count(batch, chosen, loss, match)


def _chosen_slots(batch: DeviceBatch, engine: Engine) -> Tensor:
    if engine.device.type == "cpu":
        return batch.counted.flatten().nonzero().squeeze(1)
    blocks, size = batch.counted.shape
    index = torch.arange(blocks * size, device=engine.device).view(blocks, size)
    return index[:, 1:].flatten()


def _scatter_count(batch: DeviceBatch, chosen: Tensor, loss: Tensor, match: Tensor) -> Tensor:
    losses = torch.zeros(batch.counted.numel(), dtype=torch.float32, device=chosen.device)
    matches = torch.zeros(batch.counted.numel(), dtype=torch.bool, device=chosen.device)
    losses[chosen], matches[chosen] = loss.detach().float(), match
    return count(matches.view_as(batch.counted), losses.view_as(batch.counted), batch.counted)
