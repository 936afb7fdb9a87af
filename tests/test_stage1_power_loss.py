"""After power loss at any moment the store holds all that was recorded, and the same command ends with equal bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from fault_calls import Event, Kill, Whom
from fault_client import folder_of_a_test
from fault_extraction import KILLED, Trial, arrays_and_target, draw_kill, reference, require_whole
from fault_power import Disk, Mode

from manifests.commit import latest, read

pytestmark = pytest.mark.crash
SEED = int(os.environ.get("DFLASH_FAULT_SEED", "3"))
WHOM: tuple[Whom, ...] = ("caller", "everyone")
MODES: tuple[Mode, ...] = get_args(Mode)
TRIALS_OF_A_SLICE = 20


def lose_power(
    trial: Trial, rng: random.Random, kills: Sequence[Kill], mode: Mode, *, finish: bool = False, most_shards: int = 3
) -> None:
    """Run until the power goes, and leave what the disk may hold; what is recorded there must be there.

    The power goes with the last kill, or after a run that finished; the kills before it leave the system running, with
    all that it has not yet put on the disk.
    """
    trial.disk.mkdir(parents=True, exist_ok=True)
    disk = Disk.at_rest(trial.disk)
    for kill in [*kills, *([None] if finish else [])]:
        done = trial.extract(shards=rng.randint(1, most_shards), kill=kill, contents=True)
        assert kill is None or done.landed or most_shards > 1, f"{kill} was not met\n{trial.text()}"
        assert done.code in (KILLED if done.landed else (0,)), trial.text()
        disk.follow(done.events)
    disk.lose_power(mode, rng)
    trial.story.append(f"power lost: {mode}")
    require_recorded_blocks(trial)


def require_recorded_blocks(trial: Trial) -> None:
    found, expected = arrays_and_target(trial.store), reference().files
    for block in latest(read(trial.store, "shards"), "block"):
        name = f"blocks/{block:06d}/"
        ours = {path: data for path, data in found.items() if path.startswith(name)}
        theirs = {path: data for path, data in expected.items() if path.startswith(name)}
        assert ours == theirs, f"block {block} is recorded and not whole\n{trial.text()}"


@pytest.fixture(name="tmp_path")
def folder() -> Iterator[Path]:
    """Where the trials lie: on a memory disk, if there is one."""
    yield from folder_of_a_test()


def random_trial(folder: Path, name: str) -> int:
    rng = random.Random(f"{SEED}/{name}")
    trial = Trial(folder / name)
    losses = rng.choice([1, 1, 2, 3])
    for _ in range(losses):
        events = reference().outcome.events
        kills = [draw_kill(rng, events, whom=rng.choice(WHOM)) for _ in range(rng.choice([0, 0, 1, 2]))]
        lose_power(trial, rng, [*kills, draw_kill(rng, events, whom="everyone")], rng.choice(MODES))
    assert trial.extract(shards=rng.randint(1, 3)).code == 0, f"seed {SEED}/{name}\n{trial.text()}"
    require_whole(trial)
    shutil.rmtree(trial.folder)
    return losses


def test_power_lost_at_random(tmp_path: Path) -> None:
    for number in range(4):
        random_trial(tmp_path, f"quick-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_power_lost_at_random_many_times(tmp_path: Path, part: int) -> None:
    for number in range(TRIALS_OF_A_SLICE):
        random_trial(tmp_path, f"{part}-{number}")


@pytest.mark.parametrize("mode", MODES)
def test_power_lost_after_the_end_loses_nothing(tmp_path: Path, mode: Mode) -> None:
    finished_then_lost(Trial(tmp_path), random.Random(f"{SEED}/{mode}"), [], mode)


def test_folders_above_the_store_are_kept_too(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "runs/today/x.zarr")
    finished_then_lost(trial, random.Random(SEED), [], "nothing unsynced")


# What a killed process wrote is seen by the next one although no disk holds it yet.
SEEN_BUT_NOT_KEPT = {
    "mkdir x.zarr": 1,
    "rename x.zarr/plan.json": 1,
    "rename x.zarr/target": 1,
    "rename x.zarr/blocks/000002": 1,
    "write x.zarr/manifest/documents.extract-0.jsonl": 1,
    "open x.zarr/manifest/shards.extract-0.jsonl": 1,
    "write x.zarr/manifest/shards.extract-0.jsonl": 5,  # the last block's: the next run has nothing to do
}


@pytest.mark.parametrize("label", SEEN_BUT_NOT_KEPT)
def test_power_lost_after_a_kill_and_a_run_that_finished(tmp_path: Path, label: str) -> None:
    kill = Kill(label=label, occurrence=SEEN_BUT_NOT_KEPT[label], whom="everyone")
    finished_then_lost(Trial(tmp_path), random.Random(f"{SEED}/{label}"), [kill], "nothing unsynced", most_shards=1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_power_lost_after_kills_and_a_run_that_finished(tmp_path: Path, part: int) -> None:
    rng = random.Random(f"{SEED}/finished-{part}")
    for number in range(TRIALS_OF_A_SLICE):
        kills = [draw_kill(rng, reference().outcome.events, whom="everyone") for _ in range(rng.randint(1, 3))]
        finished_then_lost(Trial(tmp_path / str(number)), rng, kills, rng.choice(MODES))


def finished_then_lost(
    trial: Trial, rng: random.Random, kills: Sequence[Kill], mode: Mode, most_shards: int = 3
) -> None:
    lose_power(trial, rng, kills, mode, finish=True, most_shards=most_shards)
    assert arrays_and_target(trial.store) == reference().files, trial.text()
    again = trial.extract(shards=2)
    assert "nothing to do" in again.output, trial.text()
    require_whole(trial)


def test_the_order_of_a_blocks_calls() -> None:
    by_role: dict[str, list[Event]] = defaultdict(list)
    for event in reference().outcome.events:
        by_role[event.role].append(event)
    seen = 0
    for role, events in by_role.items():
        published = [
            event.path.rpartition("/")[2] for event in events if event.label.startswith("rename x.zarr/blocks/0")
        ]
        for block in published:
            require_order(events, block)
            seen += 1
        assert role.startswith("worker") == (published != [])
    assert seen == reference().blocks


def require_order(events: list[Event], block: str) -> None:
    """fsync(files) < fsync(folders) < rename < fsync(blocks) < record < fsync(record) < fsync(manifest, when new)."""
    labels = [event.label for event in events]
    aside = f"x.zarr/blocks/.{block}.*.partial"
    renamed = labels.index(f"rename x.zarr/blocks/{block}")
    written = {label.split(maxsplit=1)[1] for label in labels[:renamed] if f" {aside}/" in label and "write" in label}
    folders = {label.split(maxsplit=1)[1] for label in labels[:renamed] if label.startswith(f"mkdir {aside}")}
    assert len(written) > 10
    assert len(folders) > 10
    for path in sorted(written):
        last = max(i for i, label in enumerate(labels[:renamed]) if "write" in label and label.endswith(f" {path}"))
        assert last < labels.index(f"fsync {path}") < labels.index(f"fsync {path.rpartition('/')[0]}") < renamed
    for folder in sorted(folders):
        assert labels.index(f"fsync {folder}") < renamed
    parent = next(i for i in range(renamed, len(labels)) if labels[i] == "fsync x.zarr/blocks")
    record = next(i for i, event in enumerate(events) if is_record_of(event, int(block)))
    synced = next(i for i in range(record, len(labels)) if labels[i] == labels[record].replace("write", "fsync"))
    assert renamed < parent < record < synced
    if labels.index(labels[record]) == record:  # the file's first; the main thread's progress may come between
        assert "fsync x.zarr/manifest" in labels[synced : synced + 6]


def is_record_of(event: Event, block: int) -> bool:
    if event.kind != "write" or not event.path.startswith("x.zarr/manifest/shards."):
        return False
    return any(json.loads(line)["block"] == block for line in event.state.splitlines())
