"""Objectives through the training loop: what they need, learn and record; the compiled chunk against the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_run import ALONE, config_of, curve, run_here
from toy_store import HIDDEN, MASK, counting_texts, make_store

from shared.errors import CheckpointMismatch, ConfigRefused
from stage2_train import loss as loss_module
from stage2_train.chunk_loss import Scorer, Targets
from stage2_train.data import BatchBuilder, Shapes
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig
from stage2_train.estimate import estimate
from stage2_train.loss import Head, blocks_loss, blocks_measure
from stage2_train.objective import Engine, block_states, counts_only, denominator, loss_and_counts, move
from stage2_train.objectives import Objective
from stage2_train.packing import epoch_rows
from stage2_train.selection import open_store, select

ARMS: dict[str, dict[str, Any]] = {
    "ce decay": {},
    "ce dpace": {"weighting": "dpace"},
    "ce uniform, shifted": {"weighting": "uniform", "shift_labels": True},
    "ce decay, teacher's labels": {"labels": "teacher"},
    "kl decay": {"loss": "kl"},
    "mixed dpace": {"loss": "mixed", "weighting": "dpace", "soft_weight": 0.3},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2, topk=8)


@pytest.mark.parametrize("arm", ARMS)
def test_every_objective_is_learnt(store: Path, tmp_path: Path, arm: str) -> None:
    run_here(config_of(store, tmp_path / "run", steps=40, eval_every=20, save_every=40, **ARMS[arm]))
    losses, lengths = curve(tmp_path / "run"), curve(tmp_path / "run", "acceptance_length_estimate", "heldout")
    assert losses[40] < 0.8 * losses[1]
    assert lengths[40] > lengths[0]
    coverage = curve(tmp_path / "run", "anchor_coverage")
    assert len(coverage) == 40
    assert all(0 < value <= 1 for value in coverage.values())
    assert all(value >= 1 for value in curve(tmp_path / "run", "tokens_per_block").values())


def test_anchors_enough_for_every_token_cover_all(store: Path, tmp_path: Path) -> None:
    run_here(config_of(store, tmp_path / "run", steps=3, anchors=47))
    assert set(curve(tmp_path / "run", "anchor_coverage").values()) == {1.0}


@pytest.mark.parametrize("arm", ["ce dpace", "mixed dpace", "kl decay"])
def test_micro_batches_add_up_to_the_whole(store: Path, tmp_path: Path, arm: str) -> None:
    for rows in (4, 1):
        run_here(config_of(store, tmp_path / str(rows), steps=4, micro_rows=rows, **ARMS[arm]))
    whole, parts = curve(tmp_path / "4"), curve(tmp_path / "1")
    assert parts == pytest.approx(whole, rel=1e-4)
    for name in ("nll", "tokens_per_block", "anchor_coverage"):
        assert curve(tmp_path / "1", name)[1] == pytest.approx(curve(tmp_path / "4", name)[1], rel=1e-4)


@pytest.mark.parametrize("changes", [{"loss": "kl"}, {"loss": "mixed"}, {"labels": "teacher"}], ids=str)
def test_a_store_without_top_logits_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    bare = make_store(tmp_path / "x.zarr", counting_texts(4))
    with pytest.raises(ConfigRefused, match="--topk 0"):
        run_here(config_of(bare, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes", [{"loss": "ce"}, {"weighting": "decay"}, {"labels": "teacher"}, {"alpha": 0.7}], ids=str
)
def test_a_run_keeps_its_objective(store: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    run_here(config_of(store, tmp_path / "run", steps=1))
    with pytest.raises(CheckpointMismatch, match=next(iter(changes))):
        run_here(config_of(store, tmp_path / "run", steps=1, **changes))


@pytest.mark.parametrize(
    "changes", [{"alpha": 0.0}, {"soft_weight": 1.0}, {"gamma": -1.0}, {"shift_labels": True, "slot_0": False}], ids=str
)
def test_settings_without_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigRefused):
        config_of(Path("x.zarr"), Path("run"), **changes)


def test_labels_of_the_teacher_move_what_counts_as_right(store: Path, tmp_path: Path) -> None:
    """The same drafter, judged by two kinds of labels: every third one differs. Held-out text is always the text."""
    plain = run_here(config_of(store, tmp_path / "plain", steps=60, eval_every=100, save_every=100))
    other = run_here(config_of(store, tmp_path / "other", steps=1, labels="teacher"))

    def judged(parts: Any, builder: Any) -> dict[str, float]:
        return estimate(plain.drafter, builder, parts.share, parts.engine, ALONE)

    by_data, by_teacher = judged(plain, plain.builder), judged(other, other.builder)
    assert by_teacher["accuracy_slot_01"] != pytest.approx(by_data["accuracy_slot_01"], rel=1e-3)
    assert judged(other, other.heldout) == judged(plain, plain.heldout)


def parts_of(store: Path, objective: Objective) -> tuple[Drafter, Engine, BatchBuilder]:
    torch.set_num_threads(1)
    opened = open_store(store)
    shapes = Shapes(max_length=48, anchors=6, block_size=4, feature_size=2 * HIDDEN, objective=objective)
    tables = opened.load_head()
    engine = Engine(
        embed_tokens=tables["embed_tokens"].float(),
        head=Head(tables["lm_head"].float()),
        objective=objective,
        attention="sdpa",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    geometry = DrafterConfig(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=(1, 2),
        num_target_layers=6,
    )
    return Drafter(geometry).initialise(0), engine, BatchBuilder(opened, select(opened, "train")[0], shapes, seed=5)


@pytest.mark.parametrize("loss", ["ce", "mixed"])
def test_all_blocks_give_what_the_counted_ones_give(store: Path, loss: Any) -> None:
    """On a GPU the head runs over unused slots too; they change neither loss, gradient nor counts."""
    drafter, engine, builder = parts_of(store, Objective(block_size=4, loss=loss, weighting="dpace"))
    batch = builder.build([*epoch_rows(builder.lengths(), 48, 5, 0)[:2], ()], 0)
    divisor = denominator((batch,), engine.objective)
    found = []
    for whole in (False, True):
        drafter.zero_grad()
        placed = move(batch, MASK, engine)
        states = block_states(drafter, placed, engine)
        if whole:
            scored = blocks_loss(states, placed.targets, divisor, engine.head, engine.scorer)
            total, counts = scored.total, None
        else:
            total, counts = loss_and_counts(states, placed, engine, divisor)
            played, right = counts_only(states, placed, engine)
            assert torch.allclose(played, counts)
            assert right.shape == (18,)
            assert (right[~placed.targets.counted.any(1)] == 0).all()
            assert int(right.sum()) == counts[-2]
        total.backward()
        found.append((total.detach(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("changes", [{}, {"weighting": "dpace"}, {"loss": "mixed"}], ids=str)
def test_one_graph_serves_all_chunks_the_ragged_one_and_the_estimate(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS_CPU", 16 * 40)
    generator = torch.Generator().manual_seed(0)
    objective, blocks = Objective(block_size=4, **changes), 23
    head = Head(torch.randn(40, HIDDEN, generator=generator), 2.0, 20.0)
    logits, ids = torch.randn(blocks, 3, 40, generator=generator).topk(6)
    targets = Targets(
        torch.randint(0, 40, (blocks, 3), generator=generator),
        torch.rand(blocks, 3, generator=generator) < 0.8,
        (ids.int(), logits.bfloat16(), torch.full((blocks, 3), 4.5)) if changes.get("loss") else None,
    )
    states = torch.randn(blocks, 4, HIDDEN, generator=generator)
    found = []
    for compiled in (False, True):
        scorer = Scorer(objective, head.shaping(), head.weight)
        before = counters["stats"]["unique_graphs"]
        if compiled:
            scorer.compile("aot_eager")
        given = states.clone().requires_grad_()
        for divisor in (3.0, torch.tensor(5.0, dtype=torch.float64)):
            scored = blocks_loss(given, targets, divisor, head, scorer)
            scored.total.backward()
        measured = blocks_measure(given, targets, head, scorer)
        assert counters["stats"]["unique_graphs"] - before == compiled
        assert given.grad is not None
        found.append((scored.total.detach(), given.grad, *measured))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "changes",
    [{}, {"weighting": "dpace"}, {"loss": "kl"}, {"loss": "mixed"}, {"loss": "kl", "rounded_logits": True}],
    ids=str,
)
def test_on_a_gpu_the_compiled_chunk_in_bf16_is_near_float64(changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    objective, blocks, words = Objective(block_size=16, **changes), 301, 5000
    weight, states = (
        torch.randn(words, 256, generator=generator) * 0.1,
        torch.randn(blocks, 16, 256, generator=generator),
    )
    weight, states = weight.bfloat16(), states.bfloat16()
    logits, ids = (states[:, 1:] @ weight.t() + torch.randn(blocks, 15, words, generator=generator)).float().topk(64)
    targets = Targets(
        torch.randint(0, words, (blocks, 15), generator=generator),
        torch.rand(blocks, 15, generator=generator) < 0.8,
        (ids.int(), logits.bfloat16(), logits.logsumexp(-1) + 0.1) if objective.needs_distributions else None,
    )

    def run(device: str, dtype: torch.dtype, compiled: bool) -> tuple[float, torch.Tensor]:
        head = Head(weight.to(device, dtype))
        scorer = Scorer(objective, head.shaping(), head.weight)
        if compiled:
            scorer.compile()
        given = targets.distributions
        placed = Targets(
            targets.labels.to(device),
            targets.counted.to(device),
            None if given is None else tuple(tensor.to(device) for tensor in given),  # type: ignore[arg-type]
        )
        leaf = states.to(device, dtype).requires_grad_()
        total = blocks_loss(leaf, placed, 7.0, head, scorer).total
        total.backward()
        assert leaf.grad is not None
        return total.item(), leaf.grad.double().cpu()

    exact, exact_gradient = run("cpu", torch.float64, compiled=False)
    for compiled in (False, True):
        found, gradient = run("cuda", torch.bfloat16, compiled)
        assert found == pytest.approx(exact, rel=1e-4)
        assert ((gradient - exact_gradient).norm() / exact_gradient.norm()).item() < 4e-3


def test_a_denominator_is_known_before_the_forward_pass(store: Path) -> None:
    builder = parts_of(store, Objective(block_size=4))[2]
    batch = builder.build(epoch_rows(builder.lengths(), 48, 5, 0)[:3], 0)
    counted = batch.counted[:, :, 1:]
    weights = np.exp(-np.arange(3) / 7.0)
    assert denominator((batch, batch), Objective(block_size=4)) == pytest.approx(2 * (counted * weights).sum())
    assert denominator((batch,), Objective(block_size=4, weighting="dpace")) == counted.any(-1).sum()
