"""The compile contract and the GPU path, on a real GPU (pytest -m gpu)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import config_of, curve, environment
from toy_store import counting_texts, make_store

from manifests.commit import read
from shared.config import to_dict
from shared.errors import CompileContract
from stage2_train import launch_train
from stage2_train.compile_warm_up import compiled_regions
from stage2_train.compiled import graphs
from stage2_train.config import TrainConfig
from stage2_train.distributed import Ranks
from stage2_train.objective import block_states, move
from stage2_train.train import train
from stage2_train.training_parts import set_up

SHAPE: dict[str, Any] = {"max_length": 200, "anchors": 24, "block_size": 8, "head_dim": 64, "device": "cuda"}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("fresh_compiler")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def on_gpu(config: TrainConfig) -> Any:
    run = launch_train.check(config)
    config.run_dir().mkdir(exist_ok=True)
    launch_train.open_run(config.run_dir(), run, config)
    return set_up(config.run_dir(), run, Ranks(0, 1, torch.device("cuda", 0)), "here")


def events_of(run: Path) -> dict[str, Any]:
    return {record["event"]: record["detail"] for record in read(run, "events")}


@pytest.mark.parametrize(
    "changes",
    [{}, SLIDING, {"activation_checkpointing": True}],
    ids=["full", "sliding and full", "recomputed"],
)
def test_every_region_compiles_once_over_many_steps_and_estimates(
    store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    before = graphs()
    train(on_gpu(config_of(store, tmp_path / "run", **{**SHAPE, "steps": 40, **changes})))
    kinds = 2 if "layer_types" in changes else 1
    assert graphs() - before == 2 * kinds + 1
    events = events_of(tmp_path / "run")
    assert events["engine"]["attention"] == "flex"
    found = {name: (made["graphs"], made["backward_compiles"]) for name, made in events["compiled"]["regions"].items()}
    assert found == {"decoder layer": (kinds, kinds), "mask builder": (kinds, 0), "loss": (1, 0)}
    losses = curve(tmp_path / "run")
    assert losses[40] < losses[1]


def test_flex_in_bf16_follows_the_curve_of_sdpa_in_float32(store: Path, tmp_path: Path) -> None:
    train(on_gpu(config_of(store, tmp_path / "sdpa", **SHAPE, steps=20, attention="sdpa", dtype="float32")))
    assert set(events_of(tmp_path / "sdpa")["compiled"]["regions"]) == {"loss"}
    train(on_gpu(config_of(store, tmp_path / "flex", **SHAPE, steps=20)))
    exact, half = curve(tmp_path / "sdpa"), curve(tmp_path / "flex")
    assert half[1] == pytest.approx(exact[1], rel=1e-2)
    assert half[20] == pytest.approx(exact[20], rel=5e-2)


def test_what_would_compile_after_the_seal_is_a_named_error(store: Path, tmp_path: Path) -> None:
    parts = on_gpu(config_of(store, tmp_path / "run", **SHAPE))
    placed = move(parts.builder.build(((),) * 4, 0), 39, parts.engine)
    with compiled_regions(parts) as contract:
        said = "mask builder would compile again at another shape, after 4 rows of 200 tokens and 24 blocks of 8"
        with pytest.raises(CompileContract, match=said), contract.watch("another shape"):
            parts.stepper.rehearse(parts.builder.build(((),), 0))
        with pytest.raises(CompileContract, match="grad_mode"), contract.watch("no grad"), torch.no_grad():
            block_states(parts.drafter, placed, parts.engine)
        torch.compiler.set_stance("force_eager")
        with pytest.raises(CompileContract, match=r"without its kernel|dense math"), contract.watch("eager"):
            block_states(parts.drafter, placed, parts.engine)
        contract.check("the end")


ONE_START = """
    import json, sys
    import torch
    from shared.config import from_dict
    from stage2_train import launch_train
    from stage2_train.config import TrainConfig
    from stage2_train.distributed import Ranks
    from stage2_train.train import train
    from stage2_train.training_parts import set_up

    config = from_dict(TrainConfig, json.loads(sys.argv[1]))
    config.run_dir().mkdir()
    run = launch_train.check(config)
    launch_train.open_run(config.run_dir(), run, config)
    train(set_up(config.run_dir(), run, Ranks(0, 1, torch.device("cuda", 0)), "here"))
"""


def start(store: Path, tmp_path: Path, name: str) -> dict[str, Any]:
    config = config_of(store, tmp_path / name, compile_cache=tmp_path / "cache", **{**SHAPE, **SLIDING, "steps": 8})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ONE_START), json.dumps(to_dict(config))],
        env=environment() | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = events_of(tmp_path / name)["compiled"]
    return found


def test_a_second_start_loads_all_graphs_and_trains_the_same(store: Path, tmp_path: Path) -> None:
    cold, warm = start(store, tmp_path, "cold"), start(store, tmp_path, "warm")
    assert cold["cache"] == "cold"
    assert warm["cache"] == f"filled from {cold['published']}"
    assert {name: (made["graphs"], made["from_cache"]) for name, made in warm["regions"].items()} == {
        "decoder layer": (2, 2),
        "mask builder": (2, 2),
        "loss": (1, 1),
    }
    assert warm["seconds"] < 0.5 * cold["seconds"]
    assert curve(tmp_path / "warm") == pytest.approx(curve(tmp_path / "cold"), rel=1e-3)
    # The published folder must not name the folder of the process that made it.
    entry = Path(cold["published"])
    for path in entry.rglob("__grp__*"):
        assert b"@DFLASH_COMPILE_FOLDER@" in path.read_bytes()
    (entry / "entry.json").write_text("{")
    broken = start(store, tmp_path, "broken")
    assert broken["cache"] == "cold"
    assert "compile cache" in events_of(tmp_path / "broken")
