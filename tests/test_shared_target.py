"""The target is the one on disk, whole, read the way the model reads itself; anything else is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import make_model, make_tokenizer, save_target

from shared.errors import DflashError, TargetNotFound, TargetUnsupported
from shared.target import Target, capture, load_target, wrap
from shared.target_identity import find_target, load_tokenizer, target_identity, tokenizer_identity

KINDS = ["llama", "qwen3", "qwen3_5", "gpt_oss", "gemma3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {kind: save_target(root / kind, kind) for kind in KINDS}


def load(folder: Path) -> Target:
    return load_target(str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_families_load_frozen_and_their_logits_are_ours(folders: dict[str, Path], kind: str) -> None:
    target = load(folders[kind])
    assert (target.num_hidden_layers, target.hidden_size, target.tied) == (4, 64, True)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        own = target.model(ids).logits
        ours = target.logits(target.decoder(ids, use_cache=False).last_hidden_state)
    torch.testing.assert_close(ours, own)


def test_a_hybrid_target_on_a_cpu_takes_no_kernels_that_need_a_gpu(folders: dict[str, Path], tmp_path: Path) -> None:
    kernels = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    functions = "".join(f"def {name}(*_, **__): raise SystemExit('a GPU kernel ran')\n" for name in kernels)
    for package in ("fla/ops/gated_delta_rule", "fla/ops", "fla"):
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").write_text(functions)
    code = (
        "import sys, torch\nfrom shared.target import load_target\n"
        f"load_target({str(folders['qwen3_5'])!r}, device='cpu', dtype='float32')\n"
        "import fla; print('fla stays importable', fla.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fla stays importable" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_captured_layers_are_hidden_states_one_further(folders: dict[str, Path], kind: str) -> None:
    target = load(folders[kind])
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode(), capture(target, [0, 1, 2]) as captured:
        states = target.decoder(ids, use_cache=False, output_hidden_states=True).hidden_states
    for tap in range(3):
        assert torch.equal(captured.features()[:, :, tap], states[tap + 1])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_the_last_layer_is_captured_before_the_final_norm(folders: dict[str, Path], kind: str) -> None:
    target = load(folders[kind])
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode(), capture(target, [3]) as captured:
        out = target.decoder(ids, use_cache=False)
    raw = captured.features()[:, :, 0]
    assert not torch.allclose(raw, out.last_hidden_state)
    torch.testing.assert_close(target.final_norm(raw), out.last_hidden_state)


def test_layer_j_adding_a_power_of_two_reveals_which_layers_were_taken() -> None:
    model = make_model("qwen3", layers=6)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
    for j, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda _m, _a, out, j=j: out + 2.0**j)
    target = wrap(model, make_tokenizer(), "powers")
    with torch.inference_mode(), capture(target, [1, 4]) as captured:
        target.decoder(torch.tensor([[5, 6, 7]]), use_cache=False)
    # After layers 0..1: 1 + 2; after layers 0..4: 1 + 2 + 4 + 8 + 16.
    assert captured.features()[0, :, :, 0].tolist() == [[3.0, 31.0]] * 3


def test_hooks_leave_nothing_behind_and_change_no_logit(folders: dict[str, Path]) -> None:
    target = load(folders["qwen3"])
    ids = torch.arange(3, 13)[None]
    with torch.inference_mode():
        before = target.model(ids).logits
        with capture(target, [0, 2]):
            during = target.model(ids).logits
    assert torch.equal(before, during)
    assert not any(layer._forward_hooks for layer in target.layers)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_the_files_own(tmp_path: Path, tied: bool, sharded: bool) -> None:
    model = make_model("llama", tied=tied)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    make_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if sharded else True
    target = load(tmp_path)
    assert target.tied is tied
    assert torch.equal(target.lm_head_weight, model.lm_head.weight)
    assert torch.equal(target.embed_tokens_weight, model.model.embed_tokens.weight)
    assert torch.equal(target.norm_weight, model.model.norm.weight)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
def test_weights_that_would_be_made_up_are_refused(tmp_path: Path, name: str) -> None:
    folder = save_target(tmp_path / "t", "llama", tied=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetUnsupported, match=name) as caught:
        load(folder)
    assert caught.value.exit_code == 26


def test_nan_in_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][300, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetUnsupported, match=r"embed_tokens.weight holds NaN"):
        load(folder)


def test_a_hidden_scale_is_found_out() -> None:
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda _m, _a, out: out * 3.0)
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2.0, *args[1:]))
    with pytest.raises(TargetUnsupported, match="enters its first layer"):
        wrap(model, make_tokenizer(), "scaled")


def test_a_model_that_is_no_decoder_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with pytest.raises(TargetUnsupported, match="no layers and no norm"):
        wrap(model, make_tokenizer(), "gpt2")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: path / "nowhere", TargetNotFound, "neither a folder"),
        (lambda path: path, TargetNotFound, "neither config.json nor a .gguf file"),
        (
            lambda path: [(path / n).write_bytes(b"") for n in ("a.gguf", "b.gguf")] and path,
            TargetNotFound,
            "2 .gguf files",
        ),
        (
            lambda path: (path / "config.json").write_text('{"model_type": "not-a-model"}') and path,
            TargetUnsupported,
            "not-a-model",
        ),
        (lambda path: (path / "config.json").write_text("{broken") and path, TargetNotFound, "config"),
    ],
)
def test_folders_without_a_usable_model(tmp_path: Path, make: object, error: type[DflashError], words: str) -> None:
    folder = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(error, match=words) as caught:
        target_identity(str(folder))
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetNotFound, match="no-such-org/no-such-model") as caught:
        find_target("no-such-org/no-such-model")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 20


def test_a_target_without_tokenizer_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(TargetNotFound, match="tokenizer"):
        load_tokenizer(str(tmp_path))


def test_identity_names_weights_tokenizer_template_and_config(folders: dict[str, Path], tmp_path: Path) -> None:
    first = target_identity(str(folders["qwen3"]))
    copy = shutil.copytree(folders["qwen3"], tmp_path / "renamed")
    second = target_identity(str(copy))
    assert first | {"name": ""} == second | {"name": ""}
    assert (first["num_hidden_layers"], first["hidden_size"], first["vocab_size"]) == (4, 64, 320)

    other = save_target(tmp_path / "other", "qwen3", seed=1)
    assert {key for key, value in target_identity(str(other)).items() if value != first[key]} == {
        "name",
        "weights_sha256",
    }

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5, "transformers_version": "0.0"}))
    assert {key for key, value in target_identity(str(copy)).items() if value != first[key]} == {
        "name",
        "config_sha256",
    }


def test_one_character_of_the_template_is_another_template_and_the_same_tokenizer() -> None:
    tokenizer = make_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer.chat_template += " "
    after = tokenizer_identity(tokenizer)
    assert before["tokenizer_sha256"] == after["tokenizer_sha256"]
    assert before["chat_template_sha256"] != after["chat_template_sha256"]


def test_the_tokenizers_hash_is_of_its_behaviour(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = make_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert tokenizer_identity(load_tokenizer(str(tmp_path))) == before
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert tokenizer_identity(tokenizer)["tokenizer_sha256"] != before["tokenizer_sha256"]


def test_geometry_of_a_multimodal_config_is_its_texts(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3TextConfig

    from shared.target_identity import geometry_of

    text = Gemma3TextConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    found = geometry_of(Gemma3Config(text_config=text))
    assert (found["vocab_size"], found["hidden_size"], found["num_hidden_layers"]) == (99, 64, 5)
    assert found["input_embedding_scale"] == 8.0


def test_a_gguf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert find_target(str(tmp_path)).gguf == "m.gguf"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # an installation with nothing in it
    for asked in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(TargetUnsupported, match=r"package gguf is not installed; pip install 'dflash-offline\[gg"):
            find_target(str(asked))
