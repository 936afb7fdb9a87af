"""Training that begins with an existing drafter: which one, does it fit, is it still the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import save_run
from tiny_target import save_target
from toy_run import config_of, curve, run_here
from toy_store import counting_texts, make_store

from manifests.commit import read
from shared.errors import CheckpointMismatch, NonFinite, StoreDamaged
from shared.json_file import read_object
from stage2_train import launch_train, warm_start
from stage2_train.checkpoint import load_drafter
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info
from stage2_train.config import TrainConfig
from stage2_train.config_eval import EvalConfig, ExportConfig
from stage2_train.drafter import Drafter
from stage2_train.export import export
from stage2_train.subject import load_subject

SHORT: dict[str, Any] = {"steps": 4, "save_every": 2, "eval_every": 100}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


@pytest.fixture(scope="module")
def first(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("first") / "run"
    run_here(config_of(store, run))
    return run


@pytest.fixture(scope="module")
def published(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same drafter as others publish it: config.json and model.safetensors in bfloat16, nothing else."""
    exported = export(ExportConfig(run=first, out=tmp_path_factory.mktemp("exported") / "drafter"))
    folder = exported.parent / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(exported / name, folder / name)
    return folder


def start_of(config: TrainConfig) -> Drafter:
    """The drafter as it stands before the first step."""
    run = launch_train.check(config)
    drafter = Drafter(load_drafter(Path(run["warm_start"]["path"]))[1]).initialise(1)
    warm_start.load(drafter, run["warm_start"])
    return drafter


@pytest.mark.parametrize("kind", ["run", "checkpoint", "published"])
def test_the_first_weights_are_the_folders(
    kind: str, store: Path, first: Path, published: Path, tmp_path: Path
) -> None:
    folder = {"run": first, "checkpoint": folder_of(first, 8), "published": published}[kind]
    config = config_of(store, tmp_path / "run", warm_start=folder, learning_rate=1e-12, **SHORT)
    want = load_drafter(folder)[0].float()
    assert all(torch.equal(a, b) for a, b in zip(start_of(config).parameters(), want.parameters(), strict=True))
    parts = run_here(config)
    for have, expected in zip(parts.drafter.parameters(), want.parameters(), strict=True):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have, expected, atol=1e-9, rtol=0)
    run = json.loads((tmp_path / "run" / "run.json").read_text())["warm_start"]
    (event,) = (event for event in read(tmp_path / "run", "events") if event["event"] == "warm start")
    assert event["detail"] == run
    newest, _ = newest_complete(tmp_path / "run")
    assert newest is not None
    assert read_info(newest)["warm_start"] == run
    again = export(ExportConfig(run=tmp_path / "run", out=tmp_path / "drafter"))
    assert f"| began as | {run['path']} (`{run['weights_sha256']}`) |" in (again / "README.md").read_text()


def test_training_goes_on_from_where_the_drafter_was(store: Path, first: Path, tmp_path: Path) -> None:
    run_here(config_of(store, tmp_path / "warm", warm_start=first, **SHORT))
    cold, warm = (curve(run, "nll", "heldout") for run in (first, tmp_path / "warm"))
    assert warm[0] == cold[10] < cold[0]
    assert curve(tmp_path / "warm")[1] < 0.9 * curve(first)[1]


def test_rope_and_epsilon_come_with_the_weights(store: Path, published: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(published, tmp_path / "drafter")
    described = json.loads((folder / "config.json").read_text())
    described |= {"rope_theta": 77.0, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(described))
    config = config_of(store, tmp_path / "run", warm_start=folder, **SHORT)
    run_here(config)
    shutil.rmtree(folder)
    plain = config_of(store, tmp_path / "run", **SHORT)
    for asked in (config, plain):  # finished: the same command, and the one without the option, both still fit
        run = launch_train.check(asked)
        assert (run["drafter"]["rope_theta"], run["drafter"]["rms_norm_eps"]) == (77.0, 1e-5)
        launch_train.open_run(tmp_path / "run", run, asked)


def test_going_on_needs_the_folder_no_more_and_refuses_another(
    store: Path, first: Path, published: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(published, tmp_path / "drafter")
    run_here(config_of(store, tmp_path / "run", warm_start=folder, **SHORT))
    shutil.rmtree(folder_of(tmp_path / "run", 4))
    record = read_info(folder_of(tmp_path / "run", 2))["warm_start"]
    with pytest.raises(CheckpointMismatch, match=rf"began with the weights {record['weights_sha256']}.*holds \w{{64}}"):
        run_here(config_of(store, tmp_path / "run", warm_start=folder_of(first, 4), **SHORT))
    shutil.rmtree(folder)
    run_here(config_of(store, tmp_path / "run", **SHORT))
    assert read_info(folder_of(tmp_path / "run", 4))["warm_start"] == record
    with pytest.raises(CheckpointMismatch, match="began with random weights") as caught:
        run_here(config_of(store, first, warm_start=published))
    assert caught.value.exit_code == 60


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, "num_hidden_layers = 2, this run has 3; change --num-layers"),
        ({"intermediate_size": 40}, "intermediate_size = 48, this run has 40"),
        ({"head_dim": 32}, "head_dim = 64, this run has 32"),
        ({"num_heads": 2}, "num_attention_heads = 4, this run has 2"),
        ({"mask_token_id": 38}, "mask_token_id = 39, this run has 38"),
        ({"is_causal": True}, r"causal_layers = \[\], this run has \[0, 1\]; change --is-causal"),
        ({"layer_types": ("2xsliding",), "sliding_window": 5, "is_causal": False}, "layer_types = .*full_attention"),
        ({"shift_labels": True}, "shift_labels = False, this run has True"),
    ],
)
def test_another_geometry_is_refused_with_field_and_values(
    changes: dict[str, Any], said: str, store: Path, published: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointMismatch, match=said):
        launch_train.check(config_of(store, tmp_path / "run", warm_start=published, **changes))
    assert not (tmp_path / "run").exists()


def test_other_taps_are_refused_and_another_block_size_is_not(store: Path, published: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other.zarr", counting_texts(8), identity={"target_layer_ids": [0, 3]})
    with pytest.raises(CheckpointMismatch, match=r"target_layer_ids = \(1, 2\), this run has \(0, 3\); the folder be"):
        launch_train.check(config_of(other, tmp_path / "run", warm_start=published))
    launch_train.check(config_of(store, tmp_path / "run", warm_start=published, block_size=3))


def test_what_is_no_drafter_is_refused(store: Path, published: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, said in (
        (tmp_path / "gone", "is neither a drafter's folder"),
        (empty, "is neither a drafter's folder"),
        (shutil.copytree(published, tmp_path / "bare"), "no weights in one file"),
    ):
        (folder / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(CheckpointMismatch, match=said):
            launch_train.check(config_of(store, tmp_path / "run", warm_start=folder))
    described = {"dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 2]}}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointMismatch, match="has no hidden_size; it is not a drafter's"):
        launch_train.check(config_of(store, tmp_path / "run", warm_start=tmp_path / "bare"))


def test_weights_changed_between_check_and_start_are_refused(store: Path, published: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(published, tmp_path / "drafter")
    config = config_of(store, tmp_path / "run", warm_start=folder, **SHORT)
    run = launch_train.check(config)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=r"were \w{64} when the run began and are \w{64} now"):
        warm_start.begin(Drafter(load_drafter(folder)[1]), run, tmp_path / "run")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, store: Path, published: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(published, tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, :2] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = r"model\.safetensors: 2 of the [\d,]+ numbers in tensor fc\.weight are not finite"
    with pytest.raises(NonFinite, match=said):
        start_of(config_of(store, tmp_path / "run", warm_start=folder, **SHORT))


def described_as(folder: Path, published: Path, changes: dict[str, Any]) -> Path:
    """A copy of a drafter whose config.json says something else."""
    described = json.loads((shutil.copytree(published, folder) / "config.json").read_text())
    nested = changes.pop("nested", {})
    described["dflash_config"] |= nested
    (folder / "config.json").write_text(json.dumps(described | changes))
    return folder


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu', a drafter here has 'silu'; start from another"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "has rope_scaling of type 'yarn', a drafter here has 'def"),
        ({"rope_parameters": YARN}, "has rope_parameters of type 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "has rope_parameters of type 'yarn'"),
        ({"num_hidden_layers": None}, "has num_hidden_layers = None; it is not a drafter's"),
        ({"num_hidden_layers": "two"}, "has num_hidden_layers = 'two'"),
        ({"head_dim": 8.5}, "has head_dim = 8.5"),
        ({"rms_norm_eps": None}, "has rms_norm_eps = None"),
        ({"layer_types": [1, 2]}, r"has layer_types = \[1, 2\]"),
        ({"dflash_config": [1]}, r"has dflash_config = \[1\], not an object"),
        ({"nested": {"target_layer_ids": "1,2"}}, "has target_layer_ids = '1,2'"),
        ({"nested": {"target_layer_ids": ["one"]}}, r"has target_layer_ids = \['one'\]"),
    ],
    ids=str,
)
def test_a_description_that_would_be_ignored_or_not_understood_is_refused(
    changes: dict[str, Any], said: str, store: Path, published: Path, tmp_path: Path
) -> None:
    folder = described_as(tmp_path / "drafter", published, dict(changes))
    with pytest.raises(CheckpointMismatch, match=rf"config\.json {said}"):
        launch_train.check(config_of(store, tmp_path / "run", warm_start=folder))


def test_plain_rotary_embedding_is_known_in_all_its_spellings(store: Path, published: Path, tmp_path: Path) -> None:
    for number, changes in enumerate(
        [
            {"rope_scaling": {"type": "default"}, "rope_parameters": None},
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        ]
    ):
        folder = described_as(tmp_path / str(number), published, dict(changes))
        launch_train.check(config_of(store, tmp_path / "run", warm_start=folder))


def test_weights_that_cannot_be_used_are_one_line(store: Path, published: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(published, tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    coded = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
    save_file(coded, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(store, tmp_path / "run", warm_start=folder, **SHORT)
    with pytest.raises(
        CheckpointMismatch, match=r"model\.safetensors: tensor \S+ holds torch\.int8, a drafter's hold fl"
    ):
        start_of(config)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreDamaged, match="has shape None"):
        start_of(config)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(StoreDamaged, match=r"is damaged: .*; restore the file, or pass another --warm-start"):
        warm_start.begin(Drafter(load_drafter(published)[1]), launch_train.check(config), tmp_path / "run")


def test_untrained_means_the_weights_a_run_began_with(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    source, run = save_run(tmp_path / "source", target, seed=5), save_run(tmp_path / "run", target, seed=6)
    folder = folder_of(run, 7)
    info = read_object(folder / "checkpoint.json", "")
    record = {"path": str(folder_of(source, 7)), "weights_sha256": warm_start._sha256(folder_of(source, 7))}
    (folder / "checkpoint.json").write_text(json.dumps(info | {"warm_start": record}))
    evaluation = EvalConfig(run=run, data=(tmp_path / "x.jsonl",), target=str(target), untrained=True)
    found, want = load_subject(evaluation).drafter, load_drafter(source)[0]
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))
