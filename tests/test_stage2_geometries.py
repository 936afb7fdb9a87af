"""The published geometries, and shifted labels, through the whole path: train, go on, decode, export, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from commands import workers_in_process
from independent_reader import read_and_draft
from tiny_target import save_target
from toy_run import curve, run_here

import stage1_extract.extract as extract_module
from shared.cli import cli
from shared.errors import CheckpointMismatch, Interrupted, StoreMismatch
from shared.target import load_target
from stage1_extract import worker
from stage2_train import launch_train
from stage2_train import train as train_module
from stage2_train.acceptance import acceptance_length
from stage2_train.attention import Layout, build_masks
from stage2_train.checkpoint import load_drafter
from stage2_train.checkpoint_folder import newest_complete
from stage2_train.config import TrainConfig
from stage2_train.config_eval import EvalConfig, ExportConfig
from stage2_train.decode import DecodeSettings, plain_decode, speculative_decode
from stage2_train.drafter import logits
from stage2_train.evaluate import evaluate
from stage2_train.export import export
from stage2_train.selection import open_store

WINDOW, BLOCK, ANSWER = 6, 4, 40
CASES: dict[str, dict[str, Any]] = {
    "5 full": {"num_layers": 5},
    "4 sliding causal, 1 full": {"num_layers": 5, "layer_types": ("4xsliding", "full"), "sliding_window": WINDOW},
    "all sliding, not causal": {
        "num_layers": 5,
        "layer_types": ("5xsliding",),
        "sliding_window": WINDOW,
        "is_causal": False,
    },
    "shifted labels": {"num_layers": 5, "shift_labels": True},
    "slot 0 trained": {"num_layers": 2, "slot_0": True},
}
CARDS = {
    "5 full": "5 x full",
    "4 sliding causal, 1 full": f"4 x sliding {WINDOW} causal, 1 x full",
    "all sliding, not causal": f"5 x sliding {WINDOW}",
    "shifted labels": "5 x full",
    "slot 0 trained": "2 x full",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its own answers as documents several windows long, and their store."""
    root = tmp_path_factory.mktemp("geometries")
    target = load_target(str(save_target(root / "target")), dtype="float32", device="cpu")
    prompts = [[10 + i, 40 + 3 * i, 90 - i] for i in range(8)]
    settings = DecodeSettings(block_size=BLOCK, max_new_tokens=ANSWER, eos_token_ids=frozenset())
    texts = plain_decode(target, prompts, settings).texts
    rows = [
        {"id": i, "input_ids": [*prompt, *text.tokens], "loss_mask": [0] * len(prompt) + [1] * ANSWER}
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--target", root / "target", "--block-size", BLOCK, "--heldout-rows", 2)
    done("prepare", root / "data.jsonl", "--out", root / "rows", *common)
    with pytest.MonkeyPatch.context() as patch:
        workers_in_process(patch, extract_module, worker)
        places = ("--target", root / "target", "--data", root / "rows", "--out", root / "x.zarr")
        done("extract", *places, "--target-layer-ids", "0,2", "--device", "cpu", "--dtype", "float32")
    assert min(open_store(root / "x.zarr").documents.length) > 5 * WINDOW
    return root


def done(*arguments: object) -> None:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


def config_of(root: Path, run: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "max_length": 48, "anchors": 24, "batch_rows": 6, "block_size": BLOCK, "device": "cpu", "steps": 40,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "learning_rate": 5e-3, "log_every": 10, "eval_every": 40,
        "save_every": 20, "loss": "ce", "weighting": "decay", **changes,
    }  # fmt: skip
    return TrainConfig(store=str(root / "x.zarr"), run=run, **values)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "shifted labels")) for name in CASES]
)
def test_a_geometry_goes_the_whole_way(name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parted = config_of(root, tmp_path / "whole", **CASES[name]), config_of(root, tmp_path / "run", **CASES[name])
    run_here(whole)
    answers = iter([False] * 13 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(answers))
        with pytest.raises(Interrupted):
            run_here(parted)
    run_here(parted)
    losses = curve(tmp_path / "whole")
    assert curve(tmp_path / "run") == losses
    assert losses[40] < 0.2 * losses[1]

    drafter, geometry, _ = load_drafter(tmp_path / "run")
    shift = bool(CASES[name].get("shift_labels"))
    (report,) = evaluate(EvalConfig(
        run=tmp_path / "run", data=(root / "rows",), target=str(root / "target"), device="cpu", timed_prompts=0,
        max_new_tokens=20,
    ))  # fmt: skip
    assert report["check"]["equal"] == report["prompts"] == 2
    assert report["decoding"]["drafts"] == len(report["acceptance_per_position"]) == BLOCK - 1 + shift

    target = load_target(str(root / "target"), dtype="float32", device="cpu")
    rows = [json.loads(line) for line in (root / "data.jsonl").read_text().splitlines()]
    settings = DecodeSettings(block_size=BLOCK, max_new_tokens=ANSWER, eos_token_ids=frozenset())
    texts = speculative_decode(target, drafter, [row["input_ids"][:3] for row in rows], settings).texts
    assert [text.tokens for text in texts] == [row["input_ids"][3:] for row in rows]
    learnt = acceptance_length([text.cycles for text in texts])
    assert learnt is not None
    assert learnt > 1.5, "drafts of the texts it was trained on must pass"

    folder = export(ExportConfig(run=tmp_path / "run", out=tmp_path / "drafter", dtype="float32"))
    again, read_back, _ = load_drafter(folder)
    assert read_back == geometry
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), drafter.parameters(), strict=True))
    card = (folder / "README.md").read_text()
    assert CARDS[name] in card
    assert ("sample_from_anchor" in card) == shift == ("vllm serve" not in card)
    same_as_an_independent_reader(folder)


def same_as_an_independent_reader(folder: Path) -> None:
    """Logits of one block behind a context of several windows."""
    drafter, config, _ = load_drafter(folder)
    generator = torch.Generator().manual_seed(0)
    length, size, hidden = 3 * WINDOW + 1, config.block_size, config.hidden_size
    features = torch.randn(length, len(config.target_layer_ids) * hidden, generator=generator)
    block, head = torch.randn(size, hidden, generator=generator), torch.randn(30, hidden, generator=generator)
    end = torch.tensor([[length]], dtype=torch.int32)
    masks = build_masks(Layout(torch.zeros_like(end), end, length, size), drafter.kinds, "sdpa", torch.float32)
    positions = torch.arange(length + size)[None]
    context = drafter.project_context(features[None])
    own = drafter(context, block[None], positions[:, :length], positions[:, length:], masks)
    torch.testing.assert_close(
        read_and_draft(folder, features, block, head), logits(own[0], head, config), atol=1e-3, rtol=1e-4
    )


def test_another_geometry_does_not_go_on(root: Path, tmp_path: Path) -> None:
    run_here(config_of(root, tmp_path / "run", steps=2, num_layers=2))
    for changes in ({"shift_labels": True}, {"layer_types": ("2xsliding",), "sliding_window": WINDOW}):
        with pytest.raises(CheckpointMismatch, match="was trained with"):
            run_here(config_of(root, tmp_path / "run", steps=2, **{"num_layers": 2, **changes}))
    newest, _ = newest_complete(tmp_path / "run")
    assert newest is not None


def test_another_target_than_the_stores_is_refused(root: Path, tmp_path: Path) -> None:
    launch_train.check(config_of(root, tmp_path / "run", target=str(root / "target")))
    other = save_target(tmp_path / "other", kind="llama")
    with pytest.raises(StoreMismatch, match=r"was made from a target with weights_sha256 = .*leave --target out"):
        launch_train.check(config_of(root, tmp_path / "run", target=str(other)))
