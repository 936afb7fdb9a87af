"""The compile contract without a GPU: real Dynamo graphs, with a backend that has a backward for flex on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import ALONE, config_of
from toy_store import counting_texts, make_store

from manifests.commit import read
from shared.errors import CompileContract
from stage2_train import compiled, launch_train
from stage2_train.compile_warm_up import compiled_regions
from stage2_train.compiled import Contract, graphs
from stage2_train.data import stream
from stage2_train.drafter import Attention
from stage2_train.estimate import estimate
from stage2_train.objective import block_states, move
from stage2_train.step import Stepper
from stage2_train.train import fresh_state
from stage2_train.training_parts import Parts, set_up

SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 5}
declare = functools.partial(compiled.declare, backend="aot_eager")

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.filterwarnings("default")]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A fresh compiler, and flex_attention's refusal to run backward on a CPU lifted (aot_eager has a dense one)."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda q, k, v: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "x.zarr", counting_texts(24))


def flex_parts(store: Path, run_dir: Path, **changes: Any) -> Parts:
    config = config_of(store, run_dir, **{"num_layers": 3, **changes})
    run = launch_train.check(config)
    run_dir.mkdir()
    parts = set_up(run_dir, run, ALONE, "here")
    engine = dataclasses.replace(parts.engine, attention="flex")
    stepper = Stepper(parts.drafter, parts.optimizer, parts.stepper.gradient, engine, ALONE, config)
    return dataclasses.replace(parts, engine=engine, stepper=stepper)


def rows(parts: Parts, count: int = 4) -> Any:
    return parts.builder.build(((),) * count, 0)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow, id="full"),
        pytest.param({**SLIDING, "activation_checkpointing": True}, id="sliding and full, recomputed"),
    ],
)
def test_every_region_compiles_as_declared_and_nothing_after(
    store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    parts = flex_parts(store, tmp_path / "run", **changes)
    plain = flex_parts(store, tmp_path / "plain", **changes)
    plain = dataclasses.replace(plain, engine=dataclasses.replace(plain.engine, attention="sdpa"))
    kinds = len({*parts.drafter.kinds})
    assert kinds == (2 if changes else 1)
    assert parts.heldout is not None
    before = graphs()
    with compiled_regions(parts, declare) as contract:
        assert (parts.stepper.gradient.buffer == 0).all()
        state, batches = fresh_state(3), stream(parts.builder, parts.share, 0, 0)
        for step in range(3):
            batch = next(batches)
            want = block_states(plain.drafter, move(batch.parts[0], 39, plain.engine), plain.engine)
            got = block_states(parts.drafter, move(batch.parts[0], 39, parts.engine), parts.engine)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            with contract.watch(f"step {step}"):
                parts.stepper.step(state, batch, 10)
                estimate(parts.drafter, parts.heldout, parts.share, parts.engine, ALONE)
            plain.drafter.load_state_dict(parts.drafter.state_dict())
            contract.check(f"step {step}")
    assert graphs() - before == 2 * kinds + 1
    event = {record["event"]: record["detail"] for record in read(tmp_path / "run", "events")}["compiled"]
    assert event["graphs"] == 2 * kinds + 1
    assert event["cache"] == "cold"
    assert event["compiled_for"] == "4 rows of 48 tokens and 6 blocks of 4"
    assert {
        name: (found["graphs"], found["declared"], found["backward_compiles"], found["from_cache"])
        for name, found in event["regions"].items()
    } == {
        "decoder layer": (kinds, kinds, kinds, 0),
        "mask builder": (kinds, kinds, 0, 0),
        "loss": (1, 1, 0, 0),
    }
    assert all(found["seconds"] > 0 for found in event["regions"].values())
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # the contract ended with its block


def test_losses_and_gradients_are_those_of_training_without_a_compiler(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run", weighting="dpace", **SLIDING)
    plain = flex_parts(store, tmp_path / "plain", weighting="dpace", **SLIDING)
    plain.stepper.engine = dataclasses.replace(plain.engine, attention="sdpa")
    batch = next(stream(parts.builder, parts.share, 0, 0)).parts[0]
    with compiled_regions(parts, declare):
        got = parts.stepper._forward_backward(batch, 7.0)
    want = plain.stepper._forward_backward(batch, 7.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    found, exact = parts.stepper.gradient.buffer, plain.stepper.gradient.buffer
    assert (found - exact).norm() <= 1e-5 * exact.norm()


def test_more_graphs_than_declared_end_the_run_with_the_guard(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run", **SLIDING)

    def too_few(*given: Any) -> Contract:
        contract = declare(*given)
        return Contract([dataclasses.replace(region, graphs=1) for region in contract.regions], kernels=False)

    said = r"decoder layer compiled 2 graphs, 1 declared, for 4 rows of 48 tokens.*causal == True"
    with pytest.raises(CompileContract, match=said), compiled_regions(parts, too_few):
        pass


@pytest.mark.slow
def test_a_layer_that_differs_from_the_others_is_named(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run", num_layers=2)
    for number, layer in enumerate(parts.drafter.layers):
        layer.self_attn.theta = 10000.0 + number  # type: ignore[union-attr]
    with pytest.raises(CompileContract, match=r"decoder layer compiled 2 graphs, 1 declared.*theta"):
        _enter(parts)


def test_a_graph_break_ends_the_run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Attention, *given: Any, real: Callable[..., Any] = Attention.attend) -> Any:
        torch._dynamo.graph_break()
        return real(self, *given)

    monkeypatch.setattr(Attention, "attend", broken)
    with pytest.raises(CompileContract, match=r"breaks in two at the warm-up: .*graph_break"):
        _enter(flex_parts(store, tmp_path / "run"))


def _enter(parts: Parts) -> None:
    with compiled_regions(parts, declare):
        pass


@pytest.mark.slow
def test_a_warm_up_without_backward_or_with_something_else_compiled_is_refused(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run")
    contract = declare(parts.drafter, parts.engine)
    batch = rows(parts)
    placed = move(batch, 39, parts.engine)
    with pytest.raises(CompileContract, match="the loss compiled 0 graphs, 1 declared"):
        contract.warm_up(lambda: block_states(parts.drafter, placed, parts.engine).sum().backward())
    one = Contract([region for region in contract.regions if region.name == "decoder layer"], kernels=False)
    torch._dynamo.reset()
    one.restart()
    with pytest.raises(CompileContract, match="compiled 0 backward graphs, 1 declared"):
        one.warm_up(lambda: block_states(parts.drafter, placed, parts.engine))
    torch._dynamo.reset()
    one.restart()
    with pytest.raises(CompileContract, match=r"tile_tables \(.*attention.py:\d+\), which is no declared region"):
        one.warm_up(lambda: block_states(parts.drafter, placed, parts.engine).sum().backward())


def test_what_would_compile_after_the_seal_is_a_named_error(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run")
    placed = move(rows(parts), 39, parts.engine)
    with compiled_regions(parts, declare) as contract:
        said = r"mask builder would compile again at two rows, after 4 rows of 48 tokens and 6 blocks of 4: .*size"
        with pytest.raises(CompileContract, match=said), contract.watch("two rows"):
            parts.stepper.rehearse(rows(parts, 2))
        said = r"mask builder would compile again at an estimate, after .*: - 0/0: GLOBAL_STATE changed: grad_mode"
        with pytest.raises(CompileContract, match=said), contract.watch("an estimate"), torch.no_grad():
            block_states(parts.drafter, placed, parts.engine)
        said = r"<lambda> .*no declared region, would compile again at a stray call"
        with pytest.raises(CompileContract, match=said), contract.watch("a stray call"):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        with pytest.raises(RuntimeError, match="something else"), contract.watch("step 9"):
            raise RuntimeError("something else")
        faults: list[BaseException] = []

        def other() -> None:
            try:
                with contract.watch("a thread"):
                    parts.stepper.rehearse(rows(parts, 2))
            except CompileContract as error:
                faults.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "would compile again at a thread" in str(faults[0])
        parts.stepper.rehearse(rows(parts))  # and what was compiled still runs
        contract.check("the end")
        torch.compiler.set_stance("default")  # what slips through is found at the next log line
        parts.stepper.rehearse(rows(parts, 2))
        with pytest.raises(CompileContract, match=r"mask builder compiled again before step 10, after 4 rows.*size"):
            contract.check("step 10")


def test_dense_attention_after_the_seal_is_refused(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run")
    contract = Contract(declare(parts.drafter, parts.engine).regions, kernels=True)
    contract._seal()
    try:
        torch.compiler.set_stance("force_eager")
        warnings.filterwarnings("ignore", message=compiled.EAGER_FLEX)  # torch says it once, and not on every path
        with pytest.raises(CompileContract, match="ran its dense math instead of its kernel"):
            parts.stepper.rehearse(rows(parts))
    finally:
        contract.release()
    parts.stepper.rehearse(rows(parts))
    with (
        pytest.raises(CompileContract, match="flex_attention ran without its kernel at step 3"),
        contract.watch("step 3"),
    ):
        raise UserWarning(f"{compiled.EAGER_FLEX}() - this will use an unfused implementation")


def test_on_a_cpu_nothing_is_compiled_and_nothing_watched(store: Path, tmp_path: Path) -> None:
    parts = flex_parts(store, tmp_path / "run")
    parts = dataclasses.replace(parts, engine=dataclasses.replace(parts.engine, attention="sdpa"))
    with compiled_regions(parts) as contract:
        assert contract.regions == ()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        contract.check("the end")
    assert not list(tmp_path.glob("dflash-compile-*"))
