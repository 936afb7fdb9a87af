"""The parent side of `dflash train`: check everything cheap first, write run.json, hand the run to a supervisor.

No torch. Called by cli.py. Next: train.py (what a worker does), training_summary.py (what is printed at the end).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manifests.launch import LaunchSpec, start_supervisor
from manifests.runs import recording
from manifests.viewer import detach, view
from shared import provenance
from shared.atomic import require_writable, write_json
from shared.config import to_dict
from shared.errors import (
    ConfigRefused,
    MaskTokenInUse,
    MaskTokenMissing,
    MaskTokenOutOfRange,
    NothingLeft,
    StoreMismatch,
)
from shared.json_file import read_object
from shared.kernel import Kernel
from shared.progress import say
from shared.store import TeacherStore, differences
from stage2_train import checkpoint_folder, pinned_store, warm_start
from stage2_train.config import FREE_FIELDS, TrainConfig
from stage2_train.drafter_config import DrafterConfig, drafter_geometry
from stage2_train.pinned_store import RUN_FILE
from stage2_train.selection import has_an_anchor, nothing_to_learn, select, total_steps
from stage2_train.training_summary import print_summary


def launch(config: TrainConfig) -> None:
    """`dflash train`: returns when the run is finished; everything else is an error with its exit code."""
    run_dir = config.run_dir()
    config.require_processes(config.nproc)
    run = check(config)
    started = None
    with recording(run_dir, "train", run["config"]) as command:
        done = open_run(run_dir, run, config)
        if done == run["total_steps"]:
            print_summary(run_dir, run, f"already finished: {done} steps")
        else:
            started = start_supervisor(command, _launch_spec(config, command.run_id))
    (detach if config.detach else view)(started)


def _launch_spec(config: TrainConfig, run_id: str) -> LaunchSpec:
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    return LaunchSpec(
        run_dir=config.run_dir(),
        role="train",
        entry="stage2_train.train:main",
        num_workers=config.nproc,
        environment={"DFLASH_RUN_ID": run_id} | threads,
        finish="stage2_train.training_summary:finish",
        restarts=config.restarts,
        hang_limit_scale=config.hang_limit_scale,
        on_disk_full=config.on_disk_full,
    )


def check(config: TrainConfig) -> dict[str, Any]:
    """Refuse what cannot work and return what run.json will hold; writes nothing.

    Raises StoreMissing, StoreIncomplete, StoreDamaged, StoreMismatch, MaskTokenMissing, MaskTokenOutOfRange,
    NothingLeft, ConfigRefused or PathNotWritable.
    """
    store = pinned_store.open_for(config)
    config = config.settled(int(store.identity.get("topk") or 0))
    if config.target is not None:
        _check_target(config.target, store)
    start = warm_start.record_for(config)
    drafter = geometry(config, store, start)
    if start is not None and config.warm_start is not None:
        warm_start.require_fits(start, drafter)
    if config.objective().needs_topk and not store.identity.get("topk"):
        raise ConfigRefused(
            f"--loss {config.loss} with --labels {config.labels} needs the teacher's top logits, {config.store} was "
            "made with --topk 0; extract again with some, or train with --loss ce --labels data"
        )
    documents, _ = select(store, "train")
    if has_an_anchor(store, documents, config.max_length) is False:
        holds = f"it holds {len(store.documents)} documents in {len(store.blocks)} blocks"
        raise NothingLeft(f"{nothing_to_learn(config.store, config.max_length)}; {holds}")
    _require_memory(config, store)
    require_writable(config.run_dir())
    steps = config.steps
    if steps is None:
        steps = total_steps(documents.length, config)
    return {
        "command": "train",
        "config": to_dict(config),
        "drafter": drafter.to_hf_config(),
        "total_steps": steps,
        **({} if start is None else {"warm_start": start}),
        **pinned_store.described(store),
    }


def geometry(config: TrainConfig, store: TeacherStore, start: warm_start.Record | None = None) -> DrafterConfig:
    """The drafter this command asks for on this store; `start`: the record of the weights that it begins with."""
    identity = store.identity
    mask = config.mask_token_id if config.mask_token_id is not None else identity.get("mask_token_id")
    if mask is None:
        raise MaskTokenMissing(
            f"{config.store} names no mask token; pass --mask-token-id (an unused row of the target's embedding)"
        )
    if not 0 <= mask < identity["vocab_size"]:
        raise MaskTokenOutOfRange(
            f"mask token {mask} has no embedding row: the target's vocabulary has "
            f"{identity['vocab_size']}; pass another --mask-token-id"
        )
    described = read_object(
        store.target_dir / "config.json",
        f"delete {store.target_dir} and run the same `dflash extract` command: it is made again",
    )
    drafter = drafter_geometry(described, config.geometry(identity, mask) | warm_start.inherited(start))
    if mask != identity.get("mask_token_id"):  # the store's own was checked when it was chosen
        _require_unused(mask, store, drafter)
    if drafter.hidden_size != drafter.target_hidden_size:
        raise ConfigRefused(
            f"--hidden-size {drafter.hidden_size} differs from the target's {drafter.target_hidden_size}: "
            "the drafter shares the target's embedding and head"
        )
    return drafter


def _require_memory(config: TrainConfig, store: TeacherStore) -> None:
    """Raise ConfigRefused when not even one row fits into this machine: an allocator's error names no option.

    Counted: a token's features; a block's labels and, with distributions, the teacher's K ids, logits and logsumexp.
    """
    identity, memory, goal = store.identity, Kernel().memory(), config.objective()
    room = min((limit for name in ("max", "total") if (limit := memory[name]) is not None), default=None)
    token = len(identity["target_layer_ids"]) * identity["hidden_size"]
    token *= 1 if identity.get("precision") == "int8" else 2
    label = 8 + 1 + (6 * int(identity["topk"]) + 4 if goal.needs_distributions else 0)
    for option, count, size in (
        ("--max-length", config.max_length, token),
        ("--anchors", config.anchors, label * config.block_size),
    ):
        if room is not None and count * size > room:
            raise ConfigRefused(
                f"{option} {count:,} takes {count * size / 1e9:,.0f} GB for one row, this machine has "
                f"{room / 1e9:,.0f} GB; lower it"
            )


def _require_unused(mask: int, store: TeacherStore, drafter: DrafterConfig) -> None:
    """Raise MaskTokenInUse for a mask token that means something: a drafter would learn to draft it."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(drafter, name)
        if mask in (value if isinstance(value, list | tuple) else (value,)):
            raise MaskTokenInUse(f"mask token {mask} is the target's {name}; pass an id without a meaning")
    count = sum(int((store.read_block_array(block, "input_ids") == mask).sum()) for block in store.blocks)
    if count:
        raise MaskTokenInUse(
            f"mask token {mask} occurs {count:,} times in {store.location}; pass an id that never occurs, or leave "
            f"--mask-token-id out (the store has {store.identity.get('mask_token_id')})"
        )


def _check_target(target: str, store: TeacherStore) -> None:
    from shared.target_identity import target_identity

    named = store.identity["target"]
    asked = target_identity(target)
    compared = ("weights_sha256", "config_sha256", "tokenizer_sha256", "num_hidden_layers", "hidden_size", "vocab_size")
    found = differences(named, {field: asked[field] for field in compared if field in named})
    for field, (have, want) in found.items():
        raise StoreMismatch(
            f"{store.location} was made from a target with {field} = {have!r}, --target {target} has {want!r}; leave "
            "--target out (training needs no target), or train from a store of that target"
        )


def open_run(run_dir: Path, run: dict[str, Any], config: TrainConfig) -> int:
    """Write run.json, after making sure that what the folder holds is the same run; returns the steps already saved.

    Raises CheckpointMismatch when a checkpoint there was made under other settings, ConfigRefused with --no-resume.
    """
    newest, ignored = checkpoint_folder.newest_complete(run_dir)
    for item in ignored:
        say(f"ignored {item.path}: {item.reason}")
    checkpoint_folder.require_records(run_dir, newest, ignored)
    done = 0
    if newest is not None:
        if not config.resume:
            raise ConfigRefused(
                f"{run_dir} already holds {newest.name}; drop --no-resume to continue it, or choose another --run"
            )
        info = checkpoint_folder.read_info(newest)
        checkpoint_folder.require_same(info, run, FREE_FIELDS, newest)
        done = int(info["global_step"])
        say(f"continuing {newest} (step {done} of {run['total_steps']})")
    run["continues_at"] = done
    write_json(run_dir / RUN_FILE, {"provenance": provenance.collect()} | run)  # the long list of blocks last
    return done
