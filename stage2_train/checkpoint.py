"""Save and load a drafter in training: complete or not there.

Called by train.py (save, restore), decode and export (load_drafter). Folder rules are in checkpoint_folder.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from manifests.commit import Ledger
from manifests.records import CheckpointRecord
from shared.atomic import aside, publish_dir
from shared.errors import CheckpointMismatch, StoreDamaged
from shared.json_file import read_object
from shared.tensors import read_state, read_tensors, write_state, write_tensors
from stage2_train.checkpoint_folder import (
    DRAFTER_FILE,
    INFO_FILE,
    OPTIMIZER_FILE,
    folder_of,
    newest_complete,
    prune,
    read_info,
    remove_folder,
)
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig
from stage2_train.sharding import fill_weights, whole_weights

EXPORTED_FILE = "model.safetensors"
# What a checkpoint keeps of run.json.
RUN_KEYS = ("config", "drafter", "store", "total_steps", "warm_start")
_ADVICE = "delete that folder: training goes on from the checkpoint before it, and an export is made again"


class Optimizer(Protocol):
    """What is needed of an optimizer here: its state in whole tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a checkpoint holds besides tensors: loop state, and the run's config, drafter, store and total_steps."""

    loop_state: dict[str, Any]
    run: dict[str, Any]
    acceptance_length_estimate: float | None


class Moved:
    """Tells a sum from its parts."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told, self._sum = told, 0

    def __call__(self, size: int) -> None:
        """So many bytes more."""
        self._sum += size
        self._told(self._sum)


def contents(drafter: Drafter, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and optimizer state as they are written, the same whatever the number of ranks and their shares.

    Of a sharded drafter this is a collective, and only rank 0 gets the tensors.
    """
    return whole_weights(drafter), optimizer.state_dict()


def save(
    run_dir: Path,
    drafter: Drafter,
    optimizer: Optimizer,
    snapshot: Snapshot,
    told: Callable[[int], None] = lambda written: None,
) -> Path:
    """Write the checkpoint of loop_state["global_step"] aside and publish it by one rename; the record comes after.

    For rank 0; where the drafter is sharded, the other ranks call `contents` meanwhile. `told` hears a number that
    grows with the bytes written and made durable. Replaces a folder of that step left by an earlier save. Raises
    DiskFull or PathNotWritable with the older checkpoints untouched.
    """
    final = folder_of(run_dir, int(snapshot.loop_state["global_step"]))
    weights, optimizer_state = contents(drafter, optimizer)
    with aside(final) as temporary:
        moved = Moved(told)
        write_tensors(temporary / DRAFTER_FILE, weights, told=moved)
        write_state(temporary / OPTIMIZER_FILE, optimizer_state, moved)
        config = drafter.config.to_hf_config() | {"dtype": "float32"}
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        sizes = {entry.name: entry.stat().st_size for entry in sorted(temporary.iterdir())}
        info = {
            "global_step": snapshot.loop_state["global_step"],
            "saved": time.time(),
            "files": sizes,
            "loop_state": snapshot.loop_state,
            **snapshot.run,
        }
        (temporary / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        if final.exists():
            remove_folder(final)
        publish_dir(temporary, final, moved)
    return final


def record(run_dir: Path, folder: Path, ledger: Ledger, run_id: str, snapshot: Snapshot, keep: int) -> None:
    """Say that the checkpoint is done, then remove the ones no longer kept."""
    info = read_info(folder)
    ledger.append(
        CheckpointRecord(
            run_id=run_id,
            global_step=info["global_step"],
            path=str(folder.relative_to(run_dir)),
            bytes=sum(info["files"].values()),
            acceptance_length_estimate=snapshot.acceptance_length_estimate,
        )
    )
    prune(run_dir, keep)


def restore(
    folder: Path, drafter: Drafter, optimizer: Optimizer, told: Callable[[int], None] = lambda read: None
) -> dict[str, Any]:
    """Put a checkpoint's tensors in place; returns its loop state. Strict both ways: a name more or less is refused.

    `told` hears how many bytes are read.
    """
    moved = Moved(told)
    _load_strictly(drafter, read_tensors(folder / DRAFTER_FILE, _ADVICE, moved), folder)
    optimizer.load_state_dict(read_state(folder / OPTIMIZER_FILE, _ADVICE, moved))
    state: dict[str, Any] = read_info(folder)["loop_state"]
    return state


def load_drafter(path: Path, advice: str = _ADVICE) -> tuple[Drafter, DrafterConfig, dict[str, Any]]:
    """A drafter from a run folder (newest complete checkpoint), a checkpoint folder, or an exported folder.

    On the CPU, in the stored dtype, eval mode, without gradients. The third value is {"path", "global_step", "store":
    {"path", "identity"}, ...} of checkpoint.json; for an exported folder only its path.
    Raises CheckpointMismatch when nothing loadable is there, StoreDamaged, which ends with `advice`, for damage.
    """
    folder = path
    if not (path / "config.json").is_file():
        found, ignored = newest_complete(path) if path.is_dir() else (None, [])
        if found is None:
            reasons = "".join(f"; {item.path.name}: {item.reason}" for item in ignored)
            raise CheckpointMismatch(
                f"{path} is neither a run with a complete checkpoint, nor a checkpoint, nor an "
                f"exported drafter{reasons}; run `dflash train` first"
            )
        folder = found
    weights = folder / (DRAFTER_FILE if (folder / DRAFTER_FILE).is_file() else EXPORTED_FILE)
    if not weights.is_file():
        raise CheckpointMismatch(f"{folder} has a config.json but neither {DRAFTER_FILE} nor {EXPORTED_FILE}")
    config = DrafterConfig.from_hf_config(read_object(folder / "config.json", advice))
    tensors = read_tensors(weights, advice)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointMismatch(f"{weights}: tensor {name} holds {tensor.dtype}, a drafter's hold floating point")
    drafter = Drafter(config)
    drafter.to(next(iter(tensors.values()), drafter.fc.weight).dtype)
    _load_strictly(drafter, tensors, folder)
    drafter.eval().requires_grad_(False)
    info = whole_info(folder) if (folder / INFO_FILE).is_file() else {}
    return drafter, config, {"path": str(folder), **info}


def whole_info(folder: Path) -> dict[str, Any]:
    """checkpoint.json of a folder that was named by the user. Raises StoreDamaged."""
    try:
        return read_info(folder)
    except (OSError, ValueError) as error:
        raise StoreDamaged(f"{folder} is damaged ({error}); {_ADVICE}") from error


def _load_strictly(drafter: Drafter, tensors: dict[str, torch.Tensor], where: Path) -> None:
    own = drafter.state_dict()
    for name in sorted({*own, *tensors}):
        have = None if name not in tensors else tuple(tensors[name].shape)
        want = None if name not in own else tuple(own[name].shape)
        if have != want:
            raise StoreDamaged(
                f"{where}: tensor {name} has shape {have}, the config says {want}; the folder is damaged "
                "or from another drafter"
            )
    fill_weights(drafter, tensors)
