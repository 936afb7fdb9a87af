"""Sampled speculative decoding has the target's own distribution: rejection sampling against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_decoding import PROMPTS, VOCAB, fitted, fresh, settings, tiny_target
from torch import Tensor

from stage2_train.decode import judge, speculative_decode


def chi_square_p_below(counts: Tensor, expected: Tensor) -> float:
    """Chi-square statistic over its degrees of freedom's 99.99 % point (normal approximation by Wilson-Hilferty)."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / limit


def test_rejection_sampling_keeps_the_targets_joint_distribution() -> None:
    """Two-token texts over five words: 25 outcomes against the exact product, with a drafter far from the target."""
    vocabulary, rows, temperature = 5, 200_000, 0.7
    generator = torch.Generator().manual_seed(11)
    raw = torch.randn(3, vocabulary, generator=generator)
    # What the target says second depends on the first word: one row of logits per first word.
    second = torch.randn(vocabulary, vocabulary, generator=generator)
    q = torch.softmax(torch.randn(2, vocabulary, generator=generator) * 1.5, -1)
    q[0, 3] = 0.0
    q = q / q.sum(-1, keepdim=True)
    drafts = torch.stack([torch.multinomial(q[i], rows, replacement=True, generator=generator) for i in range(2)], 1)
    judged = torch.stack((raw[0].expand(rows, -1), second[drafts[:, 0]], raw[2].expand(rows, -1)), 1)
    accepted, bonus = judge(judged, drafts, q.expand(rows, -1, -1), temperature, generator)
    first = torch.where(accepted[:, 0] > 0, drafts[:, 0], bonus[:, 0])
    # A text whose first draft was refused gets its second word in the next cycle, from the target itself.
    next_cycle = torch.multinomial(torch.softmax(second[first] / temperature, -1), 1, generator=generator)[:, 0]
    after_one = torch.where(accepted[:, 0] > 1, drafts[:, 1], bonus[:, 0])
    then = torch.where(accepted[:, 0] > 0, after_one, next_cycle)
    counts = torch.bincount(first * vocabulary + then, minlength=vocabulary**2).double()
    p_first = torch.softmax(raw[0] / temperature, -1).double()
    p_second = torch.softmax(second / temperature, -1).double()
    expected = (p_first[:, None] * p_second).flatten() * rows
    assert chi_square_p_below(counts, expected) < 1
    # P(first draft accepted) = sum min(p, q), which greedy matching or independent sampling would not give.
    rate = float((accepted > 0).double().mean())
    assert rate == pytest.approx(float(torch.minimum(p_first, q[0].double()).sum()), abs=0.005)
    # The test can fail: the draft's own distribution is far from the target's.
    assert chi_square_p_below(torch.bincount(drafts[:, 0], minlength=vocabulary).double(), p_first * rows) > 10


def test_bonus_after_a_full_block_comes_from_the_target() -> None:
    rows, vocabulary = 50_000, 4
    generator = torch.Generator().manual_seed(5)
    raw = torch.randn(2, vocabulary, generator=generator)
    q = torch.softmax(raw[:1], -1)
    drafts = torch.multinomial(q[0], rows, replacement=True, generator=generator)[:, None]
    accepted, bonus = judge(raw.expand(rows, -1, -1), drafts, q.expand(rows, -1, -1), 1.0, generator)
    assert float((accepted == 1).double().mean()) > 0.999, "p = q: every draft passes"
    expected = torch.softmax(raw[1], -1).double() * rows
    assert chi_square_p_below(torch.bincount(bonus[:, 0], minlength=vocabulary).double(), expected) < 1


def test_sampled_decoding_follows_the_target_and_its_seed() -> None:
    target = tiny_target()
    drafter, _ = fitted("qwen3")
    rows = 400
    batches = [
        speculative_decode(
            target,
            drafter,
            [PROMPTS[0]] * rows,
            settings(max_new_tokens=3, temperature=0.8, seed=seed, eos_token_ids=frozenset()),
        )
        for seed in (1, 1, 2)
    ]
    texts = [[tuple(text.tokens) for text in batch.texts] for batch in batches]
    assert texts[0] == texts[1] != texts[2]
    # Second words: counts over all first words against the target's own two-step distribution.
    p_first = torch.softmax(fresh(target, PROMPTS[0])[0][-1].double() / 0.8, -1)
    p_second = torch.stack(
        [torch.softmax(fresh(target, [*PROMPTS[0], word])[0][-1].double() / 0.8, -1) for word in range(VOCAB)]
    )
    exact = p_first @ p_second
    counts = torch.bincount(torch.tensor([text[1] for text in texts[0] + texts[2]]), minlength=VOCAB).double()
    order = exact.argsort(descending=True)
    grouped = torch.stack([*counts[order[:6]], counts[order[6:]].sum()])
    expected = torch.stack([*exact[order[:6]], exact[order[6:]].sum()]) * 2 * rows
    assert chi_square_p_below(grouped, expected) < 1
