"""A run trains from the blocks that were there when it began, and from exactly these whenever it goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

from manifests.blocks import recorded_blocks
from manifests.commit import Ledger, files_of
from manifests.records import ShardRecord
from shared.errors import DflashError, Interrupted, StoreDamaged, StoreIncomplete, StoreMismatch
from shared.json_file import sealed
from shared.store import snapshot_of
from stage2_train import train as train_module
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info
from stage2_train.config import TrainConfig

TEXTS = counting_texts(36)


def growing_store(path: Path) -> Callable[[], None]:
    """A store whose third block is still to come; the returned function lets it come."""
    make_store(path, TEXTS, blocks=3)
    (records,) = files_of(path, "shards")
    whole = records.read_bytes()
    records.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    shutil.move(path / "blocks" / "000002", path / "000002")

    def grow() -> None:
        shutil.move(path / "000002", path / "blocks" / "000002")
        records.write_bytes(whole)

    return grow


def stopped_at(step: int, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until a stop is asked for at `step`."""
    asked = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(asked) >= step)
        with pytest.raises(Interrupted):
            run_here(config)


def run_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def seals(store: Path) -> dict[int, str]:
    return {block: record["seal"] for block, record in recorded_blocks(store).items()}


def test_an_unfinished_store_is_trained_from_only_when_asked(tmp_path: Path) -> None:
    growing_store(tmp_path / "x.zarr")
    with pytest.raises(StoreIncomplete, match="2 of 3"):
        run_here(config_of(tmp_path / "x.zarr", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    parts = run_here(config_of(tmp_path / "x.zarr", tmp_path / "run", partial=True, steps=2))
    assert set(parts.builder.documents.block.tolist()) == {0, 1}
    run = run_of(tmp_path / "run")
    assert run["blocks"] == {str(block): seal for block, seal in seals(tmp_path / "x.zarr").items()}
    assert run["store"]["snapshot"] == snapshot_of(seals(tmp_path / "x.zarr"))
    newest, _ = newest_complete(tmp_path / "run")
    assert newest is not None
    assert read_info(newest)["store"] == run["store"]


def test_a_finished_store_is_pinned_too(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", TEXTS, blocks=3)
    run_here(config_of(store, tmp_path / "run", steps=2))
    assert run_of(tmp_path / "run")["store"]["snapshot"] == snapshot_of(seals(store))
    assert len(run_of(tmp_path / "run")["blocks"]) == 3


def test_a_resumed_run_keeps_to_its_blocks_while_the_store_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow = growing_store(tmp_path / "x.zarr")
    # Steps by epochs: the number of steps, too, must be that of the pinned documents.
    settings: dict[str, Any] = {"partial": True, "steps": None, "epochs": 2}
    straight = run_here(config_of(tmp_path / "x.zarr", tmp_path / "straight", **settings))
    cut = config_of(tmp_path / "x.zarr", tmp_path / "cut", **settings)
    stopped_at(5, cut, monkeypatch)
    grow()
    parts = run_here(cut)
    assert set(parts.builder.documents.block.tolist()) == {0, 1}
    total = straight.run["total_steps"]
    assert parts.run["total_steps"] == total
    weights = [load_file(folder_of(tmp_path / n, total) / "drafter.safetensors") for n in ("straight", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    fresh = run_here(config_of(tmp_path / "x.zarr", tmp_path / "fresh", partial=True, steps=2))
    assert set(fresh.builder.documents.block.tolist()) == {0, 1, 2}


def test_a_run_that_has_saved_nothing_takes_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = growing_store(tmp_path / "x.zarr")
    config = config_of(tmp_path / "x.zarr", tmp_path / "run", partial=True, steps=3)
    stopped_at(0, config, monkeypatch)
    assert len(run_of(tmp_path / "run")["blocks"]) == 2
    grow()
    run_here(config)
    assert len(run_of(tmp_path / "run")["blocks"]) == 3


def begun(tmp_path: Path, **changes: Any) -> TrainConfig:
    """A run with a checkpoint at step 2 of 4, on a growing store."""
    growing_store(tmp_path / "x.zarr")
    config = config_of(tmp_path / "x.zarr", tmp_path / "run", partial=True, steps=4, save_every=2, **changes)
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(2, config, patch)
    return config


def another_block(store: Path) -> None:
    """Block 1 made anew from other texts, as records say it."""
    other = make_store(store.with_name("other.zarr"), counting_texts(36, seed=5), blocks=3)
    shutil.rmtree(store / "blocks" / "000001")
    shutil.copytree(other / "blocks" / "000001", store / "blocks" / "000001")
    record = recorded_blocks(other)[1]
    fields = {key: record[key] for key in ("block", "rank", "documents", "tokens", "bytes", "seconds", "seal")}
    Ledger(store, "later").append(ShardRecord(**fields))


def withdrawn_block(store: Path) -> None:
    record = recorded_blocks(store)[1]
    fields = {key: record[key] for key in ("block", "rank", "documents", "tokens", "bytes", "seconds", "seal")}
    Ledger(store, "later").append(ShardRecord(**fields, state="withdrawn"))


def change_identity(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    identity = json.loads((store / "store.json").read_text())
    del identity["crc32c"]
    change(identity)
    (store / "store.json").write_text(json.dumps(sealed(identity)))


def other_taps(store: Path) -> None:
    change_identity(store, lambda identity: identity.update(target_layer_ids=[1, 3]))


def other_weights(store: Path) -> None:
    change_identity(store, lambda identity: identity["target"].update(weights_sha256="9"))


def one_field_less(store: Path) -> None:
    change_identity(store, lambda identity: identity.pop("rows_sha256"))


def edited_list(store: Path) -> None:
    run = run_of(store.parent / "run")
    run["blocks"].pop("1")
    (store.parent / "run" / "run.json").write_text(json.dumps(run))


def lost_list(store: Path) -> None:
    run = run_of(store.parent / "run")
    del run["blocks"]
    (store.parent / "run" / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (another_block, StoreMismatch, r"with block 1 of seal [0-9a-f]{32}, it now has block 1 of seal [0-9a-f]{32};"),
        (withdrawn_block, StoreMismatch, r"with block 1 of seal [0-9a-f]{32}, it now has no block 1;"),
        (other_taps, StoreMismatch, r"target_layer_ids = \[1, 2\], .* has \[1, 3\]"),
        (other_weights, StoreMismatch, r"target\.weights_sha256 = '0', .* has '9'"),
        (one_field_less, StoreMismatch, r"rows_sha256 = '1', .* has None"),
        (edited_list, StoreMismatch, r"trained from snapshot [0-9a-f]{32}, .*run\.json lists blocks of [0-9a-f]{32}"),
        (lost_list, StoreDamaged, r"run\.json does not list the run's blocks"),
    ],
)
def test_another_store_is_refused_by_its_first_difference(
    tmp_path: Path, change: Callable[[Path], None], error: type[DflashError], said: str
) -> None:
    config = begun(tmp_path)
    change(tmp_path / "x.zarr")
    with pytest.raises(error, match=said):
        run_here(config)
    assert newest_complete(tmp_path / "run")[0] == folder_of(tmp_path / "run", 2)


def test_partial_is_not_taken_back_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = growing_store(tmp_path / "x.zarr")
    settings: dict[str, Any] = {"steps": 4, "save_every": 2}
    config = config_of(tmp_path / "x.zarr", tmp_path / "run", partial=True, **settings)
    stopped_at(2, config, monkeypatch)
    with pytest.raises(StoreIncomplete, match="2 of 3"):
        run_here(config_of(tmp_path / "x.zarr", tmp_path / "run", **settings))
    grow()
    with pytest.raises(StoreMismatch, match=r"with no block 2, it now has block 2 of seal .*; --partial goes on"):
        run_here(config_of(tmp_path / "x.zarr", tmp_path / "run", **settings))
    parts = run_here(config)
    assert len(parts.builder.store.blocks) == 2


def test_a_whole_store_that_got_more_blocks_is_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "x.zarr", TEXTS, blocks=3)
    settings: dict[str, Any] = {"steps": 4, "save_every": 2}
    stopped_at(2, config_of(store, tmp_path / "run", **settings), monkeypatch)
    record = recorded_blocks(store)[2]
    fields = {key: record[key] for key in ("rank", "documents", "tokens", "bytes", "seconds", "seal")}
    Ledger(store, "later").append(ShardRecord(block=3, **fields))
    plan = json.loads((store / "plan.json").read_text())["blocks"]
    (store / "plan.json").write_text(json.dumps(sealed({"blocks": [*plan, [36, 37]]})))
    with pytest.raises(StoreMismatch, match=r"with no block 3, it now has block 3 of seal"):
        run_here(config_of(store, tmp_path / "run", **settings))
    parts = run_here(config_of(store, tmp_path / "run", partial=True, **settings))
    assert sorted(parts.builder.store.blocks) == [0, 1, 2]


def test_a_moved_store_of_the_same_content_is_the_same_store(tmp_path: Path) -> None:
    config = begun(tmp_path)
    moved = tmp_path / "elsewhere" / "y.zarr"
    moved.parent.mkdir()
    (tmp_path / "x.zarr").rename(moved)

    def renamed(identity: dict[str, Any]) -> None:
        identity.update(store_uuid="0" * 32)
        identity["target"].update(name="another folder")

    change_identity(moved, renamed)
    run_here(config_of(moved, config.run_dir(), partial=True, steps=4, save_every=2))
    assert newest_complete(tmp_path / "run")[0] == folder_of(tmp_path / "run", 4)


def test_blocks_without_a_target_are_not_enough(tmp_path: Path) -> None:
    growing_store(tmp_path / "x.zarr")
    (tmp_path / "x.zarr" / "target").rename(tmp_path / "later")
    with pytest.raises(StoreIncomplete, match=r"2 blocks and no target/head\.safetensors"):
        run_here(config_of(tmp_path / "x.zarr", tmp_path / "run", partial=True))


def test_the_parent_of_a_training_never_imports_torch() -> None:
    """What kills a worker must not kill the process that watches it, and a refusal must not take seconds."""
    code = "import sys, stage2_train.launch_train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
