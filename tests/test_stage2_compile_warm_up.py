"""The warm-up over several ranks, and with torch's real caches: cold, warm, and with a cache that does not load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import together
from toy_run import config_of, environment
from toy_store import counting_texts, make_store

from stage2_train import compiled, launch_train
from stage2_train.compile_warm_up import compiled_regions
from stage2_train.data import stream
from stage2_train.distributed import Ranks
from stage2_train.step import Stepper
from stage2_train.train import fresh_state
from stage2_train.training_parts import set_up


def warmed(ranks: Ranks, store: Path, run_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Compile with flex_attention on this rank, then train two steps."""
    torch.nn.attention.flex_attention._validate_device = lambda q, k, v: None
    os.environ["LOCAL_RANK"] = str(ranks.rank)
    tempfile.tempdir = str(run_dir.parent)
    config = config_of(store, run_dir, compile_cache=run_dir.parent / "cache", nproc=ranks.world_size, **changes)
    parts = set_up(run_dir, launch_train.check(config), ranks, "here")
    engine = dataclasses.replace(parts.engine, attention="flex")
    parts = dataclasses.replace(
        parts,
        engine=engine,
        stepper=Stepper(parts.drafter, parts.optimizer, parts.stepper.gradient, engine, ranks, config),
    )
    before = compiled.graphs()
    started = ended = 0.0

    class Noted(compiled.Contract):
        def warm_up(self, once: Any) -> dict[str, Any]:
            nonlocal started, ended
            started = time.time()
            made = super().warm_up(once)
            ended = time.time()
            return made

    def declare(*given: Any) -> compiled.Contract:
        return Noted(compiled.declare(*given, backend="aot_eager").regions, kernels=False)

    told: list[tuple[str, float, float | None, float | None]] = []

    def report(
        phase: str, done: float, total: float | None, unit: str, inner: float | None = None, **numbers: Any
    ) -> None:
        told.append((phase, done, total, inner))

    state, batches = fresh_state(3), stream(parts.builder, parts.share, 0, 0)
    with compiled_regions(parts, declare, report) as contract:
        for _ in range(2):
            with contract.watch("a step"):
                parts.stepper.step(state, next(batches), 2)
        contract.check("the end")
    return {
        "graphs": compiled.graphs() - before,
        "started": started,
        "ended": ended,
        "loss": state["window"]["sums"]["loss"],
        "told": told,
    }


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_compile_in_order_or_all_at_once(tmp_path: Path, parallel: str) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(24))
    (tmp_path / "run").mkdir()
    one, two = together(tmp_path / "ranks", 2, warmed, store, tmp_path / "run", {"parallel": parallel})
    assert one["graphs"] == two["graphs"] == 3
    assert one["loss"] == two["loss"]
    for rank in (one, two):
        assert rank["told"][0] == ("compile", 0, 3, None)
        compiling = [told for told in rank["told"] if told[0] == "compile" and told[3] is not None]
        assert [told[3] for told in compiling] == sorted(told[3] for told in compiling)
        assert len({told[3] for told in compiling}) >= 3  # every graph renews the limit
        assert compiling[-1][1] >= 2
        assert rank["told"][-1] == ("warm-up", 1, 2, None)
    if parallel == "ddp":
        assert two["started"] >= one["ended"]
    else:
        assert two["started"] < one["ended"]
    entries = [path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]
    assert len(entries) == 1


LOSS_ALONE = """
    import json, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from toy_run import ALONE
    from shared.config import from_dict
    from manifests.commit import read
    from stage2_train import compiled, launch_train
    from stage2_train.chunk_loss import score
    from stage2_train.compile_warm_up import compiled_regions
    from stage2_train.config import TrainConfig
    from stage2_train.training_parts import set_up

    def declare(drafter, engine):
        engine.scorer.compile()
        return compiled.Contract([compiled.Region("loss", score.__code__, 1)])

    config = from_dict(TrainConfig, json.loads(sys.argv[1]))
    config.run_dir().mkdir()
    parts = set_up(config.run_dir(), launch_train.check(config), ALONE, "here")
    with compiled_regions(parts, declare):
        parts.stepper.rehearse(parts.builder.build(((),) * 4, 0))
"""


def compile_the_loss(tmp_path: Path, name: str) -> dict[str, Any]:
    """The loss compiled by inductor in a process of its own; its events by name."""
    from manifests.commit import read
    from shared.config import to_dict

    (tmp_path / "tmp").mkdir(exist_ok=True)
    config = config_of(tmp_path / "x.zarr", tmp_path / name, compile_cache=tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(LOSS_ALONE), json.dumps(to_dict(config))],
        env=environment() | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": f"tests{os.pathsep}."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        record["event"]: record["detail"] | {"message": record["message"]} for record in read(tmp_path / name, "events")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_start_is_warm_and_a_cache_that_does_not_load_is_compiled_anew(tmp_path: Path) -> None:
    make_store(tmp_path / "x.zarr", counting_texts(24))
    cold = compile_the_loss(tmp_path, "cold")["compiled"]
    assert cold["cache"] == "cold"
    assert cold["regions"]["loss"]["from_cache"] == 0
    entry = Path(cold["published"])
    warm = compile_the_loss(tmp_path, "warm")["compiled"]
    assert warm["cache"] == f"filled from {entry}"
    assert warm["regions"]["loss"] | {"seconds": 0} == {
        "graphs": 1,
        "declared": 1,
        "from_cache": 1,
        "backward_compiles": 0,
        "seconds": 0,
    }
    assert "published" not in warm
    assert warm["seconds"] < cold["seconds"]
    # Whoever could write here could also make the checksums right: what does not load must still not end the run.
    record = json.loads((entry / "entry.json").read_text())
    for name in record["files"]:
        if name.endswith((".py", ".so")):
            (entry / "files" / name).write_bytes(b"not what it was")
            record["files"][name] = [15, hashlib.sha256(b"not what it was").hexdigest()]
    (entry / "entry.json").write_text(json.dumps(record))
    events = compile_the_loss(tmp_path, "broken")
    assert events["compiled"]["cache"] == "cold"
    assert events["compiled"]["tried_again_after"]
    assert events["compiled"]["regions"]["loss"]["from_cache"] == 0
    assert "set aside: the warm-up failed with it" in events["compile cache"]["message"]
    assert not entry.exists()
    again = compile_the_loss(tmp_path, "again")["compiled"]
    assert again["regions"]["loss"]["from_cache"] == 1
    assert not list((tmp_path / "tmp").glob("dflash-compile-*/private/dflash-*"))
