"""What the objectives weigh, divide by and refuse; their formulas against slow ones and against bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_objective import slow_coarse_kl, slow_dpace
from toy_run import GEOMETRY

from shared.errors import ConfigRefused
from stage2_train.chunk_loss import (
    BF16_HALF_ULP,
    TAIL_FLOOR,
    Scorer,
    Shaping,
    Targets,
    coarse_kl,
    dpace,
    teacher,
)
from stage2_train.config import TrainConfig
from stage2_train.objectives import Objective
from stage2_train.training_parts import make_engine


def test_decay_is_the_published_one() -> None:
    published = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    assert Objective(block_size=16, gamma=7.0).static_weights() == pytest.approx(published, abs=6e-4)


def test_the_decay_goes_by_the_distance_from_the_anchor() -> None:
    shifted = Objective(block_size=4, gamma=2.0, shift_labels=True, slot_0=True)
    assert shifted.distances == (1, 2, 3, 4)
    assert (shifted.first_slot, shifted.first_draft, shifted.drafts) == (0, 0, 4)
    assert shifted.static_weights() == pytest.approx([1, math.exp(-0.5), math.exp(-1), math.exp(-1.5)])
    known = Objective(block_size=4, gamma=2.0, slot_0=True)
    assert known.distances == (0, 1, 2, 3)
    assert (known.first_slot, known.first_draft, known.drafts) == (0, 1, 3)
    assert known.static_weights() == pytest.approx([1, 1, math.exp(-0.5), math.exp(-1)])
    plain = Objective(block_size=4)
    assert (plain.distances, plain.first_slot, plain.drafts) == ((1, 2, 3), 1, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gamma": 0.0}, "--gamma"),
        ({"gamma": float("nan")}, "--gamma"),
        ({"alpha": 0.0}, "--alpha"),
        ({"alpha": 1.5}, "--alpha"),
        ({"soft_weight": 0.0}, "--soft-weight"),
        ({"soft_weight": 1.0}, "--soft-weight"),
        ({"shift_labels": True}, "--slot-0"),
    ],
)
def test_values_without_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigRefused, match=said):
        Objective(block_size=4, **changes)


def test_the_denominator_counts_weights_blocks_or_slots() -> None:
    counted = np.zeros((1, 3, 4), bool)
    counted[0, 0, 1:] = True
    counted[0, 1, 1] = True
    assert Objective(block_size=4, weighting="uniform").denominator(counted) == 4
    assert Objective(block_size=4, weighting="dpace").denominator(counted) == 2
    assert Objective(block_size=4, gamma=2.0).denominator(counted) == pytest.approx(2 + math.exp(-0.5) + math.exp(-1))
    assert all(Objective(block_size=4, weighting=w).denominator(counted[:, 2:]) == 0 for w in ("dpace", "decay"))


slots = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=9)


@given(slots, st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_dpace_is_its_double_sum(block: list[tuple[float, bool]], alpha: float) -> None:
    probabilities, counted = [p for p, _ in block], [c for _, c in block]
    found = dpace(torch.tensor([probabilities], dtype=torch.float64), torch.tensor([counted]), alpha)[0]
    want = slow_dpace(probabilities, counted, alpha)
    kept = [i for i, counts in enumerate(counted) if counts]
    assert found[kept].tolist() == pytest.approx([want[i] for i in kept], rel=1e-9)
    # Weights fall along the block, and slots that do not count are as if they were not there.
    assert all(a >= b for a, b in zip(found[kept].tolist(), found[kept].tolist()[1:], strict=False))
    if kept:
        alone = dpace(
            torch.tensor([[probabilities[i] for i in kept]], dtype=torch.float64),
            torch.ones(1, len(kept), dtype=torch.bool),
            alpha,
        )
        assert found[kept].tolist() == pytest.approx(alone[0].tolist(), rel=1e-9)


def test_without_smoothing_dpace_weights_are_the_gradient_of_the_accepted_length() -> None:
    log_q = torch.log(torch.tensor([0.9, 0.5, 0.7, 0.2], dtype=torch.float64)).requires_grad_()
    log_q.cumsum(0).exp().sum().backward()  # E[accepted] = sum_m prod_{i <= m} q_i
    found = dpace(log_q.detach().exp()[None], torch.ones(1, 4, dtype=torch.bool), 0.0)
    assert log_q.grad is not None
    torch.testing.assert_close(found[0], log_q.grad)


def distributions(seed: int, words: int, sharp: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher logits and drafter log-probabilities, float64 [V]."""
    generator = torch.Generator().manual_seed(seed)
    teacher_logits, drafter = torch.randn(2, words, generator=generator, dtype=torch.float64) * sharp
    return teacher_logits, torch.log_softmax(drafter, 0)


def coarse(teacher_logits: torch.Tensor, log_q: torch.Tensor, k: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Coarse KL of the top k, the teacher's probabilities of them, their ids."""
    top, ids = teacher_logits.topk(k)
    p, tail = teacher(top[None], teacher_logits.logsumexp(0)[None, None], len(log_q))
    q_tail = (1 - log_q[ids].exp().sum()).clamp(min=TAIL_FLOOR)
    return coarse_kl(p, tail, log_q[ids][None], q_tail[None, None]).item(), p[0], ids


@given(st.integers(0, 2**16), st.integers(2, 12), st.floats(0.1, 3.0), st.data())
@settings(max_examples=80, deadline=None)
def test_the_coarse_divergence_is_a_lower_bound_and_its_gap_is_the_stated_one(
    seed: int, words: int, sharp: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, words))
    teacher_logits, log_q = distributions(seed, words, sharp)
    log_p = torch.log_softmax(teacher_logits, 0)
    full = (log_p.exp() * (log_p - log_q)).sum().item()
    found, _, ids = coarse(teacher_logits, log_q, k)
    assert -1e-9 <= found <= full + 1e-9
    assert found == pytest.approx(
        slow_coarse_kl(log_q, ids.tolist(), teacher_logits[ids], float(teacher_logits.logsumexp(0))).item(), abs=1e-9
    )
    rest = torch.ones(words, dtype=torch.bool)
    rest[ids] = False
    gap = 0.0
    if rest.any():
        p_rest, q_rest = torch.log_softmax(teacher_logits[rest], 0), torch.log_softmax(log_q[rest], 0)
        gap = log_p[rest].exp().sum().item() * (p_rest.exp() * (p_rest - q_rest)).sum().item()
    assert full - found == pytest.approx(gap, abs=1e-9)
    # More words known, more divergence seen.
    if k < words:
        assert found <= coarse(teacher_logits, log_q, k + 1)[0] + 1e-9


def test_stored_logits_rounded_up_do_not_make_more_than_one() -> None:
    logits = torch.tensor([[20.125, 18.0]])  # true logsumexp a little below what these give
    top, tail = teacher(logits, torch.tensor([[20.0]]), 100)
    assert top.sum().item() == pytest.approx(1.0)
    assert tail.item() == pytest.approx(0.0, abs=1e-7)
    whole, rest = teacher(torch.tensor([[1.0, 0.0]]), torch.tensor([[5.0]]), 2)  # K = V: nothing is left for a tail
    assert whole.sum().item() == pytest.approx(1.0)
    assert rest.item() == pytest.approx(0.0, abs=1e-7)


def float32_target(seed: int, words: int, k: int, sharp: float) -> tuple[torch.Tensor, ...]:
    """Of one token: the target's logits, its top k as they are stored, their ids, the logsumexp, the mass outside."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, words, generator=generator) * sharp + 20.0
    top, ids = logits.topk(k)
    tail = 1.0 - torch.log_softmax(logits.double(), 1).exp().gather(1, ids).sum()
    return logits, top.bfloat16().float(), ids, logits.logsumexp(1, keepdim=True), tail


@given(st.integers(0, 2**16), st.integers(3, 300), st.floats(0.1, 8.0), st.data())
@settings(max_examples=80, deadline=None)
def test_the_mass_outside_rounded_logits_is_one_that_the_rounding_allows(
    seed: int, words: int, sharp: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, words - 1))
    _, stored, _, logsumexp, true = float32_target(seed, words, k, sharp)
    top, tail = teacher(stored, logsumexp, words, rounded=True)
    assert (top.sum() + tail).item() == pytest.approx(1.0, abs=1e-5)
    assert (top >= 0).all()
    total = torch.exp(stored.double() - logsumexp.double()).sum().item()
    slack = math.exp(BF16_HALF_ULP * stored.abs().max().item())
    for mass in (1.0 - true.item(), 1.0 - tail.item()):
        assert total / slack - 1e-5 <= mass <= total * slack + 1e-5


def test_a_float32_target_is_nearer_to_itself() -> None:
    """Certain of its word, as on its own answers: a logit of 40 is up to 0.15 off, which a sum then takes for mass."""
    given = [float32_target(seed, 5000, 64, 6.0) for seed in range(40)]

    def errors(rounded: bool) -> tuple[float, float]:
        """Of the mass outside, and of the target as a drafter of itself."""
        wrong, divergence = 0.0, 0.0
        for logits, stored, ids, logsumexp, true in given:
            top, tail = teacher(stored, logsumexp, 5000, rounded)
            log_q = torch.log_softmax(logits, 1).gather(1, ids)
            q_tail = (1.0 - log_q.exp().sum(1, keepdim=True)).clamp(min=TAIL_FLOOR)
            wrong += abs(tail.item() - true.item())
            divergence += coarse_kl(top, tail, log_q, q_tail).item()
        return wrong, divergence

    (mass, divergence), (naive_mass, naive_divergence) = errors(rounded=True), errors(rounded=False)
    assert mass < naive_mass / 5
    assert 0.0 <= divergence < naive_divergence / 5


def test_the_store_says_whether_its_logits_were_rounded() -> None:
    size = (GEOMETRY.vocab_size, GEOMETRY.hidden_size)
    tables = {name: torch.zeros(size) for name in ("embed_tokens", "lm_head")}
    config = TrainConfig(store="none", loss="kl", weighting="decay", labels="data")
    for dtype, rounded in (("float32", True), ("float16", True), ("bfloat16", False)):
        engine = make_engine(config, GEOMETRY, tables, torch.device("cpu"), dtype)
        assert engine.objective.rounded_logits is rounded


def scored(objective: Objective, raw: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, ...]:
    """Loss and gradient by raw logits of one slot in one block."""
    scorer = Scorer(objective, Shaping(), raw.new_zeros(1, 1))
    return scorer(raw, targets, torch.ones((), dtype=raw.dtype))


def test_the_gradient_of_the_divergence_is_the_documented_one() -> None:
    teacher_logits, log_q = distributions(3, 9, 1.0)
    top, ids = teacher_logits.topk(3)
    targets = Targets(
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1, dtype=torch.bool),
        (ids[None, None].int(), top[None, None].bfloat16(), teacher_logits.logsumexp(0)[None, None].float()),
    )
    _, _, _, gradient = scored(Objective(block_size=2, loss="kl"), log_q[None], targets)
    p = torch.exp(top.bfloat16().double() - teacher_logits.logsumexp(0).float().double())
    q, rest = log_q.exp(), torch.ones(9, dtype=torch.bool)
    rest[ids] = False
    torch.testing.assert_close(gradient[0, ids], q[ids] - p)
    torch.testing.assert_close(gradient[0, rest], q[rest] * (1 - (1 - p.sum()) / q[rest].sum()))
    assert gradient.sum().item() == pytest.approx(0.0, abs=1e-9)  # a constant on all logits changes nothing


def test_a_drafter_without_a_tail_has_finite_numbers() -> None:
    """All of q's mass in the teacher's top words: in float32 1 - sum is rounding, and 0 / 0 lies near."""
    raw = torch.full((1, 50), -200.0)
    raw[0, :3] = torch.tensor([3.0, 2.0, 1.0])
    targets = Targets(
        torch.full((1, 1), 7),
        torch.ones(1, 1, dtype=torch.bool),
        (torch.tensor([[[0, 1, 2]]]).int(), torch.tensor([[[1.0, 0.5, 0.0]]]).bfloat16(), torch.tensor([[3.0]])),
    )
    for loss in ("kl", "mixed"):
        total, nll, _, gradient = scored(Objective(block_size=2, loss=loss), raw, targets)
        assert torch.isfinite(total)
        assert torch.isfinite(nll).all()
        assert torch.isfinite(gradient).all()
        assert total.item() > 0


@pytest.mark.parametrize("loss", ["ce", "kl", "mixed"])
def test_in_bf16_every_gradient_is_the_exact_one_rounded(loss: str) -> None:
    """Also where the drafter is sure of the label: there bf16 could not hold the difference from 1."""
    generator = torch.Generator().manual_seed(0)
    objective = Objective(block_size=2, loss=loss, weighting="uniform")  # type: ignore[arg-type]
    raw = torch.randn(64, 40, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 40, (64, 1), generator=generator)
    sure = 16 if loss == "ce" else 8  # a tail of 1e-6 is known to a few per cent only: see TAIL_FLOOR
    raw.scatter_add_(1, labels, sure * torch.rand(64, 1, generator=generator, dtype=torch.float64))
    logits, ids = (raw + torch.randn(64, 40, generator=generator, dtype=torch.float64)).topk(5)
    given = (ids[:, None].int(), logits[:, None].bfloat16(), torch.logsumexp(raw, 1, keepdim=True).float())
    targets = Targets(labels, torch.ones(64, 1, dtype=torch.bool), given if loss != "ce" else None)
    exact = scored(objective, raw, targets)[3]
    rounded = Scorer(objective, Shaping(), torch.zeros(1, 1, dtype=torch.bfloat16))(
        raw.float(), targets, torch.ones(())
    )[3]
    assert rounded.dtype == torch.bfloat16
    # What remains is the rounding of float32 logits near 20; bf16 rounds a probability near 1 by 2e-3.
    error = (rounded.double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-5).all()
    if loss == "ce":
        assert exact.gather(1, labels).abs().min() < 1e-4


def test_mixed_lies_between_its_parts() -> None:
    teacher_logits, log_q = distributions(5, 9, 1.0)
    top, ids = teacher_logits.topk(4)
    targets = Targets(
        ids[None, :1].long(),
        torch.ones(1, 1, dtype=torch.bool),
        (ids[None, None].int(), top[None, None].bfloat16(), teacher_logits.logsumexp(0)[None, None].float()),
    )
    hard, soft, mixed = (
        scored(Objective(block_size=2, loss=loss, soft_weight=0.3), log_q[None], targets)
        for loss in ("ce", "kl", "mixed")
    )
    for part in (0, 3):
        torch.testing.assert_close(mixed[part], 0.7 * hard[part] + 0.3 * soft[part], rtol=1e-9, atol=1e-12)
