"""Which blocks of a store a run trains from: pinned when it starts, exactly the same ones whenever it goes on.

run.json lists block and seal, its `store` the hash of that list, and so does every checkpoint: a run is a function of
that snapshot, whatever the store becomes. Called by launch_train.py (parent) and training_parts.py (workers). No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.blocks import recorded_blocks
from shared.errors import ConfigRefused, StoreDamaged, StoreIncomplete, StoreMismatch
from shared.json_file import read_object
from shared.store import TeacherStore, all_differences, comparable, maker_of, read_identity, snapshot_of
from shared.store_files import is_remote
from stage2_train.checkpoint_folder import newest_complete, read_info
from stage2_train.config import TrainConfig
from stage2_train.selection import open_store

RUN_FILE = "run.json"
_ADVICE = "restore that file, or train to a new --run folder"


def open_for(config: TrainConfig) -> TeacherStore:
    """The store as this run sees it: what its checkpoint was trained from, or for a new run what is recorded now.

    Raises StoreIncomplete, StoreMissing, StoreDamaged, or StoreMismatch naming the first difference.
    """
    run_dir = config.run_dir()
    newest, _ = newest_complete(run_dir)
    if newest is None:
        store = open_store(config.store, partial=config.partial)
        return _require_target(store) if config.partial else store
    was = read_info(newest)["store"]
    _require_identity(was["identity"], config.store, newest)
    pinned = _pinned(read_object(run_dir / RUN_FILE, _ADVICE), run_dir)
    if (hashed := snapshot_of(pinned)) != was["snapshot"]:
        raise StoreMismatch(
            f"{newest} was trained from snapshot {was['snapshot']}, {run_dir / RUN_FILE} lists blocks of {hashed}; "
            f"{_ADVICE}"
        )
    open_store(config.store, partial=config.partial)  # says which block of a whole store is missing, or was moved away
    _require_blocks(pinned, config, newest)
    return TeacherStore(config.store, pinned)


def reopen(location: Path | str, run: Mapping[str, Any], run_dir: Path) -> TeacherStore:
    """The store with the blocks that a run's description lists, in a worker."""
    return TeacherStore(location, _pinned(run, run_dir))


def described(store: TeacherStore) -> dict[str, Any]:
    """What run.json and the checkpoints keep of a store, and the list of blocks for run.json alone."""
    place = store.location if is_remote(store.location) else str(Path(store.location).resolve())
    return {
        "store": {"path": place, "identity": store.identity, "snapshot": store.snapshot},
        "blocks": {str(block): seal for block, seal in sorted(store.blocks.items())},
    }


def read_run(run_dir: Path) -> dict[str, Any]:
    """run.json as the parent, or rank 0 under torchrun, has just written it. Raises ConfigRefused where it is not."""
    try:
        run: dict[str, Any] = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigRefused(
            f"rank 0 has written {run_dir / RUN_FILE}, this process does not see it: --run must be one folder that all "
            "nodes share"
        ) from error
    return run


def _pinned(run: Mapping[str, Any], run_dir: Path) -> dict[int, str]:
    try:
        return {int(block): str(seal) for block, seal in run["blocks"].items()}
    except (KeyError, ValueError, AttributeError) as error:
        raise StoreDamaged(f"{run_dir / RUN_FILE} does not list the run's blocks ({error!r}); {_ADVICE}") from error


def _require_identity(was: Mapping[str, Any], location: Path | str, newest: Path) -> None:
    found = all_differences(comparable(was), comparable(read_identity(location)))
    for field, (have, want) in found.items():
        raise StoreMismatch(
            f"{newest} was trained from a store with {field} = {have!r}, {location} has {want!r}; pass the store it "
            "was trained from, or a new --run folder"
        )


def _require_blocks(pinned: Mapping[int, str], config: TrainConfig, newest: Path) -> None:
    """Every pinned block must be recorded as it was; more blocks may be there only with --partial."""
    recorded = {block: str(record["seal"]) for block, record in recorded_blocks(config.store).items()}
    for block in sorted(pinned.keys() | recorded.keys()):
        was, now = pinned.get(block), recorded.get(block)
        if was == now or (was is None and config.partial):
            continue
        advice = "make the block again with the command that made the store, or train to a new --run folder"
        if was is None:
            advice = "--partial goes on with the blocks that the run began with, a new --run folder takes them all"
        raise StoreMismatch(
            f"{newest} was trained from {config.store} with {_said(block, was)}, it now has {_said(block, now)}; "
            f"{advice}"
        )


def _said(block: int, seal: str | None) -> str:
    return f"no block {block}" if seal is None else f"block {block} of seal {seal}"


def _require_target(store: TeacherStore) -> TeacherStore:
    # The first block can be done before the first worker has exported the target.
    if not store.files.exists("target/head.safetensors"):
        raise StoreIncomplete(
            f"{store.location} has {len(store.blocks)} blocks and no target/head.safetensors yet; wait for it to be "
            f"written, or finish the store with the same {maker_of(store.identity)} command"
        )
    return store
