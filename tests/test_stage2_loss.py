"""The chunked loss against the slow objectives, and its counts against loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_objective import SlowHead, slow_loss

from stage2_train import loss as loss_module
from stage2_train.chunk_loss import Scorer, Targets
from stage2_train.loss import Head, blocks_loss, blocks_measure, blocks_per_chunk, count, count_size, read_counts
from stage2_train.objectives import Objective

WORDS, HIDDEN, TOP = 30, 12, 5
LOSSES = [{"loss": "ce"}, {"loss": "kl"}, {"loss": "mixed", "soft_weight": 0.3}]
WEIGHTINGS = [{"weighting": "decay", "gamma": 2.0}, {"weighting": "dpace", "alpha": 0.4}, {"weighting": "uniform"}]


def made(objective: Objective, blocks: int, *, top: int = TOP, seed: int = 0) -> tuple[torch.Tensor, Targets]:
    """States float64 [N,B,H] and targets: ragged blocks, labels inside and outside the teacher's top words."""
    generator = torch.Generator().manual_seed(seed)
    trained = len(objective.distances)
    states = torch.randn(blocks, objective.block_size, HIDDEN, generator=generator, dtype=torch.float64)
    full = torch.randn(blocks, trained, WORDS, generator=generator, dtype=torch.float64) * 2
    logits, ids = full.topk(top, dim=-1)
    labels = torch.randint(0, WORDS, (blocks, trained), generator=generator)
    labels[::2] = ids[::2, :, 1 % top]
    reach = torch.randint(0, trained + 1, (blocks, 1), generator=generator)
    counted = torch.arange(trained)[None] < reach
    return states, Targets(
        labels, counted, (ids.int(), logits.bfloat16(), full.logsumexp(-1).float()) if objective.loss != "ce" else None
    )


def slow(
    states: torch.Tensor, targets: Targets, objective: Objective, head: SlowHead
) -> tuple[float, torch.Tensor, float]:
    """Loss, gradient by the states of all slots, denominator."""
    exact = states.clone().requires_grad_()
    total, denominator = slow_loss(exact[:, objective.first_slot :], targets, objective, head)
    (total / denominator).backward()
    assert exact.grad is not None
    return total.item() / denominator, exact.grad, denominator


def fast(
    states: torch.Tensor, targets: Targets, denominator: float, head: Head, objective: Objective
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the code that trains."""
    given = states.clone().requires_grad_()
    found = blocks_loss(given, targets, denominator, head, Scorer(objective, head.shaping(), head.weight))
    (3.0 * found.total).backward()
    assert given.grad is not None
    return found.total.item(), given.grad / 3.0


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda changes: changes["weighting"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda changes: changes["loss"])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.2, 20.0), (1.0, 2.0)])
@pytest.mark.parametrize("slots", [{}, {"shift_labels": True, "slot_0": True}, {"slot_0": True}], ids=str)
def test_loss_and_gradient_equal_the_slow_ones(
    monkeypatch: pytest.MonkeyPatch,
    loss: dict[str, Any],
    weighting: dict[str, Any],
    multiplier: float,
    softcap: float | None,
    slots: dict[str, bool],
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS_CPU", 16 * WORDS)  # several chunks, the last one smaller
    objective = Objective(block_size=4, **loss, **weighting, **slots)
    states, targets = made(objective, 15)
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, exact_gradient, denominator = slow(states, targets, objective, SlowHead(weight, multiplier, softcap))
    assert objective.denominator(
        torch.nn.functional.pad(targets.counted, (objective.first_slot, 0)).numpy()
    ) == pytest.approx(denominator)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        head = Head(weight.to(dtype), multiplier, softcap)
        found, gradient = fast(states.to(dtype), targets, denominator, head, objective)
        assert found == pytest.approx(exact, rel=tolerance, abs=tolerance)
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=tolerance, atol=tolerance)
        assert (gradient[:, : objective.first_slot] == 0).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda changes: changes["weighting"])
def test_what_does_not_count_changes_nothing(weighting: dict[str, Any]) -> None:
    objective = Objective(block_size=4, loss="mixed", **weighting)
    states, targets = made(objective, 9)
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    more, others = made(objective, 7, seed=5)
    none = torch.zeros_like(others.counted)
    assert targets.distributions is not None
    assert others.distributions is not None
    both = Targets(
        torch.cat([targets.labels, others.labels]),
        torch.cat([targets.counted, none]),
        tuple(torch.cat(pair) for pair in zip(targets.distributions, others.distributions, strict=True)),  # type: ignore[arg-type]
    )
    head = Head(weight)
    alone, gradient = fast(states, targets, 5.0, head, objective)
    padded, longer = fast(torch.cat([states, 100 * more]), both, 5.0, head, objective)
    assert padded == pytest.approx(alone, rel=1e-12)
    torch.testing.assert_close(longer[:9], gradient, rtol=1e-12, atol=1e-12)
    assert (longer[9:] == 0).all()
    assert (gradient[:, 1:][~targets.counted] == 0).all()


def test_parts_divided_by_one_denominator_add_up() -> None:
    for loss, weighting in itertools.product(LOSSES, WEIGHTINGS):
        objective = Objective(block_size=4, **loss, **weighting)
        states, targets = made(objective, 11)
        head = Head(torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

        def of(part: slice, states: torch.Tensor = states, targets: Targets = targets) -> Targets:
            given = targets.distributions
            cut = None if given is None else (given[0][part], given[1][part], given[2][part])
            return Targets(targets.labels[part], targets.counted[part], cut)

        whole, gradient = fast(states, targets, 7.0, head, objective)
        parts = [fast(states[p], of(p), 7.0, head, objective) for p in (slice(0, 4), slice(4, 11))]
        assert sum(part[0] for part in parts) == pytest.approx(whole)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)


def test_measuring_is_the_loss_without_a_gradient() -> None:
    objective = Objective(block_size=4, loss="mixed", weighting="dpace")
    states, targets = made(objective, 9)
    head = Head(torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1)))
    scorer = Scorer(objective, head.shaping(), head.weight)
    given = states.float().requires_grad_()
    found, measured = blocks_loss(given, targets, 1.0, head, scorer), blocks_measure(given, targets, head, scorer)
    assert not measured.total.requires_grad
    for one, other in zip(found, measured, strict=True):
        assert torch.equal(one.detach(), other)
    logits = given.detach()[:, 1:] @ head.weight.t()
    assert torch.equal(measured.match, logits.argmax(-1) == targets.labels)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="none")
    torch.testing.assert_close(measured.nll.flatten(), want)


def test_no_block_at_all_is_a_zero_with_a_gradient() -> None:
    head = Head(torch.randn(5, HIDDEN))
    scorer = Scorer(Objective(block_size=4), head.shaping(), head.weight)
    states = torch.randn(4, 4, HIDDEN, requires_grad=True)
    nothing = Targets(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool), None)
    found = blocks_loss(states[:0], nothing, 1.0, head, scorer)
    found.total.backward()
    assert found.total.item() == 0.0
    assert found.nll.shape == found.match.shape == (0, 3)
    assert states.grad is not None
    assert (states.grad == 0).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_a_loop(blocks: int, drafts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    match = torch.rand(blocks, drafts, generator=generator) < 0.6
    nll = torch.rand(blocks, drafts, generator=generator)
    reach = torch.randint(0, drafts + 1, (blocks,), generator=generator)  # drafts of each block that count
    counted = torch.arange(drafts)[None] < reach[:, None]
    sums = count(match, nll, counted)
    assert len(sums) == count_size(drafts)
    found = read_counts(sums)
    lengths = []
    for block in range(blocks):
        if reach[block] == 0:
            continue
        length = 1
        for draft in range(int(reach[block])):
            if not match[block, draft]:
                break
            length += 1
        lengths.append(length)
    if not lengths:
        assert found == {}
        return
    assert found["tokens_per_block"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["nll"] == pytest.approx(nll[counted].double().mean().item(), rel=1e-6)
    for draft in range(drafts):
        rows = [b for b in range(blocks) if reach[b] > draft]
        assert (f"accuracy_slot_{draft + 1:02d}" in found) == bool(rows)
        if rows:
            right = [bool(match[b, draft]) for b in rows]
            passed = [bool(match[b, : draft + 1].all()) for b in rows]
            assert found[f"accuracy_slot_{draft + 1:02d}"] == pytest.approx(sum(right) / len(rows))
            assert found[f"acceptance_slot_{draft + 1:02d}"] == pytest.approx(sum(passed) / len(rows))


def test_a_perfect_and_a_hopeless_drafter_have_the_documented_lengths() -> None:
    counted, zeros = torch.ones(3, 3, dtype=torch.bool), torch.zeros(3, 3)
    wrong_first = torch.tensor([[False, True, True]] * 3)
    assert read_counts(count(counted, zeros, counted))["tokens_per_block"] == 4.0
    assert read_counts(count(wrong_first, zeros, counted))["tokens_per_block"] == 1.0


@given(st.integers(1, 5000), st.integers(1, 31), st.sampled_from([40, 32_000, 248_320]))
@settings(max_examples=60, deadline=None)
def test_chunks_are_nearly_equal_and_small(blocks: int, trained: int, words: int) -> None:
    size = blocks_per_chunk(blocks, trained, Head(torch.empty(words, 1)))
    chunks = math.ceil(blocks / size)
    assert 1 <= size <= blocks
    assert size * chunks - blocks < chunks  # no more is padded than one block a chunk
    assert size == 1 or size * trained * words <= max(loss_module.CHUNK_ELEMENTS_CPU, 16 * words)


def test_at_the_27b_shape_no_chunk_is_padded() -> None:
    class Large:  # a head on a GPU, as far as the choice of chunks goes
        weight = type("Weight", (), {"is_cuda": True, "shape": (248_320, 5120)})

    size = blocks_per_chunk(2048, 15, Large())  # type: ignore[arg-type]
    assert (size, 2048 % size, size * 15 % 128) == (128, 0, 0)
