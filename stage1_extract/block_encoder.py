"""Teacher outputs to the arrays of a block, on the target's device: as they are in bf16, or as 8-bit codes.

Called by stage1_extract/block_writer.py in the main loop's thread, so that half the bytes leave the device. The scales
of a block come from its first batch, and a block's batches depend on the block alone: so do its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.quantise import channel_scales, encode
from shared.store_layout import ARRAYS
from stage1_extract.teacher import TeacherOutput

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """What one batch adds to its block, on the device; names are those of shared/store_layout.py.

    per_token arrays have N rows; per_block holds channel scales, the same for all batches of a block; relative_error is
    float32 [N, L] for "hidden_states", [N] for "last_hidden_state", and empty for bf16. The rest is the output's.
    """

    lengths: tuple[int, ...]
    per_token: dict[str, Tensor]
    per_block: dict[str, Tensor]
    relative_error: dict[str, Tensor]
    finite: Tensor
    zero: Tensor


@dataclass(frozen=True, slots=True)
class HostBatch:
    """An EncodedBatch in host memory, in the dtypes of the layout (bf16 as uint16 bits)."""

    per_token: dict[str, Array]
    per_block: dict[str, Array]
    relative_error: dict[str, Array]
    finite: Array
    zero: Array


class BlockEncoder:
    """Holds the channel scales of the block at hand. `last_hidden` may also be "none"."""

    def __init__(self, target_layer_ids: Sequence[int], precision: str, last_hidden: str) -> None:
        self.target_layer_ids = tuple(target_layer_ids)
        self._precisions = {"hidden_states": precision, "last_hidden_state": last_hidden}
        self._channels: dict[str, Tensor] = {}

    def begin(self) -> None:
        """The outputs that follow belong to another block."""
        self._channels = {}

    @torch.inference_mode()
    def __call__(self, output: TeacherOutput) -> EncodedBatch:
        """Encode one batch of the block."""
        batch = EncodedBatch(
            output.lengths,
            {
                "topk_ids": output.topk_ids,
                "topk_logits": _bits(output.topk_logits),
                "logsumexp": output.logsumexp,
            },
            {},
            {},
            output.finite,
            output.zero,
        )
        for name, precision in self._precisions.items():
            values: Tensor = getattr(output, name)
            if precision == "bfloat16":
                batch.per_token[name] = _bits(values)
            elif precision == "int8":
                self._quantise(batch, name, values)
        return batch

    def _quantise(self, batch: EncodedBatch, name: str, values: Tensor) -> None:
        channels = self._channels.get(name)
        if channels is None:
            channels = channel_scales(values)
            # A batch that overflowed everywhere is left out of the store, so it must not set the scales either.
            if bool(batch.finite.any()):
                self._channels[name] = channels
        encoded = encode(values, channels)
        batch.per_token[f"{name}_q"], batch.per_token[f"{name}_scale"] = encoded.codes, encoded.scales
        batch.per_block[f"{name}_channel"] = channels
        batch.relative_error[name] = encoded.relative_error

    def error_detail(self, parts: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """What a shard record says about the codes: relative L2 error, mean over tokens and worst token.

        `parts` are the relative_error arrays of the block's documents; {} when nothing was quantised.
        """
        detail: dict[str, Any] = {}
        if parts and "hidden_states" in parts[0]:
            errors = np.concatenate([part["hidden_states"] for part in parts])
            mean, worst = errors.mean(axis=0, dtype=np.float64), errors.max(axis=0)
            names = [str(layer_id) for layer_id in self.target_layer_ids]
            detail["relative_error"] = dict(zip(names, mean.tolist(), strict=True))
            detail["relative_error_worst"] = dict(zip(names, worst.tolist(), strict=True))
        if parts and "last_hidden_state" in parts[0]:
            errors = np.concatenate([part["last_hidden_state"] for part in parts])
            detail["relative_error_last_hidden"] = float(errors.mean(dtype=np.float64))
            detail["relative_error_last_hidden_worst"] = float(errors.max())
        return detail


def to_host(batch: EncodedBatch) -> HostBatch:
    """Copy a batch off the device; returns when the copies are made."""
    return HostBatch(
        _stored(batch.per_token),
        _stored(batch.per_block),
        {name: error.cpu().numpy() for name, error in batch.relative_error.items()},
        batch.finite.cpu().numpy(),
        batch.zero.cpu().numpy(),
    )


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: np.asarray(tensor.cpu().numpy()).view(ARRAYS[name].dtype) for name, tensor in tensors.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)
