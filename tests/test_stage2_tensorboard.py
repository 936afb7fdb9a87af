"""Event files as TensorBoard's own reader sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared.errors import PathNotWritable
from stage2_train.tensorboard import FOLDER, EventFile


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str, int], EventFile]]:
    """Open event files of one run; they are closed when the test ends."""
    files: list[EventFile] = []

    def open_file(run_id: str, first_step: int) -> EventFile:
        files.append(EventFile(tmp_path, run_id, first_step))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


Opener = Callable[[str, int], EventFile]


def read(run_dir: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, of all event files of a run together."""
    reader = EventAccumulator(str(run_dir / FOLDER), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_every_scalar_is_read_back(tmp_path: Path, opened: Opener) -> None:
    file = opened("one", 0)
    for step in (0, 1, 10, 300, 2**40):
        file.scalars(step, {"train/loss": 1.5 / (step + 1), "train/acceptance_slot_01": 0.25})
    file.scalars(10, {"heldout/nll": 4.0})
    found = read(tmp_path)
    assert sorted(found) == ["heldout/nll", "train/acceptance_slot_01", "train/loss"]
    assert found["train/loss"] == pytest.approx({step: 1.5 / (step + 1) for step in (0, 1, 10, 300, 2**40)}, rel=1e-6)
    assert found["heldout/nll"] == {10: 4.0}


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path, opened: Opener) -> None:
    first = opened("first", 0)
    for step in range(1, 31):
        first.scalars(step, {"train/loss": 100.0 + step, "speed/data_wait": 0.5})
    again = opened("again", 21)  # from the checkpoint of step 20
    again.scalars(25, {"train/loss": 7.0})
    found = read(tmp_path)
    assert found["train/loss"] == {**{step: 100.0 + step for step in range(1, 21)}, 25: 7.0}
    assert max(found["speed/data_wait"]) == 20
    opened("anew", 0).scalars(1, {"train/loss": 9.0})
    found = read(tmp_path)
    assert (found["train/loss"], found["speed/data_wait"]) == ({1: 9.0}, {})


def test_what_a_kill_cut_short_is_passed_over(tmp_path: Path, opened: Opener) -> None:
    killed = opened("killed", 0)
    for step in (1, 2, 3):
        killed.scalars(step, {"train/loss": float(step)})
    killed.path.write_bytes(killed.path.read_bytes()[:-9])
    opened("next", 3).scalars(3, {"train/loss": 30.0})
    assert read(tmp_path)["train/loss"] == {1: 1.0, 2: 2.0, 3: 30.0}


@pytest.mark.parametrize("value", [0.0, -1.5e-38, 3e38, 1e300, -1e300, math.inf, math.nan])
def test_every_float_is_written(tmp_path: Path, opened: Opener, value: float) -> None:
    opened("x", 0).scalars(1, {"train/é": value})
    found = read(tmp_path)["train/é"][1]
    assert found == pytest.approx(math.copysign(math.inf, value) if abs(value) > 3.5e38 else value, nan_ok=True)


def test_a_folder_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(PathNotWritable, match=FOLDER):
        EventFile(tmp_path / "run", "x", 0)
