"""What a run records about itself, and that recording does not slow it down."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from toy_run import ALONE, config_of, curve, run_here
from toy_store import counting_texts, make_store

from manifests.commit import read
from shared.errors import Interrupted
from stage2_train import launch_train
from stage2_train import train as train_module
from stage2_train.data import Prefetcher, stream
from stage2_train.device_feed import make_feed
from stage2_train.distributed import Ranks
from stage2_train.flops import step_flops
from stage2_train.metrics import Metrics, ceiling
from stage2_train.step import Stepper
from stage2_train.tensorboard import FOLDER
from stage2_train.train import fresh_state
from stage2_train.training_parts import Parts, set_up


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


def parts_of(store: Path, run_dir: Path, ranks: Ranks = ALONE, **changes: Any) -> Parts:
    torch.set_num_threads(1)
    config = config_of(store, run_dir, **changes)
    run = launch_train.check(config)
    run_dir.mkdir()
    return set_up(run_dir, run, ranks, "here")


def shown(run_dir: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, as TensorBoard shows a run."""
    reader = EventAccumulator(str(run_dir / FOLDER), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_every_number_is_in_the_manifest_and_in_tensorboard(store: Path, tmp_path: Path) -> None:
    run_here(config_of(store, tmp_path / "run"))
    found = shown(tmp_path / "run")
    assert {
        "train/loss",
        "train/acceptance_slot_01",
        "train/anchor_coverage",
        "train/grad_norm",
        "heldout/acceptance_length_estimate",
        "speed/tokens_per_second",
        "speed/tflops",
        "speed/share_of_ceiling",
        "speed/data_wait",
        "speed/step_seconds",
        "memory/peak_bytes",
    } <= set(found)
    recorded = {(record["split"], record["name"]) for record in read(tmp_path / "run", "metrics")}
    assert {f"{split}/{name}" for split, name in recorded} == set(found)
    for split, name in recorded:
        assert found[f"{split}/{name}"] == pytest.approx(curve(tmp_path / "run", name, split), rel=1e-6), name
    assert sorted(found["speed/data_wait"]) == list(range(1, 11))
    assert all(0 <= value <= 1 for value in found["speed/data_wait"].values())
    (top,) = [r["detail"]["tflops"] for r in read(tmp_path / "run", "events") if r["event"] == "ceiling"]
    for step, share in found["speed/share_of_ceiling"].items():
        assert share == pytest.approx(found["speed/tflops"][step] / top, rel=1e-5)
        assert 0 < share < 1


def test_a_resumed_run_shows_the_curve_of_a_straight_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(config_of(store, tmp_path / "straight"))
    config = config_of(store, tmp_path / "cut")
    asked = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(asked) >= 6)
        with pytest.raises(Interrupted):
            run_here(config)
    (tmp_path / "cut" / "checkpoints" / "step-00000006" / "drafter.safetensors").write_bytes(b"cut")
    run_here(dataclasses.replace(config, prefetch=1))  # from step 4: 5 and 6 are trained, and shown, again
    assert len(list((tmp_path / "cut" / FOLDER).iterdir())) == 2
    one, two = shown(tmp_path / "straight"), shown(tmp_path / "cut")
    assert set(one) == set(two)
    for tag in one:
        if tag.split("/")[0] in ("train", "heldout") and "seconds" not in tag:
            assert one[tag] == two[tag], tag
        assert sorted(one[tag]) == sorted(two[tag])


def test_without_tensorboard_there_is_no_folder(store: Path, tmp_path: Path) -> None:
    run_here(config_of(store, tmp_path / "run", steps=1, tensorboard=False))
    assert not (tmp_path / "run" / FOLDER).exists()
    assert curve(tmp_path / "run", "tokens_per_second", "speed")


def test_the_speed_is_of_training_alone(store: Path, tmp_path: Path) -> None:
    parts = parts_of(store, tmp_path / "run")
    state = fresh_state(parts.engine.objective.drafts) | {"tokens": 10**9, "global_step": 70}  # as after a resume
    feed = make_feed(Prefetcher(stream(parts.builder, parts.share, 0, 0)), ALONE.device)
    metrics = Metrics(parts, state)
    time.sleep(0.2)  # compiling
    began = time.perf_counter()
    metrics.start(state, feed)
    work = 0.0
    for _ in range(2):
        rows = next(feed)
        metrics.add(rows.parts)
        work += sum(step_flops(parts.drafter.config, batch, 3) for batch in rows.parts)
    with metrics.outside():
        left = time.perf_counter()
        time.sleep(0.5)
        outside = time.perf_counter() - left
    time.sleep(0.1)
    state |= {"tokens": 10**9 + 100, "global_step": 72}
    metrics.log(state, feed)
    whole = time.perf_counter() - began
    feed.close()
    metrics.close()
    speed = {record["name"]: record["value"] for record in read(tmp_path / "run", "metrics")}
    seconds = 2 * speed["step_seconds"]
    assert 0.1 <= seconds <= whole - outside
    assert speed["tokens_per_second"] * seconds == pytest.approx(100)
    assert speed["tflops"] * seconds * 1e12 == pytest.approx(work)


def test_a_slow_disk_shows_as_data_wait(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(store, tmp_path / "run", steps=4, eval_every=100)
    parts = dataclasses.replace(parts, heldout=None)  # during an estimate at step 0 the first batches would be read
    build = parts.builder.build

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.5)  # far longer than a step, also on a busy machine
        return build(*arguments, **named)

    monkeypatch.setattr(parts.builder, "build", slow)
    train_module.train(parts)
    waits = curve(tmp_path / "run", "data_wait", "speed")
    assert min(waits.values()) > 0.5


def test_measuring_the_ceiling_draws_nothing_from_the_runs_random_numbers() -> None:
    before = torch.random.get_rng_state()
    assert ceiling(torch.device("cpu")) > 1e-3
    assert torch.equal(before, torch.random.get_rng_state())


class _NoWaiting(TorchDispatchMode):
    """Counts reads of single numbers, each of which would wait for a GPU.

    Not of integers: the attention of the CPU path alone looks into the layout to skip what nothing sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_a_step_reads_from_the_device_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(store, tmp_path / "run", micro_rows=2)
    state, batches = fresh_state(parts.engine.objective.drafts), stream(parts.builder, parts.share, 0, 0)
    copies: list[int] = []
    mode = _NoWaiting()
    original = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(mode.reads)
        return original(tensor)

    rows = [next(batches) for _ in range(3)]
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    for number, step in enumerate(rows, start=1):
        mode.reads = 0
        with mode:
            parts.stepper.step(state, step, 10)
        assert copies == [0] * number  # one copy to the CPU, and no number read before it


class _Watched(Stepper):
    """The given stepper; `waits` holds for each step what torch says of operations that wait for the GPU."""

    def __init__(self, stepper: Stepper) -> None:
        self.__dict__ = stepper.__dict__
        self.waits: list[list[str]] = []

    def step(self, *arguments: Any) -> bool:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                return super().step(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self.waits.append([str(item.message) for item in said if "synchroniz" in str(item.message)])


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_step_waits_for_the_gpu_once(store: Path, tmp_path: Path) -> None:
    shape = {"max_length": 200, "anchors": 24, "block_size": 8, "head_dim": 64, "device": "cuda", "micro_rows": 2}
    parts = parts_of(store, tmp_path / "run", Ranks(0, 1, torch.device("cuda", 0)), **shape)
    watched = _Watched(parts.stepper)
    torch._dynamo.reset()
    try:
        train_module.train(dataclasses.replace(parts, stepper=watched))
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
    assert len(watched.waits) == 10
    for waits in watched.waits[3:]:  # the first steps also allocate
        assert len(waits) == 1, waits
