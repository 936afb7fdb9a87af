"""One batch of documents through the target: features, last hidden state, top-k logits with logsumexp.

Called by stage1_extract/worker.py in its main loop. Shapes: N real tokens of the batch, L taps, H hidden, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.target import Target, capture

# Bytes of float32 logits alive at once; a row of a 248,320-token vocabulary takes 1 MB.
_LOGITS_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}


@dataclass(frozen=True, slots=True)
class TeacherOutput:
    """Results on the target's device, documents one after another without padding.

    hidden_states bf16 [N, L, H], last_hidden_state bf16 [N, H], topk_ids int32 [N, K], topk_logits bf16 [N, K],
    logsumexp float32 [N], finite bool [N], zero bool [N, L] (that tap holds only zeros at that token).
    """

    lengths: tuple[int, ...]
    hidden_states: Tensor
    last_hidden_state: Tensor
    topk_ids: Tensor
    topk_logits: Tensor
    logsumexp: Tensor
    finite: Tensor
    zero: Tensor


class Teacher:
    """The target with its hooks, for many batches."""

    def __init__(self, target: Target, target_layer_ids: Sequence[int], topk: int) -> None:
        self.target = target
        self.target_layer_ids = tuple(target_layer_ids)
        self.topk = topk
        budget = _LOGITS_BYTES["cuda" if target.device.type == "cuda" else "cpu"]
        self._rows = max(1, budget // (4 * target.lm_head_weight.shape[0]))

    @torch.inference_mode()
    def __call__(self, documents: Sequence[np.ndarray[Any, Any]]) -> TeacherOutput:
        """Run documents (int32 [n] each) as one right-padded batch.

        No attention mask: every layer is causal, so padding on the right reaches no real token, and without a mask the
        attention takes its fast path.
        """
        lengths = tuple(len(document) for document in documents)
        width, device = max(lengths), self.target.device
        padded = np.zeros((len(documents), width), dtype=np.int64)
        for row, document in enumerate(documents):
            padded[row, : len(document)] = document
        real = np.concatenate([np.arange(n) + row * width for row, n in enumerate(lengths)])
        index = torch.from_numpy(real).to(device)
        with capture(self.target, self.target_layer_ids) as captured:
            out = self.target.decoder(input_ids=torch.from_numpy(padded).to(device), use_cache=False)
        last = out.last_hidden_state
        features = captured.features()
        # A hidden state that belongs to another request or misses a prefix has shown first as a wrong length.
        if last.shape[:2] != padded.shape or features.shape[:2] != padded.shape:
            raise AssertionError(
                f"asked {padded.shape} positions, the target returned {tuple(last.shape)} and {tuple(features.shape)}"
            )
        hidden = features.flatten(0, 1)[index].to(torch.bfloat16)
        last = last.flatten(0, 1)[index]
        topk_ids, topk_logits, logsumexp = self._top_logits(last)
        last = last.to(torch.bfloat16)
        finite = torch.isfinite(hidden).flatten(1).all(1) & torch.isfinite(last).all(1) & torch.isfinite(logsumexp)
        return TeacherOutput(lengths, hidden, last, topk_ids, topk_logits, logsumexp, finite, (hidden == 0).all(-1))

    def _top_logits(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k over chunks of positions, so that [N, V] never exists."""
        ids, values, sums = [], [], []
        for chunk in last.split(self._rows):
            logits = self.target.logits(chunk)
            sums.append(torch.logsumexp(logits.float(), dim=-1))
            top = logits.topk(self.topk, dim=-1)
            ids.append(top.indices.to(torch.int32))
            values.append(top.values.to(torch.bfloat16))
        return torch.cat(ids), torch.cat(values), torch.cat(sums)
