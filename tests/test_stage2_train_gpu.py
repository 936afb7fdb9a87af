"""The compile contract and the GPU path, on a real GPU (pytest -m gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import config_of, curve
from toy_store import counting_texts, make_store

from manifests.commit import read
from shared.errors import CompileContract
from stage2_train import launch_train
from stage2_train.compiled import compile_layers, contract, graphs, warm_up
from stage2_train.config import TrainConfig
from stage2_train.distributed import Ranks
from stage2_train.train import train
from stage2_train.training_parts import set_up


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def on_gpu(config: TrainConfig) -> Any:
    run = launch_train.check(config)
    config.run_dir().mkdir(exist_ok=True)
    launch_train.open_run(config.run_dir(), run, config)
    return set_up(config.run_dir(), run, Ranks(0, 1, torch.device("cuda", 0)), "here")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("layers", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}])
def test_one_compile_per_kind_of_layer_over_many_steps_and_estimates(
    store: Path, tmp_path: Path, layers: dict[str, Any]
) -> None:

    shape = {"max_length": 200, "anchors": 24, "block_size": 8, "head_dim": 64, "device": "cuda", "steps": 40, **layers}
    before = graphs()
    train(on_gpu(config_of(store, tmp_path / "run", **shape)))
    assert graphs() - before == (2 if layers else 1)
    events = {r["event"]: r["detail"] for r in read(tmp_path / "run", "events")}
    assert events["engine"]["attention"] == "flex"
    assert events["compiled"]["graphs"] == (2 if layers else 1)
    losses = curve(tmp_path / "run")
    assert losses[40] < losses[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
def test_flex_in_bf16_follows_the_curve_of_sdpa_in_float32(store: Path, tmp_path: Path) -> None:
    shape = {"max_length": 200, "anchors": 24, "block_size": 8, "head_dim": 64, "device": "cuda", "steps": 20}
    train(on_gpu(config_of(store, tmp_path / "sdpa", **shape, attention="sdpa", dtype="float32")))
    train(on_gpu(config_of(store, tmp_path / "flex", **shape)))
    exact, half = curve(tmp_path / "sdpa"), curve(tmp_path / "flex")
    assert half[1] == pytest.approx(exact[1], rel=1e-2)
    assert half[20] == pytest.approx(exact[20], rel=5e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_second_shape_after_the_seal_is_a_named_error(store: Path, tmp_path: Path) -> None:

    shape = {"max_length": 200, "anchors": 24, "block_size": 8, "head_dim": 64, "device": "cuda"}
    parts = on_gpu(config_of(store, tmp_path / "run", **shape))
    batch = parts.builder.build(((), ()), 0)
    warm_up(lambda: parts.stepper.rehearse(batch), compile_layers(parts.drafter))
    with pytest.raises(CompileContract, match="compile again at another shape"), contract("another shape"):
        parts.stepper.rehearse(parts.builder.build(((),), 0))
