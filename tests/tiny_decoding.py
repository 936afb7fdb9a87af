"""A tiny target, a drafter fitted to it by heart, and decoding written the slow obvious way, for tests of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3_5TextConfig, Qwen3Config

from shared.target import Target, wrap
from stage2_train.acceptance import Cycle
from stage2_train.attention import Layout, build_masks
from stage2_train.decode import DecodeSettings
from stage2_train.drafter import Drafter, embed_blocks, logits
from stage2_train.drafter_config import DrafterConfig

VOCAB, BLOCK, MASK = 61, 5, 60
LAYER_IDS = (0, 2)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
PROMPTS = [[5, 9, 14, 23], [7], [11, 12, 13, 14, 15, 16, 17, 18]]


def settings(**changes: object) -> DecodeSettings:
    values = {"block_size": BLOCK, "max_new_tokens": 24, "eos_token_ids": frozenset({2}), **changes}
    return DecodeSettings(**values)  # type: ignore[arg-type]


@lru_cache
def tiny_target(kind: str = "qwen3") -> Target:
    mixed = ["sliding_attention", "full_attention"] * 2
    config, attention = {
        "qwen3": (Qwen3Config(**SIZES), "sdpa"),
        "gpt-oss": (
            GptOssConfig(**SIZES, sliding_window=9, layer_types=mixed, num_local_experts=4, num_experts_per_tok=2),
            "eager",
        ),
        "qwen3.5": (
            Qwen3_5TextConfig(
                **SIZES,
                layer_types=["linear_attention"] * 3 + ["full_attention"],
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_conv_kernel_dim=4,
            ),
            "sdpa",
        ),
    }[kind]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return wrap(model, None, kind)


def drafter_config(**changes: object) -> DrafterConfig:
    values: dict[str, object] = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": LAYER_IDS,
        "num_target_layers": 4,
        **changes,
    }
    return DrafterConfig(**values)  # type: ignore[arg-type]


def fresh(target: Target, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and features [S, F * H], no cache."""
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)


def slow_greedy(target: Target, prompt: Sequence[int], new: int, eos: frozenset[int] = frozenset({2})) -> list[int]:
    """One fresh forward per token."""
    tokens: list[int] = []
    while len(tokens) < new and not (tokens and tokens[-1] in eos):
        tokens.append(int(fresh(target, [*prompt, *tokens])[0][-1].argmax()))
    return tokens


def slow_drafts(target: Target, drafter: Drafter, committed: Sequence[int], anchor: int) -> list[int]:
    """The drafts by the training-time forward on freshly computed features of everything before the anchor."""
    start, size = len(committed), drafter.config.block_size
    _, features = fresh(target, committed)
    layout = Layout(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[start]], dtype=torch.int32), start, size)
    masks = build_masks(layout, drafter.kinds, "sdpa", torch.float32)
    block = torch.tensor([[anchor] + [MASK] * (size - 1)])
    with torch.no_grad():
        hidden = drafter(
            drafter.project_context(features[None]),
            embed_blocks(block, target.embed_tokens_weight, drafter.config),
            torch.arange(start)[None],
            start + torch.arange(size)[None],
            masks,
        )
        first = 0 if drafter.config.shift_labels else 1
        return logits(hidden[0, first:], target.lm_head_weight, drafter.config).argmax(-1).tolist()


def slow_speculative(
    target: Target, drafter: Drafter, prompt: Sequence[int], new: int
) -> tuple[list[int], list[Cycle]]:
    """The method's text, read aloud: no caches, no batch."""
    tokens, cycles = slow_greedy(target, prompt, 1), []
    while len(tokens) < new and tokens[-1] != 2:
        drafts = slow_drafts(target, drafter, [*prompt, *tokens[:-1]], tokens[-1])
        truth = fresh(target, [*prompt, *tokens, *drafts])[0][len(prompt) + len(tokens) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == truth[accepted]:
            accepted += 1
        gained = [*drafts[:accepted], truth[accepted]][: new - len(tokens)]
        if 2 in gained:
            gained = gained[: gained.index(2) + 1]
        tokens += gained
        cycles.append(Cycle(accepted, len(gained)))
    return tokens, cycles


def fit(target: Target, drafter: Drafter, document: Sequence[int], first: int, steps: int) -> Drafter:
    """Train on every anchor of one document with plain cross-entropy, the labels being the document itself."""
    _, features = fresh(target, document)
    size, length, shift = drafter.config.block_size, len(document), int(drafter.config.shift_labels)
    anchors = torch.arange(first, length - size + 1 - shift)
    layout = Layout(torch.zeros_like(anchors)[None].int(), anchors[None].int(), length, size)
    masks = build_masks(layout, drafter.kinds, "sdpa", torch.float32)
    positions = (anchors[:, None] + torch.arange(size)).flatten()
    ids = torch.tensor(list(document))
    block_ids = torch.full((len(anchors), size), MASK)
    block_ids[:, 0] = ids[anchors]
    embeds = embed_blocks(block_ids.flatten()[None], target.embed_tokens_weight, drafter.config).clone()
    labels = ids[positions + shift].view(-1, size)[:, 1 - shift :]
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden = drafter(
            drafter.project_context(features[None].clone()), embeds, torch.arange(length)[None], positions[None], masks
        )
        hidden = hidden[0].view(-1, size, hidden.shape[-1])[:, 1 - shift :]
        raw = logits(hidden, target.lm_head_weight.clone(), drafter.config)
        loss = torch.nn.functional.cross_entropy(raw.flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.05
    return drafter.eval()


@lru_cache
def fitted(kind: str, sliding: bool = False, shift: bool = False) -> tuple[Drafter, tuple[int, ...]]:
    """A drafter that knows the target's continuation of PROMPTS[0] by heart, and that continuation."""
    target = tiny_target(kind)
    text = slow_greedy(target, PROMPTS[0], 40, eos=frozenset())
    changes = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6} if sliding else {}
    drafter = Drafter(drafter_config(**changes, shift_labels=shift)).initialise(0)
    return fit(target, drafter, [*PROMPTS[0], *text], len(PROMPTS[0]), 120), tuple(text)
