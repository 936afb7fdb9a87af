"""Read a stored document back and compare it with the target run on that document alone.

Called by stage1_extract/worker.py after its first block. Catches features of another batch row, a missed prefix,
wrong layers, a norm applied twice or not at all, and a head that is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import StoreDamaged
from shared.store import TeacherStore
from shared.target import Target, capture

# Storing as bf16 alone is off by 0.2 %; bf16 kernels for other batch shapes add 1-2 %. A wrong row is off by 100 %.
_FEATURE_TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.08, torch.float16: 0.08}
_LOGIT_TOLERANCE = 0.05


@torch.inference_mode()
def verify_document(store: Path, block: int, target: Target, target_layer_ids: Sequence[int]) -> None:
    """Check the first document of a block. Raises StoreDamaged naming document, layer and both values."""
    opened = TeacherStore(store, [block])
    ref = opened.documents[0]
    with_last = bool(opened.identity.get("last_hidden", True))
    names = ["input_ids", "hidden_states", "topk_ids", "topk_logits", *(["last_hidden_state"] if with_last else [])]
    stored = opened.read_document(ref, names)
    with capture(target, target_layer_ids) as captured:
        out = target.decoder(
            input_ids=torch.from_numpy(stored["input_ids"]).long()[None].to(target.device), use_cache=False
        )
    where = f"document {ref.index} in block {block} of {store}"
    alone = captured.features()[0]
    kept = _bf16(stored["hidden_states"]).to(target.device)
    for tap, layer_id in enumerate(target_layer_ids):
        _require_close(kept[:, tap], alone[:, tap], f"{where}: features of layer {layer_id}", target.dtype)
    if with_last:
        last = _bf16(stored["last_hidden_state"]).to(target.device)
        _require_close(last, out.last_hidden_state[0], f"{where}: last hidden state", target.dtype)
        logits = (
            target.logits(last.to(target.dtype))
            .float()
            .gather(1, torch.from_numpy(stored["topk_ids"]).long().to(target.device))
        )
        kept_logits = _bf16(stored["topk_logits"]).float().to(target.device)
        error = float((logits - kept_logits).abs().max() / kept_logits.abs().max().clamp_min(1e-6))
        if not error <= _LOGIT_TOLERANCE:
            raise StoreDamaged(
                f"{where}: logits of the stored last hidden state differ by {error:.3f} of the largest from the stored "
                f"top-k (allowed {_LOGIT_TOLERANCE}); this target's head is not what we read it as"
            )


def _bf16(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _require_close(stored: Tensor, alone: Tensor, what: str, dtype: torch.dtype) -> None:
    difference = (stored.float() - alone.float()).norm(dim=-1) / alone.float().norm(dim=-1).clamp_min(1e-6)
    error, allowed = float(difference.mean()), _FEATURE_TOLERANCE[dtype]
    if not error <= allowed:
        raise StoreDamaged(
            f"{what} differ by {error:.3f} (mean relative) from the target run on it alone, allowed {allowed}; "
            "batched and single forwards disagree, so the store must not be used"
        )
