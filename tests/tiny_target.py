"""Tiny random targets with a small byte-level tokenizer and a ChatML template, written as real folders.

Used by the tests of shared.target, shared.chat and stage 1. Four layers, hidden size 64, 4 query and 2 key-value heads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "Hello, how are you today? I am fine, thank you.",
    "What is the capital of France? Paris is the capital.",
    "def add(a, b):\n    return a + b\n",
    "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10.",
    "You are a helpful assistant.",
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Schreibe ein Gedicht über den Wald.",
]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier turns lose their thinking, as with Qwen3.
THINKING = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused_0|>", "<|unused_1|>"]
VOCAB_ROWS = 320


@cache
def _backend_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS, trainer)
    return str(backend.to_str())


def make_tokenizer(template: str | None = CHATML) -> Any:
    """A fast tokenizer of 300 tokens; ids 0..4 are SPECIAL, bos and eos are the ChatML marks, pad is eos."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend_json()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|unused_0|>", "<|unused_1|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(
    kind: str = "qwen3",
    *,
    layers: int = 4,
    tied: bool = True,
    vocab: int = VOCAB_ROWS,
    seed: int = 0,
    spread: float = 0.2,
) -> Any:
    """A random causal LM: llama, qwen3, qwen3_5 (hybrid), gpt_oss or gemma3; `spread` is the weights' std."""
    import transformers as t

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": spread,
    }
    if kind == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**shape))
    elif kind == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**shape))
    elif kind == "qwen3_5":
        linear = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        model = t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**shape, **linear, layer_types=None))
    elif kind == "gpt_oss":
        model = t.GptOssForCausalLM(
            t.GptOssConfig(
                **shape,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=8,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        )
    else:
        more = {"query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 20.0}
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**shape, **more))
    with torch.no_grad():
        # Norm weights start at one value: a norm forgotten or applied twice would go unnoticed.
        for name, value in model.named_parameters():
            if "norm" in name and value.dim() == 1:
                value.add_(0.1 * torch.randn_like(value))
    return model.eval()


def save_target(folder: Path, kind: str = "qwen3", *, template: str | None = CHATML, **settings: Any) -> Path:
    """A target folder as `--target` takes it."""
    make_model(kind, **settings).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder
