"""A run folder with one checkpoint of a small random drafter, for tests of eval and export.

The target is tiny_target's; nothing is trained, so acceptance is about 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from manifests.commit import Ledger
from shared.target_identity import target_identity
from stage2_train import checkpoint
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig, drafter_geometry

MASK = 310


def tiny_geometry(target: Path, **changes: Any) -> DrafterConfig:
    """Two layers, block of 4, taps after layers 0 and 1."""
    given: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 1),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **changes,
    }
    return drafter_geometry(json.loads((target / "config.json").read_text()), given)


def save_run(run: Path, target: Path, *, seed: int = 0, step: int = 7, scale: float = 1.0, **changes: Any) -> Path:
    """Write RUN/checkpoints/step-N as `dflash train` does, with matrices of `seed` times `scale`; returns RUN."""
    config = tiny_geometry(target, **changes)
    drafter = Drafter(config).initialise(seed)
    with torch.no_grad():
        for parameter in drafter.parameters() if scale != 1.0 else ():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:  # a norm weight of 1 would hide a norm that is forgotten
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    identity = {"target": target_identity(str(target)), "dtype": "float32", "documents": 5, "tokens": 321}
    snapshot = checkpoint.Snapshot(
        loop_state={"global_step": step},
        run={
            "config": {"seed": 0, "steps": 9, "learning_rate": 6e-4},
            "drafter": config.to_hf_config(),
            "store": {"path": str(run.parent / "gone.zarr"), "identity": identity},
            "total_steps": 9,
        },
        acceptance_length_estimate=None,
    )
    folder = checkpoint.save(run, drafter, torch.optim.AdamW(drafter.parameters()), snapshot)
    checkpoint.record(run, folder, Ledger(run, "train-test"), "test", snapshot, 3)
    return run
