"""The same numbers however a run is cut up: over passes, processes, and interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from supervised import events, until
from toy_run import command, config_of, curve, environment, run_command, run_here
from toy_store import counting_texts, make_store

from manifests.commit import latest, read
from shared.beat import read_beat
from shared.ending import ending_path
from shared.errors import CheckpointMismatch, ConfigRefused, Interrupted
from shared.reporter import progress_path
from stage2_train import train as train_module
from stage2_train.checkpoint_folder import folder_of, newest_complete
from stage2_train.config import TrainConfig


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


def same_weights(one: Path, two: Path) -> None:
    first, second = load_file(one / "drafter.safetensors"), load_file(two / "drafter.safetensors")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    states = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in (one, two)]
    for key, values in states[0].items():
        for name, value in values.items():
            assert torch.equal(value, states[1][key][name]), (key, name)


def test_accumulation_is_exact_for_ragged_batches(store: Path, tmp_path: Path) -> None:
    """24 short documents make a last batch with empty rows; 1, 2 or 4 rows a pass must give one curve."""
    curves = []
    for rows in (None, 2, 1):
        run_here(config_of(store, tmp_path / str(rows), micro_rows=rows))
        curves.append(curve(tmp_path / str(rows)))
    for step, value in curves[0].items():
        assert curves[1][step] == pytest.approx(value, rel=1e-5)
        assert curves[2][step] == pytest.approx(value, rel=1e-5)


# torchrun is in two nodes of test_stage2_parallel.py, too.
@pytest.mark.parametrize(
    "torchrun",
    [pytest.param(False, id="own launcher"), pytest.param(True, marks=pytest.mark.slow, id="torchrun")],
)
def test_two_processes_equal_one(store: Path, tmp_path: Path, torchrun: bool) -> None:
    config = config_of(store, tmp_path / "two")
    run_here(config_of(store, tmp_path / "one"))
    line = [*command(config), "--nproc=2"]
    if torchrun:
        line = [
            line[0],
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "--",
            *command(config)[2:],
        ]
    done = run_command(line)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing is restarted, a hang is not noticed") == torchrun
    for rank in range(2):
        require_signs(tmp_path / "two", rank)
    for name, split in (
        ("loss", "train"),
        ("grad_norm", "train"),
        ("tokens_per_block", "train"),
        ("nll", "heldout"),
        ("acceptance_length_estimate", "heldout"),
    ):
        alone, together = (curve(tmp_path / folder, name, split) for folder in ("one", "two"))
        assert alone, name
        assert alone.keys() == together.keys()
        assert together == pytest.approx(alone, rel=1e-5)
    again = run_command([*command(config), "--nproc=2"])
    assert again.returncode == 0, again.stderr
    assert "already finished: 10 steps" in again.stdout


def require_signs(run_dir: Path, rank: int) -> None:
    """Whoever started it, a process leaves its ending, its last heartbeat and a file for its stacks."""
    ending = json.loads(ending_path(run_dir, "train", rank).read_text())
    assert (ending["code"], ending["rank"], ending["phase"]) == (0, rank, "done")
    beat = read_beat(progress_path(run_dir, "train", rank))
    assert beat is not None
    assert (beat.done, beat.total, beat.saved, beat.pid) == (10, 10, 10 if rank == 0 else 8, ending["pid"])
    assert beat.alive_count > 0
    assert (run_dir / "logs" / f"train-{rank}.fault").exists()


@pytest.mark.parametrize("stop_at", [1, 5, 8])
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    run_here(config_of(store, tmp_path / "straight", log_every=3))
    cut = config_of(store, tmp_path / "cut", log_every=3)
    asked = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(asked) >= stop_at)
        with pytest.raises(Interrupted, match=f"at step {stop_at} of 10"):
            run_here(cut)
    found, _ = newest_complete(tmp_path / "cut")
    assert found == folder_of(tmp_path / "cut", stop_at)
    run_here(cut)
    same_weights(folder_of(tmp_path / "straight", 10), folder_of(tmp_path / "cut", 10))
    for name, split in (("loss", "train"), ("grad_norm", "train"), ("accuracy_slot_01", "train"), ("nll", "heldout")):
        assert curve(tmp_path / "cut", name, split) == curve(tmp_path / "straight", name, split)


def test_a_long_step_is_given_up_for_a_stop(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of SmolLM2's drafter took 300 s on two cores: `dflash stop`, which waits 120 s, ended in a kill."""
    changes: dict[str, Any] = {"batch_rows": 4, "micro_rows": 1, "log_every": 3}
    run_here(config_of(store, tmp_path / "straight", **changes))
    cut = config_of(store, tmp_path / "cut", **changes)
    asked = iter(range(1000))
    before_step_7 = 1 + 6 * 4  # at the start, and in each step before three micro-batches and once late
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(asked) > before_step_7)
        with pytest.raises(Interrupted, match="at step 6 of 10, checkpoint saved"):
            run_here(cut)
    assert next(asked) == before_step_7 + 2  # between its second and third micro-batch
    run_here(cut)
    same_weights(folder_of(tmp_path / "straight", 10), folder_of(tmp_path / "cut", 10))
    for name, split in (("loss", "train"), ("anchor_coverage", "train"), ("nll", "heldout")):
        assert curve(tmp_path / "cut", name, split) == curve(tmp_path / "straight", name, split)


@pytest.mark.parametrize("step", [0, 4])
def test_an_estimate_is_given_up_for_a_stop_and_made_by_the_next_start(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    config = config_of(store, tmp_path / "run", eval_every=4, save_every=100)
    with monkeypatch.context() as patch:
        patch.setattr("stage2_train.estimate.stop_requested", lambda: step == 0 or bool(curve(tmp_path / "run")))
        with pytest.raises(Interrupted, match=f"at step {step} of 10"):
            run_here(config)
    assert sorted(curve(tmp_path / "run", "nll", "heldout")) == [at for at in (0, 4) if at < step]
    assert (newest_complete(tmp_path / "run")[0] is not None) == (step > 0)
    run_here(config)
    assert sorted(curve(tmp_path / "run", "nll", "heldout")) == [0, 4, 8, 10]


@pytest.mark.parametrize("stop_at", [None, 2], ids=str)
def test_the_best_checkpoint_is_kept_when_a_stop_falls_on_its_estimate(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None
) -> None:
    """The stop saves step 2 without an estimate; the next start makes it, and the checkpoint must get its score."""
    config = config_of(store, tmp_path / "run", steps=5, save_every=1, eval_every=1, keep=1)
    worth = {0: 1.0, 1: 1.5, 2: 3.0, 3: 2.0, 4: 1.9, 5: 1.8}
    monkeypatch.setattr(train_module, "estimate", lambda *_, step, **_more: {"acceptance_length_estimate": worth[step]})
    if stop_at is not None:
        asked = iter(range(1000))
        with monkeypatch.context() as patch:
            patch.setattr(train_module, "stop_requested", lambda: next(asked) >= stop_at)
            with pytest.raises(Interrupted, match="at step 2 of 5"):
                run_here(config)
    run_here(config)
    assert [folder_of(tmp_path / "run", step).name for step in (2, 5)] == sorted(
        entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()
    )
    newest = latest(read(tmp_path / "run", "checkpoints"), "path")
    assert {r["global_step"]: r["acceptance_length_estimate"] for r in newest.values()} == {
        step: worth[step] for step in range(1, 6)
    }


@pytest.mark.crash
def test_sigterm_saves_and_the_same_command_goes_on(store: Path, tmp_path: Path) -> None:
    config = config_of(store, tmp_path / "run")
    more = ("--steps=3000", "--save-every=5000", "--eval-every=5000", "--log-every=5")
    process = subprocess.Popen(
        command(config, *more), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and len(curve(tmp_path / "run")) < 3:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=90)
    assert process.returncode == Interrupted.exit_code, said
    assert "checkpoint saved" in said
    folder, _ = newest_complete(tmp_path / "run")
    assert folder is not None
    step = int(folder.name.removeprefix("step-"))
    assert step >= 10
    resumed = subprocess.Popen(
        command(config, *more), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while time.monotonic() < deadline + 90 and max(curve(tmp_path / "run")) < step + 10:
        time.sleep(0.1)
    resumed.send_signal(signal.SIGTERM)
    _, said = resumed.communicate(timeout=90)
    assert resumed.returncode == Interrupted.exit_code
    assert f"continuing {folder}" in said


@pytest.mark.crash
def test_a_killed_worker_is_started_again_and_nothing_is_lost_or_repeated(store: Path, tmp_path: Path) -> None:
    changes = {"steps": 60, "save_every": 5, "eval_every": 1000}
    run_here(config_of(store, tmp_path / "straight", **changes))
    config = config_of(store, tmp_path / "run")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    process = subprocess.Popen(command(config, *options), env=environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: len(curve(tmp_path / "run")) >= 7, 120)
    (spawned,) = events(tmp_path / "run", "worker spawned")
    os.kill(spawned["detail"]["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert "attempt 2 of all workers begins" in said
    (resumed,) = events(tmp_path / "run", "resumed")
    assert resumed["detail"]["global_step"] >= 5
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    same_weights(folder_of(tmp_path / "straight", 60), folder_of(tmp_path / "run", 60))


def stop_at_step_6(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it until somebody asks it to stop: it saves that step."""
    asked = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: next(asked) >= 6)
        with pytest.raises(Interrupted):
            run_here(config)


def test_a_broken_checkpoint_is_named_and_the_older_one_used(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(store, tmp_path / "run", save_every=2)
    stop_at_step_6(config, monkeypatch)
    (folder_of(tmp_path / "run", 6) / "drafter.safetensors").write_bytes(b"cut")
    run_here(config)
    said = capsys.readouterr().err
    assert "step-00000006: damaged" in said
    assert "continuing" in said
    assert "step-00000004" in said
    run_here(config_of(store, tmp_path / "straight", save_every=2))
    same_weights(folder_of(tmp_path / "straight", 10), folder_of(tmp_path / "run", 10))


def test_a_worker_never_begins_anew_what_its_command_goes_on_with(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint went away between the command's look and the worker's: the folder was moved, its disk left."""
    config = config_of(store, tmp_path / "run", save_every=2)
    stop_at_step_6(config, monkeypatch)
    monkeypatch.setattr(train_module, "newest_complete", lambda _: (None, []))
    with pytest.raises(CheckpointMismatch, match="held a checkpoint of step 6 when this run was started"):
        run_here(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 8}, "block_size = 4, this command asks 8"),
        ({"seed": 3}, "seed = 0, this command asks 3"),
        ({"alpha": 0.4}, "alpha = 0.5, this command asks 0.4"),
        ({"batch_rows": 2}, "batch_rows"),
        ({"steps": 12}, "total_steps|steps"),
        ({"mask_token_id": 38}, "mask_token_id = 39, this command asks 38"),
        ({"learning_rate": 1e-3}, "learning_rate"),
    ],
)
def test_a_run_goes_on_only_under_its_own_settings(
    store: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run_here(config_of(store, tmp_path / "run", steps=2))
    with pytest.raises(CheckpointMismatch, match=said):
        run_here(config_of(store, tmp_path / "run", **{"steps": 2, **changes}))
    with pytest.raises(ConfigRefused, match="--no-resume"):
        run_here(config_of(store, tmp_path / "run", steps=2, resume=False))
