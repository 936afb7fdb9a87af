"""The compile contract without a GPU: real Dynamo graphs, with a backend that has a backward for flex on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import ALONE, config_of
from toy_store import counting_texts, make_store

from shared.errors import CompileContract
from stage2_train import launch_train
from stage2_train.compiled import compile_layers, contract, graphs, warm_up
from stage2_train.data import stream
from stage2_train.estimate import estimate
from stage2_train.objective import block_states, move
from stage2_train.step import Stepper
from stage2_train.train import fresh_state
from stage2_train.training_parts import Parts, set_up

SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 5}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh compiler, and flex_attention's refusal to run backward on a CPU lifted (aot_eager has a dense one)."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda q, k, v: None)
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def flex_parts(store: Path, run_dir: Path, **changes: Any) -> Parts:
    config = config_of(store, run_dir, num_layers=3, **changes)
    run = launch_train.check(config)
    parts = set_up(run_dir, run, ALONE, "here")
    engine = dataclasses.replace(parts.engine, attention="flex")
    stepper = Stepper(parts.drafter, parts.optimizer, parts.stepper.gradient, engine, ALONE, config)
    return dataclasses.replace(parts, engine=engine, stepper=stepper)


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("layers", [{}, SLIDING], ids=["full", "sliding and full"])
def test_a_graph_for_each_kind_of_layer_and_none_after_the_seal(tmp_path: Path, layers: dict[str, Any]) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(24))
    parts = flex_parts(store, tmp_path / "run", **layers)
    plain = flex_parts(store, tmp_path / "plain", **layers)
    plain = dataclasses.replace(plain, engine=dataclasses.replace(plain.engine, attention="sdpa"))
    expected = compile_layers(parts.drafter, backend="aot_eager")
    assert expected == len({*parts.drafter.kinds}) == (2 if layers else 1)
    empty = parts.builder.build(((),) * 4, 0)
    before = graphs()
    assert warm_up(lambda: parts.stepper.rehearse(empty), expected)["graphs"] == expected
    assert (parts.stepper.gradient.buffer == 0).all()
    state, batches = fresh_state(4), stream(parts.builder, parts.share, 0, 0)
    assert parts.heldout is not None
    with contract("a step"):
        for _ in range(3):
            rows = next(batches)
            want = block_states(plain.drafter, move(rows.parts[0], 39, plain.engine), plain.engine)
            got = block_states(parts.drafter, move(rows.parts[0], 39, parts.engine), parts.engine)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            parts.stepper.step(state, rows, 10)
            plain.drafter.load_state_dict(parts.drafter.state_dict())
            estimate(parts.drafter, parts.heldout, parts.share, parts.engine, ALONE)
    assert graphs() - before == expected
    with pytest.raises(CompileContract, match="compile again at two rows"), contract("two rows"):
        parts.stepper.rehearse(parts.builder.build(((),) * 2, 0))


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("default")
def test_more_graphs_than_declared_end_the_run(tmp_path: Path) -> None:
    parts = flex_parts(make_store(tmp_path / "x.zarr", counting_texts(24)), tmp_path / "run", **SLIDING)
    compile_layers(parts.drafter, backend="aot_eager")
    empty = parts.builder.build(((),) * 4, 0)
    with pytest.raises(CompileContract, match="compiled 2 graphs, 1 declared"):
        warm_up(lambda: parts.stepper.rehearse(empty), 1)
