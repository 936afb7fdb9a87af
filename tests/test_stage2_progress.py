"""What training says of itself while it runs: every phase, and in each something that moves."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from told import keep_beats, phases_of
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

from shared import early_writeback
from shared.errors import Interrupted
from shared.reporter import Ticks
from shared.tensors import read_state, read_tensors, write_state, write_tensors
from stage2_train import launch_train
from stage2_train import train as train_module
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info
from stage2_train.data import Prefetcher, stream
from stage2_train.flops import step_flops


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


def test_a_run_goes_through_its_phases(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = keep_beats(monkeypatch)
    run_here(config_of(store, tmp_path / "run"))
    assert phases_of(beats) == [
        *("load", "eval", "step", "eval", "checkpoint", "step", "eval", "checkpoint", "step", "eval", "checkpoint"),
        *("drain", "done"),
    ]
    steps = [beat.done for beat in beats if beat.phase == "step" and beat.inner is None]
    assert steps[0] == 0
    assert sorted(set(steps)) == [float(step) for step in range(10)]
    assert beats[-1].done == beats[-1].total == 10
    assert beats[-1].numbers["loss"] > 0


def test_what_is_saved_is_reported_after_its_record(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = keep_beats(monkeypatch)
    run_here(config_of(store, tmp_path / "run"))
    saved = [beat.saved for beat in beats]
    assert [saved[0], *dict.fromkeys(saved)] == [None, None, 4, 8, 10]
    first = next(beat for beat in beats if beat.saved == 4)
    assert (first.phase, first.done) == ("checkpoint", 4)


def test_an_estimate_counts_its_documents_and_a_checkpoint_its_bytes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ticks, "every_s", float("inf"))
    beats = keep_beats(monkeypatch)
    parts = run_here(config_of(store, tmp_path / "run", batch_rows=1))
    first = [beat.inner for beat in beats if beat.phase == "eval" and beat.done == 0]
    assert first[0] is None
    counted = [int(inner) for inner in first if inner is not None]
    assert counted == sorted(set(counted))
    assert len(counted) > 1
    assert counted[-1] == len(parts.heldout.documents)
    sizes = read_info(folder_of(tmp_path / "run", 4))["files"]
    written = [beat.inner for beat in beats if beat.phase == "checkpoint" and beat.done == 4]
    assert sizes["drafter.safetensors"] in written


def test_a_step_and_a_pass_that_take_long_are_no_silence(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2's drafter takes minutes for either on two cores, and a step may be silent for one minute."""
    monkeypatch.setattr(Ticks, "every_s", 0.0)
    beats = keep_beats(monkeypatch)

    def ticks(name: str) -> tuple[int, int]:
        """Of a step, and of an estimate."""
        beats.clear()
        run_here(config_of(store, tmp_path / name, batch_rows=2, micro_rows=1, optimizer="muon", steps=2))
        places = (("step", 1.0), ("eval", 0.0))
        counts = [len({beat.inner for beat in beats if (beat.phase, beat.done) == place}) for place in places]
        return counts[0], counts[1]

    step, estimate = ticks("fast")
    assert step >= 2 * 2  # of two micro-batches: its beginning, a chunk of the head
    assert estimate >= 2  # documents read, chunks
    monkeypatch.setattr("stage2_train.metrics.ceiling", lambda *_: 1e-9)
    slow_step, slow_estimate = ticks("slow")
    assert slow_step > step + 500  # every operation: of layers there and back, and of Muon
    assert slow_estimate > estimate + 100


def test_a_slow_run_says_from_the_start_what_a_step_takes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = keep_beats(monkeypatch)
    parts = run_here(config_of(store, tmp_path / "fast", log_every=3))
    assert all("s/step at least" not in beat.numbers for beat in beats)
    beats.clear()
    monkeypatch.setattr("stage2_train.metrics.ceiling", lambda *_: 1e-6)
    run_here(config_of(store, tmp_path / "slow", log_every=3))
    batches = stream(parts.builder, parts.share, 0, 0)
    work = sum(
        step_flops(parts.drafter.config, batch, len(parts.engine.objective.distances)) for batch in next(batches).parts
    )
    before = [beat.numbers for beat in beats if beat.phase in ("eval", "step") and beat.done == 0]
    said = [numbers["s/step at least"] for numbers in before if numbers]
    assert said
    # What a mask lets through is not known beforehand: 16 % of so small a step.
    assert said == [pytest.approx(work / 1e6, rel=0.2)] * len(said)
    after = [beat.numbers for beat in beats if beat.phase == "step" and beat.done > 3]
    assert after
    assert all("s/step at least" not in numbers and "loss" in numbers for numbers in after)


def test_a_resumed_run_counts_the_bytes_it_loads(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(store, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "stop_requested", lambda: (tmp_path / "run" / "checkpoints").exists())
        with pytest.raises(Interrupted):
            run_here(config)
    beats = keep_beats(monkeypatch)
    run = launch_train.check(config)
    launch_train.open_run(config.run_dir(), run, config)
    newest, _ = newest_complete(config.run_dir())
    assert newest is not None
    train_module.main(config.run_dir(), 0, 1)
    assert phases_of(beats)[:3] == ["rendezvous", "load", "step"]
    head = (store / "target" / "head.safetensors").stat().st_size
    saved = sum(read_info(newest)["files"].values())
    loads = [(beat.done, beat.total) for beat in beats if beat.phase == "load" and beat.total]
    assert list(dict.fromkeys(loads)) == [(0, head + saved), (head, head + saved), (head + saved, head + saved)]
    assert next(beat.saved for beat in beats if beat.saved is not None) == read_info(newest)["global_step"]
    assert beats[-1].saved == 10


def test_a_loop_that_waits_for_data_says_what_was_read() -> None:
    waits = 0
    waited_twice = threading.Event()

    def waiting() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            waited_twice.set()

    def slow() -> object:
        assert waited_twice.wait(60)
        return 1

    began = time.monotonic()
    reading: Prefetcher[object] = Prefetcher((slow() for _ in range(2)), 1, waiting)
    assert next(reading) == 1
    seconds = time.monotonic() - began
    reading.close()
    assert 2 <= waits <= seconds / 0.1, "ten times a second"


def test_a_large_state_is_told_piece_by_piece(tmp_path: Path) -> None:
    told: list[int] = []
    state = {str(i): torch.full((10 << 20,), float(i)) for i in range(5)}
    write_state(tmp_path / "state.pt", state, told.append)
    size = (tmp_path / "state.pt").stat().st_size
    assert 2 * (64 << 20) <= sum(told[:2]) < size  # two pieces while it is written, then all as it is on the disk
    assert told[2:] == [64 << 20] * 3 + [size - 3 * (64 << 20)]
    told.clear()
    found = read_state(tmp_path / "state.pt", "", told.append)
    assert max(told) <= 64 << 20
    assert sum(told) >= 5 * (40 << 20)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_weights_are_told_when_they_are_on_the_disk_and_when_they_are_read(tmp_path: Path) -> None:
    told: list[int] = []
    tensors = {str(i): torch.full((10 << 20,), float(i)) for i in range(5)}
    write_tensors(tmp_path / "t.safetensors", tensors, told=told.append)
    size = (tmp_path / "t.safetensors").stat().st_size
    assert told == [64 << 20] * 3 + [size - 3 * (64 << 20)]
    told.clear()
    found = read_tensors(tmp_path / "t.safetensors", "", told.append)
    assert sum(told) == size
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EOPNOTSUPP])
def test_what_the_disk_says_of_a_piece_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The kernel says it to who waits first, and no fsync repeats it; a file system that cannot is fsynced whole."""

    def refuse(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(early_writeback, "_system_call", lambda: refuse)
    (tmp_path / "file").write_bytes(bytes(65 << 20))
    told: list[int] = []
    with (tmp_path / "file").open("rb") as file:
        if number in (errno.EIO, errno.ENOSPC):
            with pytest.raises(OSError, match=os.strerror(number)):
                early_writeback.make_durable(file.fileno(), told.append)
        else:
            early_writeback.make_durable(file.fileno(), told.append)
    assert told == ([] if number in (errno.EIO, errno.ENOSPC) else [65 << 20])
