"""Which checkpoint folders of a run are complete, which belong to this configuration, which are kept. No torch.

    RUN/checkpoints/step-00000100/checkpoint.json    step, loop state, config, sizes of the other files
                                  config.json        the drafter's config, as exported
                                  drafter.safetensors  float32 weights
                                  optimizer.pt
A folder appears by one rename; its CheckpointRecord comes after. Called by launch_train.py and checkpoint.py.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.commit import read
from shared.atomic import PARTIAL
from shared.errors import CheckpointMismatch
from shared.store import differences

DRAFTER_FILE = "drafter.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
INFO_FILE = "checkpoint.json"
NO_RECORD = "it has no record: its save was cut off before that last act, or records were lost"


@dataclass(frozen=True)
class Ignored:
    """A checkpoint folder that is not used, and why."""

    path: Path
    reason: str
    whole: bool = False
    """Nothing is wrong with the folder itself."""


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def read_info(folder: Path) -> dict[str, Any]:
    """checkpoint.json of a folder. Raises ValueError or OSError when it is not whole."""
    info: dict[str, Any] = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    if not isinstance(info, dict) or not isinstance(info.get("files"), dict):
        raise ValueError(f"{INFO_FILE} does not list its files")
    for name, size in info["files"].items():
        have = (folder / name).stat().st_size
        if have != size:
            raise ValueError(f"{name} has {have} of {size} bytes")
    return info


def newest_complete(run_dir: Path) -> tuple[Path | None, list[Ignored]]:
    """The newest complete checkpoint, and every newer or broken folder that was passed over, with its reason."""
    recorded = {record["path"] for record in read(run_dir, "checkpoints")}
    ignored: list[Ignored] = []
    parent = run_dir / "checkpoints"
    entries = sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []
    ignored += [Ignored(entry, "a save that was cut off") for entry in entries if entry.name.endswith(PARTIAL)]
    for folder in (entry for entry in entries if entry.name.startswith("step-")):
        if fault := _fault_of(folder):
            ignored.append(Ignored(folder, f"damaged: {fault}"))
            continue
        if str(folder.relative_to(run_dir)) not in recorded:
            ignored.append(Ignored(folder, NO_RECORD, whole=True))
            continue
        return folder, ignored
    return None, ignored


def require_same(info: Mapping[str, Any], asked: Mapping[str, Any], free: frozenset[str], where: Path) -> None:
    """Refuse to continue a checkpoint under other settings.

    `asked` holds "config", "drafter" and "total_steps" as checkpoint.json does (the store: pinned_store.py). Fields in
    `free` may differ. Raises CheckpointMismatch naming the first field and both values.
    """
    pairs = {
        **differences(info["drafter"], asked["drafter"]),
        **{field: pair for field, pair in differences(info["config"], asked["config"]).items() if field not in free},
        **differences({"total_steps": info["total_steps"]}, {"total_steps": asked["total_steps"]}),
    }
    for field, (have, want) in pairs.items():
        raise CheckpointMismatch(
            f"{where} was trained with {field} = {have!r}, this command asks {want!r}; use the old "
            "value, or a new --run folder"
        )


def remove_folder(folder: Path) -> None:
    """Take a published folder away: renamed first, so that a kill never leaves half of it under its own name."""
    hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{PARTIAL}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def require_records(run_dir: Path, newest: Path | None, ignored: Sequence[Ignored]) -> None:
    """Refuse to begin anew beside finished work: a save that is cut off leaves one folder without a record, never two.

    Raises CheckpointMismatch.
    """
    without = [item.path for item in ignored if item.whole]
    if newest is None and len(without) > 1:
        raise CheckpointMismatch(
            f"{run_dir} holds {len(without)} whole checkpoints, the newest {without[0].name}, and a record of none: "
            f"bring {run_dir / 'manifest'}/checkpoints.* back, or move these folders away to begin at step 0"
        )


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and the one with the best held-out estimate; returns the removed.

    Only what could be resumed counts and is removed: a damaged folder must not take the place of one that is whole, and
    one without a record may be all that is left of a run whose records were lost.
    """
    scores = {record["path"]: record["acceptance_length_estimate"] for record in read(run_dir, "checkpoints")}
    folders = [
        entry
        for entry in sorted((run_dir / "checkpoints").iterdir())
        if str(entry.relative_to(run_dir)) in scores and _fault_of(entry) is None
    ]
    scored = [(score, folder) for folder in folders if (score := scores[str(folder.relative_to(run_dir))]) is not None]
    kept = {*folders[-keep:], *(folder for _, folder in sorted(scored)[-1:])}
    removed = [folder for folder in folders if folder not in kept]
    for folder in removed:
        remove_folder(folder)
    return removed


def _fault_of(folder: Path) -> Exception | None:
    """What is wrong with a folder itself."""
    try:
        read_info(folder)
    except (OSError, ValueError, KeyError) as error:
        return error
    return None
