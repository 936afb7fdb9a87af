"""The chunked loss against plain cross-entropy, and its counts against loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_train.loss import Head, count, cross_entropy, measure, read_counts, slot_weights


def test_decay_is_the_published_one() -> None:
    weights = slot_weights(16, 7.0).tolist()
    assert weights[0] == 0.0
    published = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135]
    assert weights[1:] == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.2, 20.0), (3.0, None), (1.0, 2.0)])
@pytest.mark.parametrize("chunk", [16, 7, 100])
def test_loss_and_gradient_equal_plain_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, multiplier: float, softcap: float | None, chunk: int
) -> None:
    monkeypatch.setattr(Head, "chunk_rows", lambda self: chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 12, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 30, (50,), generator=generator)
    weights = torch.rand(50, generator=generator, dtype=torch.float64)
    raw = hidden @ weight.T * multiplier
    plain = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    nll = F.cross_entropy(plain, labels, reduction="none")
    (nll * weights).sum().backward()
    exact, single = hidden.grad, hidden.detach().float().requires_grad_()
    assert exact is not None
    total, losses, matches = cross_entropy(single, labels, weights.float(), Head(weight.float(), multiplier, softcap))
    (3.0 * total).backward()
    assert single.grad is not None
    torch.testing.assert_close(total.double(), (nll * weights).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.grad.double(), 3.0 * exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(matches, plain.argmax(-1) == labels)
    again, same = measure(single.detach(), labels, Head(weight.float(), multiplier, softcap))
    assert torch.equal(again, losses)
    assert torch.equal(same, matches)


def test_slots_of_weight_zero_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(30, 12, generator=generator))
    hidden, labels = torch.randn(20, 12, generator=generator), torch.randint(0, 30, (20,), generator=generator)
    weights = torch.rand(20, generator=generator)
    more = torch.cat([hidden, 100 * torch.randn(100, 12, generator=generator)])
    alone = hidden.clone().requires_grad_()
    padded = more.clone().requires_grad_()
    loss, *_ = cross_entropy(alone, labels, weights, head)
    loss_padded, *_ = cross_entropy(
        padded, torch.cat([labels, torch.zeros(100, dtype=torch.int64)]), torch.cat([weights, torch.zeros(100)]), head
    )
    loss.backward()
    loss_padded.backward()
    assert alone.grad is not None
    assert padded.grad is not None
    torch.testing.assert_close(loss, loss_padded)
    torch.testing.assert_close(alone.grad, padded.grad[:20])
    assert (padded.grad[20:] == 0).all()


def test_no_slot_at_all_is_a_zero_with_a_gradient() -> None:
    hidden = torch.randn(4, 12, requires_grad=True)
    loss, losses, matches = cross_entropy(
        hidden[:0], torch.zeros(0, dtype=torch.int64), torch.zeros(0), Head(torch.randn(5, 12))
    )
    loss.backward()
    assert loss.item() == 0.0
    assert len(losses) == len(matches) == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_a_loop(blocks: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    match = torch.rand(blocks, size, generator=generator) < 0.6
    loss = torch.rand(blocks, size, generator=generator)
    slots = torch.randint(0, size, (blocks,), generator=generator)  # counted slots of each block: 1 .. slots
    counted = (torch.arange(size)[None] <= slots[:, None]) & (torch.arange(size) > 0)
    found = read_counts(count(match, loss, counted), size)
    lengths = []
    for block in range(blocks):
        if slots[block] == 0:
            continue
        length = 1
        for slot in range(1, int(slots[block]) + 1):
            if not match[block, slot]:
                break
            length += 1
        lengths.append(length)
    if not lengths:
        assert found == {}
        return
    assert found["acceptance_length_estimate"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["nll"] == pytest.approx(loss[counted].double().mean().item(), rel=1e-6)
    for slot in range(1, size):
        rows = [b for b in range(blocks) if slots[b] >= slot]
        assert (f"accuracy_slot_{slot:02d}" in found) == bool(rows)
        if rows:
            right = [bool(match[b, slot]) for b in rows]
            passed = [bool(match[b, 1 : slot + 1].all()) for b in rows]
            assert found[f"accuracy_slot_{slot:02d}"] == pytest.approx(sum(right) / len(rows))
            assert found[f"acceptance_slot_{slot:02d}"] == pytest.approx(sum(passed) / len(rows))


def test_a_perfect_and_a_hopeless_drafter_have_the_documented_lengths() -> None:
    counted = torch.tensor([[False, True, True, True]] * 3)
    zeros = torch.zeros(3, 4)
    perfect = read_counts(count(torch.ones(3, 4, dtype=torch.bool), zeros, counted), 4)
    wrong_first = torch.tensor([[True, False, True, True]] * 3)
    assert perfect["acceptance_length_estimate"] == 4.0
    assert read_counts(count(wrong_first, zeros, counted), 4)["acceptance_length_estimate"] == 1.0


def test_wide_vocabularies_are_taken_in_chunks() -> None:
    rows = Head(torch.empty(248_320, 1)).chunk_rows()
    assert 16 <= rows <= 64
    assert math.prod((rows, 248_320)) <= 2**24
