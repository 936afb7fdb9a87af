"""After any accept lengths a target continues exactly as if it had read the kept tokens for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from shared.errors import TargetUnsupported
from shared.target import Target, wrap
from stage2_train.target_decoder import HybridTargetDecoder, TargetDecoder, decoder_class, open_decoder

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
MIXED = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, tuple[Any, str]] = {
    "llama": (LlamaConfig(**COMMON), "sdpa"),
    "llama-eager": (LlamaConfig(**COMMON), "eager"),
    "qwen3": (Qwen3Config(**COMMON), "sdpa"),
    "qwen3-sliding": (Qwen3Config(**COMMON, use_sliding_window=True, sliding_window=7, layer_types=MIXED), "sdpa"),
    "mistral-sliding": (MistralConfig(**COMMON, sliding_window=7), "sdpa"),
    "gemma3": (Gemma3TextConfig(**COMMON, sliding_window=7, layer_types=MIXED), "sdpa"),
    "gpt-oss": (
        GptOssConfig(**COMMON, sliding_window=7, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2),
        "eager",
    ),
    "qwen3.5": (
        Qwen3_5TextConfig(
            **COMMON,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_conv_kernel_dim=4,
        ),
        "sdpa",
    ),
}
LAYER_IDS = (0, 2)
TOLERANCE = 1e-4


def tiny_target(name: str) -> Target:
    config, attention = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return wrap(model, None, name)


def fresh(target: Target, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and features [S, F * H] by one forward without any cache or hook."""
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_and_features_after_random_accept_lengths_equal_a_fresh_forward(name: str, seed: int) -> None:
    target = tiny_target(name)
    rows = 1 if decoder_class(target).max_rows == 1 else 3
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    block = 5
    kept = [[draw(3, VOCAB - 1) for _ in range(draw(1, 12))] for _ in range(rows)]
    decoder = open_decoder(target, LAYER_IDS, rows=rows, capacity=128)
    out = decoder.prefill(kept)
    for row in range(rows):
        logits, features = fresh(target, kept[row])
        assert out.features is not None
        torch.testing.assert_close(out.logits[row, 0], logits[-1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(out.features[row, : len(kept[row])], features, atol=TOLERANCE, rtol=0)
    for _ in range(14):
        ids = torch.randint(3, VOCAB, (rows, block), generator=generator)
        out = decoder.verify(ids)
        counts = [draw(0, block) for _ in range(rows)]
        assert out.features is not None
        for row in range(rows):
            logits, features = fresh(target, kept[row] + ids[row].tolist())
            torch.testing.assert_close(out.logits[row], logits[-block:], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(out.features[row], features[-block:], atol=TOLERANCE, rtol=0)
            kept[row] += ids[row, : counts[row]].tolist()
        decoder.commit(counts)
        assert decoder.lengths == [len(text) for text in kept]


def test_hybrid_moves_its_saved_state_ahead_when_nothing_is_ever_fully_accepted() -> None:
    target = tiny_target("qwen3.5")
    decoder = open_decoder(target, (), rows=1, capacity=200)
    assert isinstance(decoder, HybridTargetDecoder)
    kept = [5, 6, 7]
    decoder.prefill([kept])
    generator = torch.Generator().manual_seed(3)
    for _ in range(25):
        ids = torch.randint(3, VOCAB, (1, 4), generator=generator)
        out = decoder.verify(ids)
        logits, _ = fresh(target, kept + ids[0].tolist())
        torch.testing.assert_close(out.logits[0], logits[-4:], atol=TOLERANCE, rtol=0)
        kept += ids[0, :3].tolist()
        decoder.commit([3])
        assert len(decoder._pending) <= 32 + 3
    assert len(kept) == 78


def test_hybrid_rollback_is_needed() -> None:
    """Without the saved state the logits differ: the test above would notice a rollback that does nothing."""
    target = tiny_target("qwen3.5")
    decoder = open_decoder(target, (), rows=1, capacity=64)
    decoder.prefill([[5, 6, 7, 8]])
    decoder.verify(torch.tensor([[9, 10, 11, 12]]))
    TargetDecoder.commit(decoder, [1])  # lengths move, recurrent states stay spoiled
    out = decoder.verify(torch.tensor([[13, 14]]))
    logits, _ = fresh(target, [5, 6, 7, 8, 9, 13, 14])
    assert (out.logits[0] - logits[-2:]).abs().max() > 100 * TOLERANCE


def test_no_hooks_and_no_features_without_layer_ids() -> None:
    target = tiny_target("qwen3")
    decoder = open_decoder(target, (), rows=1, capacity=16)
    assert decoder.prefill([[3, 4]]).features is None
    assert not any(module._forward_hooks for module in target.model.modules())


def test_more_positions_than_reserved_are_refused() -> None:
    decoder = open_decoder(tiny_target("qwen3"), (), rows=1, capacity=4)
    with pytest.raises(ValueError, match="exceed the capacity"):
        decoder.prefill([[3, 4, 5, 6, 7]])


def test_unknown_caches_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")  # shared with the tests that run after this one
    monkeypatch.setattr(target.text_config, "layer_types", ["full_attention", "chunked_attention"] * 2)
    with pytest.raises(TargetUnsupported, match=r"'qwen3'.*chunked_attention") as caught:
        open_decoder(target, (), rows=1, capacity=8)
    assert caught.value.exit_code == 26


def test_several_rows_on_a_hybrid_are_our_bug() -> None:
    with pytest.raises(ValueError, match="one row at a time"):
        open_decoder(tiny_target("qwen3.5"), (), rows=2, capacity=8)
