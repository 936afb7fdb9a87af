"""`dflash extract`, parent side: everything that can be refused is refused here, then a supervisor has the run.

Called by stage1_extract/cli.py. No torch of ours in this process. Read stage1_extract/worker.py next: the main loop;
stage1_extract/finish.py: the check at its end.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from manifests.commit import read
from manifests.derived_store import require_extracted
from manifests.launch import LaunchSpec, start_supervisor
from manifests.runs import Recording, recording
from manifests.viewer import Started, detach, view
from shared.atomic import disk_faults, remove_partials, require_writable, write_json
from shared.config import to_dict
from shared.errors import ConfigRefused, StoreMismatch, TooManyShards
from shared.geometry import check_target_layer_ids, default_target_layer_ids
from shared.progress import say
from shared.provenance import distribution_version
from shared.rows import PreparedRows
from shared.store import comparable, read_identity, require_same
from shared.store_write import create
from shared.target_identity import find_target, load_tokenizer, target_identity
from stage1_extract.config import Dtype, ExtractConfig
from stage1_extract.disk_plan import Blocks, StoreShape, store_size
from stage1_extract.disk_room import Room, readable_bytes, require_room, reserve_of
from stage1_extract.finish import report
from stage1_extract.mask_token import choose_mask_token
from stage1_extract.plan import Plan, is_exported, remaining_blocks, settle_plan
from stage1_extract.plan_inputs import tokenizer_bytes


def run(config: ExtractConfig) -> None:
    """Make the store or go on with it. Raises the target, store, path and process errors of shared/errors.py."""
    require_writable(config.out)
    require_extracted(config.out)
    rows = PreparedRows.open(config.data, verify=True)
    if config.shards > rows.n_documents:
        raise TooManyShards(
            f"--shards {config.shards} but {config.data} has {rows.n_documents} rows; use --shards {rows.n_documents} "
            "or fewer"
        )
    device = resolve_device(config.device)
    identity = make_identity(config, rows, resolve_dtype(config.dtype, device))
    begun = bool(
        read(config.out, "shards")
    )  # also blocks that were withdrawn since: what is made again must be the same
    if begun:
        require_same(read_identity(config.out), comparable(identity), config.out)
    elif (config.out / "target").exists() and not (config.out / "store.json").exists():
        raise ConfigRefused(
            f"{config.out / 'target'} is no part of a store and would be in its way; choose another --out"
        )
    with recording(config.out, "extract", to_dict(config)) as command:
        started = _begin(config, command, rows, identity, begun)
    (detach if config.detach else view)(started)


def _begin(
    config: ExtractConfig, command: Recording, rows: PreparedRows, identity: dict[str, Any], begun: bool
) -> Started | None:
    """Hand what is left to do over to a supervisor; None when nothing is."""
    if not begun:
        _forget(config.out)
        create(config.out, identity)
    for part in ("", "blocks", "workers", "progress"):
        remove_partials(config.out / part)
    plan = settle_plan(config.out, rows.lengths.tolist(), config.block_tokens)
    remaining = remaining_blocks(config.out, plan)
    if not remaining and is_exported(config.out):
        say(f"{config.out} is complete: all {plan.num_blocks} blocks are there; nothing to do")
        report(config.out, plan, 0.0)
        return None
    _require_space(config, rows, plan, remaining, identity)
    if len(remaining) < config.shards:
        say(
            f"extract: only {len(remaining)} of {plan.num_blocks} blocks are to do for {config.shards} processes; "
            "smaller --block-tokens would use all of them"
        )
    work = {
        "config": to_dict(config),
        "target_layer_ids": identity["target_layer_ids"],
        "device": resolve_device(config.device),
        "dtype": identity["dtype"],
        "remaining": remaining,
    }
    write_json(config.out / "work.json", work)
    return start_supervisor(
        command,
        LaunchSpec(
            run_dir=config.out,
            role="extract",
            entry="stage1_extract.worker:main",
            num_workers=config.shards,
            summed_progress=True,
            independent=True,
            finish="stage1_extract.finish:finish",
            restarts=config.restarts,
            hang_limit_scale=config.hang_limit_scale,
            on_disk_full="pause" if config.on_disk_full == "pause" else "stop",
        ),
    )


def _forget(store: Path) -> None:
    """Take away what an attempt without a single block left: nothing was made under its settings yet.

    store.json goes last: it says that the rest is ours to take away.
    """
    if not (store / "store.json").exists():
        return
    with disk_faults(store):
        if (store / "target").exists():
            shutil.rmtree(store / "target")
        for name in ("plan.json", "store.json"):
            (store / name).unlink(missing_ok=True)


def resolve_device(device: str) -> str:
    """ "auto" as cuda or cpu, from the driver's files and the kind of torch that is installed, without importing it."""
    if device != "auto":
        return device
    has_gpu = Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()
    return "cuda" if has_gpu and not metadata.version("torch").endswith("+cpu") else "cpu"


def resolve_dtype(dtype: Dtype, device: str) -> str:
    """ "auto" is bfloat16 on CUDA and float32 on CPU."""
    if dtype == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    return dtype


def make_identity(config: ExtractConfig, rows: PreparedRows, dtype: str) -> dict[str, Any]:
    """What the store is a function of. Raises for a target, rows, layer ids, top-k or mask token that do not fit."""
    target = target_identity(config.target)
    for field in ("tokenizer_sha256", "chat_template_sha256"):
        if rows.info[field] != target[field]:
            raise StoreMismatch(
                f"{config.data} was prepared with {field} {rows.info[field][:12]}, target {config.target} has "
                f"{target[field][:12]}; prepare the rows with this target"
            )
    if config.target_layer_ids:
        check_target_layer_ids(config.target_layer_ids, target["num_hidden_layers"])
    layer_ids = config.target_layer_ids or default_target_layer_ids(target["num_hidden_layers"], config.num_taps)
    vocab_size = target["vocab_size"]
    if config.topk > vocab_size:
        raise ConfigRefused(f"topk {config.topk} is more than the target's {vocab_size} tokens")
    occurrences = np.bincount(rows.input_ids, minlength=vocab_size)
    if len(occurrences) > vocab_size:
        raise StoreMismatch(
            f"{config.data} holds token id {len(occurrences) - 1}, but target {config.target} has {vocab_size} "
            "embedding rows; prepare the rows with this target"
        )
    return {
        "target": target,
        "target_layer_ids": list(layer_ids),
        "num_hidden_layers": target["num_hidden_layers"],
        "hidden_size": target["hidden_size"],
        "vocab_size": vocab_size,
        "mask_token_id": choose_mask_token(
            load_tokenizer(config.target), vocab_size, occurrences, config.mask_token_id
        ),
        "topk": config.topk,
        "dtype": dtype,
        "precision": config.precision,
        "last_hidden": config.resolved_last_hidden,
        "version": distribution_version(),
        "block_tokens": config.block_tokens,
        "rows_sha256": rows.info["rows_sha256"],
        "chat_template_kwargs": rows.info.get("identity", {}).get("chat_template_kwargs") or {},
        "documents": rows.n_documents,
        "tokens": int(rows.offsets[-1]),
    }


def _require_space(
    config: ExtractConfig, rows: PreparedRows, plan: Plan, remaining: list[int], identity: dict[str, Any]
) -> None:
    # With the weights: a Hub target is fetched here, under the Hub's own bars; workers waiting for it would look hung.
    files = find_target(config.target, weights=True)
    shape = replace(StoreShape.of_identity(identity), tokenizer_bytes=tokenizer_bytes(files))
    blocks = Blocks.of_plan(rows.lengths, plan, remaining)
    left = store_size(shape, blocks, with_target=not is_exported(config.out))
    say(
        f"extract: {left.num_tokens:,} tokens in {len(remaining)} of {plan.num_blocks} blocks, "
        f"{readable_bytes(left.total.bytes)} ({left.bytes_per_token:,.0f} bytes a token, {config.precision}); "
        f"layers {identity['target_layer_ids']}, mask token {identity['mask_token_id']}"
    )
    if config.on_disk_full != "wait":
        reserve = reserve_of(config.out, config.disk_reserve_gb)
        require_room(config.out, left.total, Room.at(config.out), reserve)
