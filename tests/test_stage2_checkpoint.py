"""Checkpoints: complete or not there, whatever the moment of the kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import GEOMETRY

from manifests.commit import Ledger, read
from shared.errors import CheckpointMismatch, DiskFull, StoreDamaged
from stage2_train import checkpoint
from stage2_train.checkpoint import Snapshot, load_drafter
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info, require_records, require_same
from stage2_train.drafter import Drafter
from stage2_train.optimizers import adamw

CONFIG = GEOMETRY
RUN = {
    "config": {"gamma": None, "seed": 0, "batch_rows": 8, "nproc": 1},
    "drafter": CONFIG.to_hf_config(),
    "total_steps": 50,
    "store": {"path": "x.zarr", "identity": {"target": {"weights_sha256": "a"}, "mask_token_id": 19}},
}


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, so the disk is left as a kill at that point leaves it."""


def trained(seed: int = 0) -> tuple[Drafter, torch.optim.AdamW]:
    drafter = Drafter(CONFIG).initialise(seed)
    optimizer = adamw(drafter.parameters(), 1e-2, 0.0)
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    return drafter, optimizer


def save(run_dir: Path, step: int, keep: int = 3, estimate: float | None = None) -> Path:
    drafter, optimizer = trained(step)
    snapshot = Snapshot(loop_state={"global_step": step, "epoch": 1}, run=RUN, acceptance_length_estimate=estimate)
    folder = checkpoint.save(run_dir, drafter, optimizer, snapshot)
    checkpoint.record(run_dir, folder, Ledger(run_dir, "test"), "run", snapshot, keep)
    return folder


def test_what_is_restored_is_what_was_saved(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    drafter, optimizer = trained(7)
    other, empty = Drafter(CONFIG).initialise(99), adamw(Drafter(CONFIG).parameters(), 1e-2, 0.0)
    empty = adamw(other.parameters(), 1e-2, 0.0)
    assert checkpoint.restore(folder, other, empty) == {"global_step": 7, "epoch": 1}
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), empty.state_dict()["state"].values(), strict=True
    ):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key])
            assert theirs[key].dtype == torch.float32  # the step too: bf16 could not count to 300


def test_a_run_a_checkpoint_and_an_export_all_load(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = save(tmp_path, 7)
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_bytes((folder / "config.json").read_bytes())
    (exported / "model.safetensors").write_bytes((folder / "drafter.safetensors").read_bytes())
    want = trained(7)[0].state_dict()
    for path in (tmp_path, folder, exported):
        drafter, config, _info = load_drafter(path)
        assert config == CONFIG
        assert not any(p.requires_grad for p in drafter.parameters())
        assert all(torch.equal(tensor, want[name]) for name, tensor in drafter.state_dict().items())
    assert load_drafter(tmp_path)[2]["store"]["identity"]["target"] == {"weights_sha256": "a"}
    assert load_drafter(tmp_path)[2]["global_step"] == 7


def test_missing_renamed_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path, 7)
    path = folder / "drafter.safetensors"
    whole = load_file(path)
    broken = [
        {k: v for k, v in whole.items() if k != "norm.weight"},
        {k.replace("hidden_norm", "hiddennorm"): v for k, v in whole.items()},
        whole | {"extra": torch.zeros(1)},
        whole | {"norm.weight": torch.ones(15)},
    ]
    for tensors in broken:
        save_file(tensors, path)
        with pytest.raises(StoreDamaged, match=r"norm|extra"):
            load_drafter_of(folder)


def load_drafter_of(folder: Path) -> Any:
    from safetensors.torch import load_file

    return checkpoint._load_strictly(Drafter(CONFIG), load_file(folder / "drafter.safetensors"), folder)


def test_nothing_to_load_says_what_was_ignored(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="dflash train"):
        load_drafter(tmp_path)
    folder = save(tmp_path, 7)
    (folder / "optimizer.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointMismatch, match=r"step-00000007: damaged: optimizer\.pt has 3 of"):
        load_drafter(tmp_path)


def test_the_newest_complete_one_is_taken_and_the_others_named(tmp_path: Path) -> None:
    old, new = save(tmp_path, 7), save(tmp_path, 9)
    (new / "drafter.safetensors").write_bytes(b"")
    found, ignored = newest_complete(tmp_path)
    assert found == old
    assert [(item.path, item.reason.split(":")[0]) for item in ignored] == [(new, "damaged")]


@pytest.mark.crash
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is cut at its n-th durable act (fsync, rename, unlink, record) for every n, until it gets through."""
    reached: set[int] = set()
    for cut in range(1, 200):
        run_dir = tmp_path / str(cut)
        save(run_dir, 7)
        calls = 0

        def dying(real: Any, cut: int = cut) -> Any:
            def act(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == cut:
                    raise Killed
                return real(*args, **options)

            return act

        with monkeypatch.context() as patch:
            for name in ("fsync", "write", "rmdir", "unlink"):
                patch.setattr(os, name, dying(getattr(os, name)))
            patch.setattr(Path, "rename", dying(Path.rename))
            try:
                save(run_dir, 9, keep=1)
                through = True
            except Killed:
                through = False
        found, ignored = newest_complete(run_dir)
        assert found is not None
        step = read_info(found)["global_step"]
        reached.add(step)
        drafter, _, info = load_drafter(run_dir)
        assert info["global_step"] == step
        assert torch.equal(drafter.fc.weight, trained(step)[0].fc.weight)
        if step == 7 and (folder_of(run_dir, 9)).exists():
            assert ignored  # published but not recorded: said, not silently passed over
        save(run_dir, 9, keep=1)  # and the next attempt succeeds over what is left
        assert newest_complete(run_dir)[0] == folder_of(run_dir, 9)
        if through:
            assert calls < cut
            break
    assert reached == {7, 9}
    assert cut > 10


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, estimate in ((1, 1.5), (2, 3.0), (3, 2.0), (4, None), (5, 2.5)):
        save(tmp_path, step, keep=2, estimate=estimate)
    kept = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]
    assert [record["global_step"] for record in read(tmp_path, "checkpoints")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("config", "seed"), 1, r"seed = 0, this command asks 1"),
        (("config", "batch_rows"), 4, r"batch_rows = 8, this command asks 4"),
        (("config", "gamma"), 2.0, r"gamma = None, this command asks 2.0"),
        (("drafter", "block_size"), 8, r"block_size = 4, this command asks 8"),
        (("drafter", "dflash_config", "mask_token_id"), 5, r"dflash_config.mask_token_id = 19, this command asks 5"),
        (
            ("drafter", "dflash_config", "target_layer_ids"),
            [1, 3],
            r"target_layer_ids = \[1, 2\], this command asks \[1, 3\]",
        ),
        (("total_steps",), 60, r"total_steps = 50, this command asks 60"),
    ],
)
def test_another_configuration_is_refused_with_both_values(path: tuple[str, ...], value: Any, said: str) -> None:
    import copy

    asked = copy.deepcopy(RUN)
    inner: Any = asked
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointMismatch, match=said):
        require_same(RUN, asked, frozenset({"nproc"}), Path("step"))


def test_what_moves_no_number_may_differ() -> None:
    require_same(RUN, RUN | {"config": RUN["config"] | {"nproc": 2}}, frozenset({"nproc"}), Path("step"))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["drafter.safetensors", "config.json", "checkpoint.json"])
def test_a_checkpoint_damaged_in_place_is_one_line(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 4)
    size = (folder / name).stat().st_size
    (folder / name).write_bytes(b"\xff" * size)
    with pytest.raises((StoreDamaged, CheckpointMismatch), match=r"damaged|not JSON"):
        load_drafter(folder)


def test_checkpoints_follow_the_umask_and_a_failed_save_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 4)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_state", full)
    with pytest.raises(DiskFull):
        save(tmp_path, 8)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [folder.name]


@pytest.mark.parametrize("broken", ["damaged", "never recorded"])
def test_what_cannot_be_resumed_takes_no_place_of_what_can(tmp_path: Path, broken: str) -> None:
    """A run goes on from step 2, past a folder of step 9 that is no use: what it saves from there on is kept."""
    for step in (1, 2):
        save(tmp_path, step)
    newest = save(tmp_path, 9)
    if broken == "damaged":
        (newest / "optimizer.pt").write_bytes(b"cut")
    else:
        ledger = next((tmp_path / "manifest").glob("checkpoints*.jsonl"))
        ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if "step-00000009" not in line))
    assert newest_complete(tmp_path)[0] == folder_of(tmp_path, 2)
    for step in (3, 4):
        saved = save(tmp_path, step, keep=1)
        assert newest_complete(tmp_path)[0] == saved
    kept = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000009"]


def test_a_run_whose_records_are_lost_does_not_begin_anew(tmp_path: Path) -> None:
    """A save that was cut off leaves one folder without a record; of several, the records are gone."""
    save(tmp_path, 7)
    for path in (tmp_path / "manifest").glob("checkpoints*"):
        path.unlink()
    require_records(tmp_path, *newest_complete(tmp_path))
    drafter, optimizer = trained(9)
    snapshot = Snapshot(loop_state={"global_step": 9}, run=RUN, acceptance_length_estimate=None)
    checkpoint.save(tmp_path, drafter, optimizer, snapshot)
    with pytest.raises(CheckpointMismatch, match=r"holds 2 whole checkpoints, the newest step-00000009, and a record"):
        require_records(tmp_path, *newest_complete(tmp_path))
    save(tmp_path, 8)
    require_records(tmp_path, *newest_complete(tmp_path))
