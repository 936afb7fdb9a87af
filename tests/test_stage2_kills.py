"""kill -9 at every kind of moment of a save: the same command goes on from the newest complete checkpoint."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from fault_calls import Calls, Kill, read_log
from safetensors.torch import load_file
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

from manifests.commit import read
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info
from stage2_train.config import TrainConfig

STEPS, VICTIM = 3, 2
POINTS = 20


def train_until(config: TrainConfig, log: Path, kill: Kill | None) -> None:
    """A run that sees its own file calls, and dies at one."""
    torch.set_num_threads(1)
    Calls(config.run_dir(), log, kill, contents=False).install()
    run_here(config)


def in_a_process(config: TrainConfig, log: Path, kill: Kill | None) -> int:
    """The exit code of `train_until` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stage2_train.launch_train", "stage2_train.train", "torch._dynamo"])
    process = context.Process(target=train_until, args=(config, log, kill))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def points_of_a_save(log: Path) -> list[Kill]:
    """Every kind of file call of the second save, in order: before it, after it, and inside if it writes."""
    seen: Counter[str] = Counter()
    points: list[Kill] = []
    events = list(read_log(log))
    begins, ends = (
        next(i for i, event in enumerate(events) if f"step-{step:08d}" in event.path) for step in (VICTIM, VICTIM + 1)
    )
    for number, event in enumerate(events[:ends]):
        seen[event.label] += 1
        known = any(point.label == event.label for point in points)  # the 27 writes of one file are one kind
        if number < begins or known or "checkpoints" not in event.path or event.kind in ("create", "open", "gone"):
            continue
        whens = ("before", "middle", "after") if event.kind == "write" else ("before", "after")
        points += [Kill(label=event.label, occurrence=seen[event.label], when=when) for when in whens]
    return points


@pytest.mark.crash
def test_a_run_goes_on_from_the_newest_complete_checkpoint_wherever_its_save_was_killed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "toy.zarr", counting_texts(12))

    def config(name: str) -> TrainConfig:
        changes = {"steps": STEPS, "save_every": 1, "keep": 1, "eval_every": 1000, "tensorboard": False}
        return config_of(store, tmp_path / name, num_layers=1, **changes)

    assert in_a_process(config("whole"), tmp_path / "whole.log", None) == 0
    whole = load_file(folder_of(tmp_path / "whole", STEPS) / "drafter.safetensors")
    points = points_of_a_save(tmp_path / "whole.log")
    chosen = [points[round(i * (len(points) - 1) / (POINTS - 1))] for i in range(POINTS)]
    assert len(set(chosen)) == POINTS >= 20
    reached: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    for number, point in enumerate(chosen):
        run = tmp_path / str(number)
        assert in_a_process(config(run.name), tmp_path / f"{number}.log", point) == -signal.SIGKILL, point
        found, ignored = newest_complete(run)
        assert found is not None, point
        reached[read_info(found)["global_step"]] += 1
        kinds[point.label.split()[0]] += 1
        run_here(config(run.name))
        events = read(run, "events")
        resumed = [record["message"] for record in events if record["event"] == "resumed"]
        assert resumed == [f"from {found.name}"], point
        said = {record["message"] for record in events if record["event"] == "checkpoint ignored"}
        assert said == {f"{item.path.name}: {item.reason}" for item in ignored}, point
        again = load_file(folder_of(run, STEPS) / "drafter.safetensors")
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items()), point
        left = sorted(entry.name for entry in (run / "checkpoints").iterdir())
        assert left == [f"step-{STEPS:08d}"], point  # nothing of the killed save takes room
    assert set(reached) == {VICTIM - 1, VICTIM}
    assert {"write", "fsync", "rename", "unlink"} <= set(kinds)
