"""The target's side of decoding: prefill, verify a block, keep only what was accepted.

Called by stage2_train.decode; the storage is stage2_train.target_cache. A query at position p sees slots <= p,
whatever rejected tokens left behind them, so that rolling back an attention layer means a smaller length.
Recurrent layers (Qwen3.5) cannot forget: their states are saved before a block and accepted tokens are fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from shared.slot_cache import Slots, cache_argument
from shared.target import Target, capture
from stage2_train.target_cache import attention_implementation, cache_layers, layer_types, sliding_window

# Accepted tokens a hybrid target feeds again before it spends one forward on moving its saved state ahead.
_MAX_PENDING = 32


@dataclass(frozen=True, slots=True)
class Verified:
    """What one forward of the target gives for a block: logits [R, Q, V], features [R, Q, F * H] (None if untapped)."""

    logits: Tensor
    features: Tensor | None


class TargetDecoder:
    """R rows of decoding on an attention-only target; rows may have different lengths.

    `lengths` counts the committed tokens of each row, i.e. the position of the next anchor. `capacity` is the most
    positions a row may reach, rejected drafts included. Use `open_decoder`, which picks the class.
    """

    max_rows: int | None = None

    def __init__(self, target: Target, target_layer_ids: Sequence[int], *, rows: int, capacity: int) -> None:
        self.target = target
        self.target_layer_ids = tuple(target_layer_ids)
        self.lengths = [0] * rows
        self._capacity = capacity
        self._positions = torch.arange(capacity, device=target.device)
        self._starts = torch.zeros(rows, dtype=torch.long, device=target.device)
        self._slots = Slots(capacity)
        self._window = sliding_window(target)
        self._layer_types = layer_types(target)
        self._cache = Cache(layers=cache_layers(target, self._slots))
        self._cache_argument = cache_argument(target)
        self._attention = attention_implementation(target)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Verified:
        """Feed the prompts (once, first) and commit them.

        Returns the logits after each prompt's last token [R, 1, V] and features of all positions [R, S, F * H], S the
        longest prompt; features beyond a shorter prompt's end mean nothing.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.long)
        # Right padding needs no mask of its own: no real token sees later slots, and they are written again later.
        last = torch.tensor(lengths, device=self.target.device) - 1
        hidden, features = self._forward(ids.to(self.target.device))
        logits = self.target.logits(hidden[torch.arange(len(prompts), device=last.device), last])[:, None]
        self.commit(lengths)
        return Verified(logits, features)

    @torch.inference_mode()
    def verify(self, block_ids: Tensor) -> Verified:
        """Run the block [R, Q] behind the committed tokens of each row; nothing is committed."""
        hidden, features = self._forward(block_ids)
        return Verified(self.target.logits(hidden), features)

    @torch.inference_mode()
    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[r]` tokens of what row r was last fed; the rest never happened."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._starts = torch.tensor(self.lengths, device=self.target.device)

    def _forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Final-normed states [R, Q, H] and features [R, Q, F * H] of ids at each row's next positions."""
        width = ids.shape[1]
        self._slots.visible = max(self.lengths) + width
        if self._slots.visible > self._capacity:
            raise ValueError(f"{self._slots.visible} positions exceed the capacity {self._capacity}")
        positions = self._starts[:, None] + self._positions[:width]
        self._slots.index = positions[:, None, :, None]
        arguments: dict[str, Any] = {self._cache_argument: self._cache}
        with capture(self.target, self.target_layer_ids) as captured:
            out = self.target.decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks(positions),
                use_cache=True,
                **arguments,
            )
        return out.last_hidden_state, captured.features().flatten(2) if self.target_layer_ids else None

    def _masks(self, positions: Tensor) -> Tensor | dict[str, Tensor | None]:
        """The mask [R, 1, Q, visible] of each layer type, in the form the attention implementation reads."""
        distance = positions[:, None, :, None] - self._positions[: self._slots.visible]
        full = distance >= 0
        if self._window is None and "linear_attention" not in self._layer_types:
            return self._as_read(full)
        masks: dict[str, Tensor | None] = {"full_attention": self._as_read(full), "linear_attention": None}
        if self._window is not None:
            masks["sliding_attention"] = self._as_read(full & (distance < self._window))
        if getattr(self.target.text_config, "layer_types", None) is None:
            # Older families with one window for all layers (Mistral) take a single mask.
            sliding = masks["sliding_attention"]
            assert sliding is not None
            return sliding
        return masks

    def _as_read(self, allowed: Tensor) -> Tensor:
        if self._attention == "sdpa":
            return allowed
        # Eager attention adds its mask: True would add 1 to a score and hide nothing.
        dtype = self.target.dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
            ~allowed, torch.finfo(dtype).min
        )


class HybridTargetDecoder(TargetDecoder):
    """One row on a target with recurrent layers.

    Their convolution and recurrent states are saved after the last token that is certain to stay ("base"). When a
    block is not accepted in full, they are restored and the accepted tokens ("pending") are fed again in front of the
    next block. Attention layers need neither: they rewrite the same slots.
    """

    max_rows = 1

    def __init__(self, target: Target, target_layer_ids: Sequence[int], *, rows: int, capacity: int) -> None:
        if rows != 1:
            raise ValueError(f"{rows} rows: a target with recurrent layers decodes one row at a time")
        super().__init__(target, target_layer_ids, rows=rows, capacity=capacity)
        self._recurrent = [layer for layer in self._cache.layers if isinstance(layer, LinearAttentionLayer)]
        self._pending: list[int] = []
        self._fed: list[int] = []
        self._saved: list[tuple[dict[int, Tensor], dict[int, Tensor]]] = []

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Verified:
        """As in TargetDecoder, for one prompt."""
        self._fed = list(prompts[0])
        return super().prefill(prompts)

    @torch.inference_mode()
    def verify(self, block_ids: Tensor) -> Verified:
        """Run pending tokens and the block [1, Q]; logits and features of the block alone are returned."""
        if len(self._pending) > _MAX_PENDING:
            pending, self._pending = self._pending, []
            self._feed(torch.tensor([pending], device=self.target.device), len(pending))
            self._save()
        width = block_ids.shape[1]
        self._fed = self._pending + block_ids[0].tolist()
        hidden, features = self._feed(torch.tensor([self._fed], device=self.target.device), len(self._pending))
        return Verified(self.target.logits(hidden[:, -width:]), None if features is None else features[:, -width:])

    @torch.inference_mode()
    def commit(self, counts: Sequence[int]) -> None:
        """As in TargetDecoder."""
        keep = len(self._pending) + counts[0]
        if keep == len(self._fed):
            self._pending = []
            self._save()
        else:
            self._pending = self._fed[:keep]
            self._restore()
        super().commit(counts)

    def _feed(self, ids: Tensor, pending: int) -> tuple[Tensor, Tensor | None]:
        """Forward with the first `pending` ids lying before the committed length."""
        committed, starts = self.lengths, self._starts
        self.lengths, self._starts = [committed[0] - pending], starts - pending
        try:
            return self._forward(ids)
        finally:
            self.lengths, self._starts = committed, starts

    def _save(self) -> None:
        self._saved = [
            tuple(
                {i: state.clone() for i, state in states.items() if state is not None}  # type: ignore[misc]
                for states in (layer.conv_states, layer.recurrent_states)
            )
            for layer in self._recurrent
        ]

    def _restore(self) -> None:
        for layer, saved in zip(self._recurrent, self._saved, strict=True):
            for states, copies in zip((layer.conv_states, layer.recurrent_states), saved, strict=True):
                for i, copy in copies.items():
                    states[i].copy_(copy)


def decoder_class(target: Target) -> type[TargetDecoder]:
    """The class that can roll this target back exactly; its `max_rows` says how many rows it decodes at once.

    Raises TargetUnsupported, naming the model type and the version, for caches we cannot roll back.
    """
    return HybridTargetDecoder if "linear_attention" in layer_types(target) else TargetDecoder


def open_decoder(target: Target, target_layer_ids: Sequence[int], *, rows: int, capacity: int) -> TargetDecoder:
    """A decoder for `rows` rows of at most `capacity` positions; no layer ids: no features are captured."""
    return decoder_class(target)(target, target_layer_ids, rows=rows, capacity=capacity)
