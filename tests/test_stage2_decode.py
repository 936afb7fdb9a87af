"""Greedy speculative decoding is lossless, and its cycles are those of the method read aloud."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_decoding import (
    BLOCK,
    MASK,
    PROMPTS,
    drafter_config,
    fitted,
    settings,
    slow_greedy,
    slow_speculative,
    tiny_target,
)

from shared.errors import NonFinite
from stage2_train.acceptance import Cycle, acceptance_length
from stage2_train.decode import Decoded, plain_decode, speculative_decode
from stage2_train.drafter import Drafter


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "qwen3.5"])
def test_overfitted_drafter_fills_every_block_and_the_text_is_the_targets(kind: str) -> None:
    target = tiny_target(kind)
    drafter, text = fitted(kind)
    batch = speculative_decode(
        target, drafter, PROMPTS[:1], settings(max_new_tokens=1 + 7 * BLOCK, eos_token_ids=frozenset())
    )
    assert tuple(batch.texts[0].tokens) == text[: 1 + 7 * BLOCK]
    assert batch.texts[0].cycles == [Cycle(accepted=BLOCK - 1, kept=BLOCK)] * 7
    assert acceptance_length([batch.texts[0].cycles]) == BLOCK


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_with_shifted_labels_every_slot_drafts_and_a_full_block_gains_one_more(kind: str) -> None:
    target = tiny_target(kind)
    drafter, text = fitted(kind, shift=True)
    batch = speculative_decode(
        target, drafter, PROMPTS[:1], settings(max_new_tokens=1 + 5 * (BLOCK + 1), eos_token_ids=frozenset())
    )
    assert tuple(batch.texts[0].tokens) == text[: 1 + 5 * (BLOCK + 1)]
    assert batch.texts[0].cycles == [Cycle(accepted=BLOCK, kept=BLOCK + 1)] * 5
    (smaller,) = speculative_decode(target, drafter, PROMPTS[:1], settings(block_size=2)).texts
    assert smaller.tokens == slow_greedy(target, PROMPTS[0], 24)
    assert max(cycle.accepted for cycle in smaller.cycles) == 2


@pytest.mark.parametrize(
    ("sliding", "shift"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_text_and_every_cycle_equal_the_slow_reference(sliding: bool, shift: bool) -> None:
    target = tiny_target()
    drafter, text = fitted("qwen3", sliding, shift)
    changed = [PROMPTS[0][0] + 1, *PROMPTS[0][1:]]
    left = [[*PROMPTS[0], *text[:kept], 9] for kept in (6, 14)]
    prompts = [*PROMPTS, [*PROMPTS[0], 30], [5, 9, 14, 24], PROMPTS[0][2:], changed, *left]
    batch = speculative_decode(target, drafter, prompts, settings())
    accepted = []
    for prompt, found in zip(prompts, batch.texts, strict=True):
        tokens, cycles = slow_speculative(target, drafter, prompt, 24)
        assert found.tokens == tokens == slow_greedy(target, prompt, 24)
        assert found.cycles == cycles
        accepted += [cycle.accepted for cycle in cycles]
    assert {0, BLOCK - 1 + shift} < set(accepted), "the prompts must meet refused, part-accepted and full blocks"


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_rows_do_not_change_each_other(kind: str) -> None:
    target = tiny_target(kind)
    drafter, _ = fitted(kind)
    together = speculative_decode(target, drafter, PROMPTS, settings())
    for prompt, text in zip(PROMPTS, together.texts, strict=True):
        alone = speculative_decode(target, drafter, [prompt], settings()).texts[0]
        assert alone == text


def test_a_smaller_block_than_trained_gives_the_same_text() -> None:
    target = tiny_target()
    drafter, text = fitted("qwen3")
    batch = speculative_decode(target, drafter, PROMPTS[:1], settings(block_size=3, eos_token_ids=frozenset()))
    assert tuple(batch.texts[0].tokens) == text[:24]
    assert max(cycle.accepted for cycle in batch.texts[0].cycles) <= 2


def test_plain_decoding_is_the_slow_greedy_text() -> None:
    target = tiny_target()
    batch = plain_decode(target, PROMPTS, settings())
    assert [text.tokens for text in batch.texts] == [slow_greedy(target, prompt, 24) for prompt in PROMPTS]
    assert all(not text.cycles for text in batch.texts)


def test_any_eos_ends_the_text_inside_a_block_and_the_rest_is_not_counted() -> None:
    target = tiny_target()
    drafter, text = fitted("qwen3")
    stop = text[8]  # the third token of the second block
    assert stop not in text[:8]
    batch = speculative_decode(target, drafter, PROMPTS[:1], settings(eos_token_ids=frozenset({59, stop})))
    assert tuple(batch.texts[0].tokens) == text[:9]
    assert batch.texts[0].ended_by_eos
    assert batch.texts[0].cycles == [Cycle(4, 5), Cycle(4, 3)]
    only_first = speculative_decode(target, drafter, PROMPTS[:1], settings(eos_token_ids=frozenset({text[0]})))
    assert only_first.texts[0].tokens == [text[0]]
    assert only_first.texts[0].cycles == []


def test_the_mask_token_in_the_targets_own_words_stays() -> None:
    decoded = Decoded()
    assert decoded.extend([4, MASK, 5], settings()) == 3
    assert decoded.tokens == [4, MASK, 5]


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
def test_the_token_limit_is_exact(limit: int) -> None:
    target = tiny_target()
    drafter, text = fitted("qwen3")
    batch = speculative_decode(target, drafter, PROMPTS[:1], settings(max_new_tokens=limit, eos_token_ids=frozenset()))
    assert tuple(batch.texts[0].tokens) == text[:limit]
    assert not batch.texts[0].ended_by_eos
    assert sum(cycle.kept for cycle in batch.texts[0].cycles) == limit - 1


def test_nan_weights_are_refused_and_not_decoded() -> None:
    drafter = Drafter(drafter_config()).initialise(0)
    with torch.no_grad():
        drafter.norm.weight[0] = math.nan
    with pytest.raises(NonFinite, match="the drafter's logits are not finite") as caught:
        speculative_decode(tiny_target(), drafter, PROMPTS, settings())
    assert caught.value.exit_code == 52


def test_zero_temperature_ignores_the_seed() -> None:
    target = tiny_target()
    drafter, _ = fitted("qwen3")
    first, second = (speculative_decode(target, drafter, PROMPTS, settings(seed=seed)).texts for seed in (0, 9))
    assert first == second
