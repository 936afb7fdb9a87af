"""An exported folder read by code that knows only safetensors and config.json, as a serving engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from independent_reader import read_and_draft
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import MASK, save_run
from tiny_target import save_target
from torch import Tensor
from transformers import AutoConfig, Qwen3Config

from manifests.commit import Ledger, read
from manifests.records import EvaluationRecord
from shared.errors import CheckpointMismatch, ConfigRefused, ExportMismatch
from stage2_train import export as export_module
from stage2_train.attention import Layout, build_masks
from stage2_train.checkpoint import load_drafter
from stage2_train.config_eval import ExportConfig
from stage2_train.drafter import logits
from stage2_train.export import export, require_same_drafter

SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
HIDDEN, INNER, HEADS, KV, DIM, TAPS = 64, 96, 4, 2, 16, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


def make(tmp_path: Path, target: Path, **changes: Any) -> tuple[Path, Path]:
    """(run, exported folder); weights large enough that every part of the network matters."""
    run = save_run(tmp_path / "run", target, seed=5, scale=6.0, **changes)
    return run, export(ExportConfig(run=run, out=tmp_path / "drafter"))


@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {**SLIDING, "is_causal": False}, {"block_size": 7, "rope_theta": 77.0}]
)
def test_an_independent_reader_gives_the_same_logits(tmp_path: Path, target: Path, changes: dict[str, Any]) -> None:
    run, folder = make(tmp_path, target, **changes)
    drafter, config, _ = load_drafter(run)
    drafter = drafter.to(torch.bfloat16).float()  # float32 arithmetic on the exported weights
    generator = torch.Generator().manual_seed(0)
    length, size = 11, config.block_size
    features = torch.randn(length, TAPS * HIDDEN, generator=generator)
    block = torch.randn(size, HIDDEN, generator=generator)
    head = torch.randn(50, HIDDEN, generator=generator) * 0.2
    end = torch.tensor([[length]], dtype=torch.int32)
    masks = build_masks(Layout(torch.zeros_like(end), end, length, size), drafter.kinds, "sdpa", torch.float32)
    positions = torch.arange(length + size)[None]
    with torch.no_grad():
        context = drafter.project_context(features[None])
        own = drafter(context, block[None], positions[:, :length], positions[:, length:], masks)
        own = logits(own[0], head, config)
    read_back = read_and_draft(folder, features, block, head)
    assert own.std() > 0.3
    torch.testing.assert_close(read_back, own, atol=1e-4, rtol=0)


# --- what is in the folder ------------------------------------------------------------------------------------------


def test_names_shapes_and_dtype_are_the_published_ones(tmp_path: Path, target: Path) -> None:
    _, folder = make(tmp_path, target)
    expected = {"fc.weight": [HIDDEN, TAPS * HIDDEN], "hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    for n in range(2):
        expected |= {
            f"layers.{n}.input_layernorm.weight": [HIDDEN],
            f"layers.{n}.post_attention_layernorm.weight": [HIDDEN],
            f"layers.{n}.self_attn.q_proj.weight": [HEADS * DIM, HIDDEN],
            f"layers.{n}.self_attn.k_proj.weight": [KV * DIM, HIDDEN],
            f"layers.{n}.self_attn.v_proj.weight": [KV * DIM, HIDDEN],
            f"layers.{n}.self_attn.o_proj.weight": [HIDDEN, HEADS * DIM],
            f"layers.{n}.self_attn.q_norm.weight": [DIM],
            f"layers.{n}.self_attn.k_norm.weight": [DIM],
            f"layers.{n}.mlp.gate_proj.weight": [INNER, HIDDEN],
            f"layers.{n}.mlp.up_proj.weight": [INNER, HIDDEN],
            f"layers.{n}.mlp.down_proj.weight": [HIDDEN, INNER],
        }
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "dflash_offline.json", "model.safetensors",
    ]  # fmt: skip


def test_another_user_may_read_the_weights_when_he_may_read_the_config(tmp_path: Path, target: Path) -> None:
    _, folder = make(tmp_path, target)
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_tensors_are_the_checkpoints_rounded_once(tmp_path: Path, target: Path) -> None:
    run, folder = make(tmp_path, target)
    stored, own = load_file(folder / "model.safetensors"), load_drafter(run)[0].state_dict()
    for name, tensor in own.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name


def test_config_has_every_field_that_engines_read(tmp_path: Path, target: Path) -> None:
    _, folder = make(tmp_path, target)
    config = json.loads((folder / "config.json").read_text())
    own = json.loads((target / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
        "hidden_act": "silu", "vocab_size": own["vocab_size"], "rope_scaling": None, "attention_bias": False,
        "attention_dropout": 0.0, "layer_types": ["full_attention"] * 2, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 2, "tie_word_embeddings": True, "dtype": "bfloat16",
        "num_target_layers": own["num_hidden_layers"], "block_size": 4, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rms_norm_eps": own["rms_norm_eps"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1], "block_size": 4},
    }  # fmt: skip
    assert {name: config.get(name, "absent") for name in expected} == expected
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == own["rope_parameters"]["rope_theta"]
    # Neutral switches would only confuse older readers.
    for absent in ("is_causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        assert absent not in config


def test_transformers_reads_window_layers_and_rope_as_written(tmp_path: Path, target: Path) -> None:
    _, folder = make(tmp_path, target, rope_theta=5e6, is_causal=False, **SLIDING)
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, Qwen3Config)
    assert config.sliding_window == 6
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.rope_parameters["rope_theta"] == 5e6
    assert config.block_size == config.dflash_config["block_size"] == 4
    assert config.is_causal is config.dflash_config["causal"] is False


def test_scales_of_the_target_are_written_when_it_has_them(tmp_path: Path, target: Path) -> None:
    scales = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    _, folder = make(tmp_path, target, **scales)
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in scales} == scales


def test_card_and_origin_name_target_recipe_and_results(tmp_path: Path, target: Path) -> None:
    run = save_run(tmp_path / "run", target)
    Ledger(run, "eval-1").append(EvaluationRecord(
        run_id="1", name="gsm8k", global_step=7, prompts=20, acceptance_length=3.25, acceptance_length_low=3.0,
        acceptance_length_high=3.5, tokens_per_second=9.0, plain_tokens_per_second=3.0, mismatches=0, ties=2, path="e",
    ))  # fmt: skip
    folder = export(ExportConfig(run=run, out=tmp_path / "drafter"))
    card = (folder / "README.md").read_text()
    origin = json.loads((folder / "dflash_offline.json").read_text())
    target_identity = origin["store"]["identity"]["target"]
    assert "| gsm8k | 20 | 3.250 | 3.00 - 3.50 | 0 | 2 |" in card
    assert "| learning_rate | 0.0006 |" in card
    assert "| step | 7 of 9 |" in card
    assert target_identity["weights_sha256"] in card
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-num-draft-tokens 4" in card
    assert origin["global_step"] == 7
    assert [(r["command"], r["state"]) for r in read(run, "runs")] == [("export", "started"), ("export", "finished")]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["missing", "renamed", "extra", "changed", "shape", "config"])
def test_a_folder_that_reads_back_differently_is_refused(tmp_path: Path, target: Path, fault: str) -> None:
    run, folder = make(tmp_path, target)
    drafter = load_drafter(run)[0].to(torch.bfloat16)
    require_same_drafter(folder, drafter)
    path, name = folder / "model.safetensors", "layers.1.self_attn.k_norm.weight"
    tensors = load_file(path)
    if fault == "missing":
        del tensors[name]
    elif fault == "renamed":
        tensors["model." + name] = tensors.pop(name)
    elif fault == "extra":
        tensors["embed_tokens.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    elif fault == "changed":
        tensors[name][0] += 1
    elif fault == "shape":
        tensors[name] = tensors[name][:-2].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    if fault == "config":
        config = json.loads((folder / "config.json").read_text())
        config["dflash_config"]["mask_token_id"] = 3
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportMismatch, match="nothing was published") as caught:
        require_same_drafter(folder, drafter)
    assert caught.value.exit_code == 61


def test_a_failed_export_leaves_nothing_and_keeps_the_old_one(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = make(tmp_path, target)
    before = (folder / "model.safetensors").read_bytes()
    save_run(run, target, seed=6, step=8)

    def damaged(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        save_file({name: tensors[name] for name in sorted(tensors)[1:]}, path, metadata=metadata)

    monkeypatch.setattr(export_module, "write_tensors", damaged)
    for out in (tmp_path / "new", folder):
        with pytest.raises(ExportMismatch, match="does not load again"):
            export(ExportConfig(run=run, out=out, overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"]
    assert (folder / "model.safetensors").read_bytes() == before
    assert read(run, "runs")[-1]["exit_code"] == 61


def test_an_existing_folder_is_kept_unless_it_is_the_same_or_overwritten(tmp_path: Path, target: Path) -> None:
    run, folder = make(tmp_path, target)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert export(ExportConfig(run=run, out=folder)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    save_run(run, target, seed=6, step=8)
    with pytest.raises(ConfigRefused, match=r"holds step 7 of .*this command exports step 8 .*--overwrite") as caught:
        export(ExportConfig(run=run, out=folder))
    assert caught.value.exit_code == 43
    export(ExportConfig(run=run, out=folder, overwrite=True))
    assert json.loads((folder / "dflash_offline.json").read_text())["global_step"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"]


def test_foreign_files_are_never_overwritten(tmp_path: Path, target: Path) -> None:
    run = save_run(tmp_path / "run", target)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("do not lose")
    with pytest.raises(ConfigRefused, match="not an export of ours"):
        export(ExportConfig(run=run, out=mine, overwrite=True))
    assert (mine / "thesis.txt").read_text() == "do not lose"


def test_an_exported_folder_is_no_source(tmp_path: Path, target: Path) -> None:
    _, folder = make(tmp_path, target)
    with pytest.raises(CheckpointMismatch, match="is not a checkpoint of `dflash train`"):
        export(ExportConfig(run=folder, out=tmp_path / "again"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_stored_and_declared(tmp_path: Path, target: Path, dtype: str) -> None:
    run = save_run(tmp_path / "run", target)
    folder = export(ExportConfig(run=run, out=tmp_path / "drafter", dtype=dtype))  # type: ignore[arg-type]
    assert {str(t.dtype) for t in load_file(folder / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
