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

from shared.documents import DocumentRef
from shared.errors import StoreDamaged
from shared.quantise import decode
from shared.store import TeacherStore
from shared.target import Target, capture

# Storing as bf16 alone is off by 0.2 %; bf16 kernels for other batch shapes add 1-2 %. A wrong row is off by 100 %.
_FEATURE_TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.08, torch.float16: 0.08}
_LOGIT_TOLERANCE = 0.05
# 8-bit codes are off by 0.7-2 % on average, 6 % at the worst token seen.
_CODES_TOLERANCE = 0.05


@torch.inference_mode()
def verify_document(store: Path, block: int, seal: str, target: Target, target_layer_ids: Sequence[int]) -> None:
    """Check the first document of a block. Raises StoreDamaged naming document, layer and both values."""
    opened = TeacherStore(store, {block: seal})
    ref = opened.documents[0]
    precision, last_precision = opened.identity["precision"], opened.identity["last_hidden"]
    stored = opened.read_document(ref, ["input_ids", "topk_ids", "topk_logits"])
    with capture(target, target_layer_ids) as captured:
        out = target.decoder(
            input_ids=torch.from_numpy(stored["input_ids"]).long()[None].to(target.device), use_cache=False
        )
    where = f"document {ref.index} in block {block} of {store}"
    alone = captured.features()[0]
    kept = _decoded(opened, ref, "hidden_states", precision).to(target.device)
    allowed = _FEATURE_TOLERANCE[target.dtype]
    for tap, layer_id in enumerate(target_layer_ids):
        what = f"{where}: features of layer {layer_id}"
        _require_close(kept[:, tap], alone[:, tap], what, allowed + _extra(precision))
    if last_precision != "none":
        last = _decoded(opened, ref, "last_hidden_state", last_precision).to(target.device)
        what = f"{where}: last hidden state"
        _require_close(last, out.last_hidden_state[0], what, allowed + _extra(last_precision))
        logits = (
            target.logits(last.to(target.dtype))
            .float()
            .gather(1, torch.from_numpy(stored["topk_ids"]).long().to(target.device))
        )
        kept_logits = _bf16(stored["topk_logits"]).float().to(target.device)
        error = float((logits - kept_logits).abs().max() / kept_logits.abs().max().clamp_min(1e-6))
        allowed = _LOGIT_TOLERANCE + _extra(last_precision)
        if not error <= allowed:
            raise StoreDamaged(
                f"{where}: logits of the stored last hidden state differ by {error:.3f} of the largest from the stored "
                f"top-k (allowed {allowed}); this target's head is not what we read it as"
            )


def _bf16(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _decoded(store: TeacherStore, ref: DocumentRef, name: str, precision: str) -> Tensor:
    """bf16 [n, L, H] or [n, H]: one document's values as a reader of the store gets them."""
    if precision == "bfloat16":
        return _bf16(store.read_document(ref, [name])[name])
    found = store.read_document(ref, [f"{name}_q", f"{name}_scale"])
    channels = store.read_block_array(ref.block, f"{name}_channel")
    return decode(*(torch.from_numpy(a) for a in (found[f"{name}_q"], found[f"{name}_scale"], channels)))


def _extra(precision: str) -> float:
    return _CODES_TOLERANCE if precision == "int8" else 0.0


def _require_close(stored: Tensor, alone: Tensor, what: str, allowed: float) -> None:
    difference = (stored.float() - alone.float()).norm(dim=-1) / alone.float().norm(dim=-1).clamp_min(1e-6)
    error = float(difference.mean())
    if not error <= allowed:
        raise StoreDamaged(
            f"{what} differ by {error:.3f} (mean relative) from the target run on it alone, allowed {allowed}; "
            "batched and single forwards disagree, so the store must not be used"
        )
