"""Extraction is exactly-once: killed anywhere, however often, the same command ends with the bytes of a quiet run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from fault_calls import WRITES, Event, Kill, Whom
from fault_client import BAD_DOCUMENT, DOCUMENTS, folder_of_a_test
from fault_extraction import (
    KILLED,
    Trial,
    arrays_and_target,
    command,
    draw_kill,
    occurrence,
    reference,
    require_whole,
    server,
    sites,
)

pytestmark = pytest.mark.crash
SEED = int(os.environ.get("DFLASH_FAULT_SEED", "3"))
TRIALS_OF_A_SLICE = 20
PARTS = 12
WHOM: tuple[Whom, ...] = ("caller", "everyone")


@pytest.fixture(name="tmp_path")
def folder() -> Iterator[Path]:
    """Where the trials lie: on a memory disk, if there is one."""
    yield from folder_of_a_test()


def random_trial(folder: Path, name: str) -> int:
    """Kill the command one to four times, finish it, compare; returns how many kills met something living."""
    rng = random.Random(f"{SEED}/{name}")
    trial = Trial(folder / name)
    landed = 0
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        shards = rng.randint(1, 3)
        if rng.random() < 0.7:
            kill = draw_kill(rng, reference().outcome.events, whom=rng.choice(WHOM))
            done = trial.extract(shards=shards, kill=kill)
        else:
            timer = {
                "seconds": rng.uniform(0.02, reference().seconds),
                "whom": rng.choice(["everyone", "command", "worker"]),
            }
            done = trial.extract(shards=shards, timer=timer, linger=rng.random() < 0.5)
        hit = done.code in KILLED
        assert hit or done.code == 0, f"seed {SEED}/{name}\n{trial.text()}"
        assert hit or not done.landed, f"seed {SEED}/{name}: a killed worker was not noticed\n{trial.text()}"
        landed += hit
    assert trial.extract(shards=rng.randint(1, 3)).code == 0, f"seed {SEED}/{name}\n{trial.text()}"
    require_whole(trial)
    shutil.rmtree(trial.folder)
    return landed


def test_the_undisturbed_store_holds_every_document_once() -> None:
    import numpy as np
    import zarr

    folder = reference_store() / "blocks"
    held = [np.asarray(zarr.open_array(path / "document_index", mode="r")[:]) for path in sorted(folder.glob("[0-9]*"))]
    assert len(held) == reference().blocks > 3
    stored = [document for document in range(DOCUMENTS) if document != BAD_DOCUMENT]
    assert sorted(np.concatenate(held).tolist()) == stored
    told = reference().counts
    assert (told["documents"], told["stored_documents"], told["distinct_documents"]) == (8, 8, 8)
    assert told["skipped"] == 1
    lengths = np.diff(np.load(server().root / "rows" / "offsets.npy"))
    assert told["tokens"] == told["stored_tokens"] == lengths[stored].sum()


def reference_store() -> Path:
    reference()
    return Trial(server().root / "reference").store


def test_every_kind_of_call_is_seen() -> None:
    seen = {(kind.split()[0], "blocks/." in kind, "manifest/" in kind) for kind in sites(reference().outcome.events)}
    for kind in ("open", "fsync"):
        assert {(kind, True, False), (kind, False, True)} <= seen
    assert {("write", False, True), ("mkdir", True, False), ("rename", False, False)} <= seen
    assert any(kind in WRITES and block for kind, block, _ in seen)


def test_killed_at_random(tmp_path: Path) -> None:
    landed = sum(random_trial(tmp_path, f"quick-{number}") for number in range(6))
    assert landed >= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_random_many_times(tmp_path: Path, part: int) -> None:
    landed = sum(random_trial(tmp_path, f"{part}-{number}") for number in range(TRIALS_OF_A_SLICE))
    assert landed >= TRIALS_OF_A_SLICE


def every_kill(events: Sequence[Event], name: str) -> list[Kill]:
    """Before, in and after one call of every class."""
    rng = random.Random(f"{SEED}/{name}")
    kills = []
    for _, labels in sorted(sites(events).items()):
        for when in ("before", "middle", "after"):
            label, count = rng.choice(labels)
            if when != "middle" or label.split()[0] in WRITES:
                which = occurrence(rng, label, count)
                kills.append(Kill(label=label, occurrence=which, when=when, whom=rng.choice(WHOM)))
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_call(tmp_path: Path, part: int) -> None:
    rng = random.Random(f"{SEED}/every-{part}")
    for number, kill in enumerate(every_kill(reference().outcome.events, "every")[part::PARTS]):
        trial = Trial(tmp_path / str(number))
        killed = trial.extract(shards=2, kill=kill)
        assert killed.landed, f"{kill}\n{trial.text()}"
        assert killed.code in KILLED, trial.text()
        assert trial.extract(shards=rng.randint(1, 3)).code == 0, trial.text()
        require_whole(trial)
        shutil.rmtree(trial.folder)


@pytest.mark.parametrize("kind", ["documents", "shards", "skips"])
def test_killed_in_the_middle_of_a_record(tmp_path: Path, kind: str) -> None:
    trial = Trial(tmp_path)
    kill = Kill(label=f"write x.zarr/manifest/{kind}.extract-0.jsonl", when="middle")
    assert trial.extract(kill=kill).landed, trial.text()
    assert trial.extract().code == 0, trial.text()
    require_whole(trial)


# A worker that dies here leaves half a block, a block without its record, a torn record, half the target.
RESTARTED = (
    Kill(label="writev x.zarr/blocks/.000001.*.partial/hidden_states/c/0/0/0", when="middle"),
    Kill(label="rename x.zarr/blocks/000002", when="after"),
    Kill(label="write x.zarr/manifest/shards.extract-0.jsonl", when="middle"),
    Kill(label="rename x.zarr/target", when="before"),
)


@pytest.mark.parametrize("kill", RESTARTED, ids=lambda kill: kill.label.split("/")[-1])
def test_a_worker_that_died_is_started_again_and_its_blocks_are_whole(tmp_path: Path, kill: Kill) -> None:
    trial = Trial(tmp_path)
    done = trial.extract("--restarts", 2, shards=2, kill=kill)
    assert (done.code, done.landed) == (0, True), trial.text()
    assert re.search("attempt 2 of worker [01] begins", done.output), done.output
    require_whole(trial)


# What a first kill leaves for the next run to clear: a block half written, the target half exported, and a block that
# was published but not recorded.
LITTER = {
    "half a block": Kill(label="fsync x.zarr/blocks/.000001.*.partial", when="before", whom="everyone"),
    "half a target": Kill(label="rename x.zarr/target", when="before", whom="everyone"),
    "a block without its record": Kill(label="rename x.zarr/blocks/000002", when="after", whom="everyone"),
}


def littered(folder: Path, kill: Kill) -> Trial:
    trial = Trial(folder)
    assert trial.extract(shards=1, kill=kill).landed, trial.text()
    return trial


@cache
def clearing(name: str) -> list[Event]:
    """The calls by which a run takes the litter of an earlier one away."""
    trial = littered(server().root / f"clearing-{name}", LITTER[name])
    done = trial.extract(shards=1)
    assert done.code == 0, trial.text()
    quiet = set(sites(reference().outcome.events))
    known = [events for kind, events in sites(done.events).items() if kind not in quiet]
    labels = {label for found in known for label, _ in found}
    return [event for event in done.events if event.label in labels]


def killed_while_clearing(folder: Path, name: str, kill: Kill) -> None:
    trial = littered(folder, LITTER[name])
    again = trial.extract(shards=1, kill=kill)
    assert again.landed, f"{kill}\n{trial.text()}"
    assert trial.extract(shards=2).code == 0, trial.text()
    require_whole(trial)
    shutil.rmtree(trial.folder)


@pytest.mark.parametrize("name", LITTER)
def test_killed_while_clearing_up(tmp_path: Path, name: str) -> None:
    kills = every_kill(clearing(name), name)
    assert {kill.label.split()[0] for kill in kills} >= {"unlink", "rmdir"}
    for number, kill in enumerate(random.Random(f"{SEED}/{name}").sample(kills, 2)):
        killed_while_clearing(tmp_path / str(number), name, kill)


@pytest.mark.slow
@pytest.mark.parametrize("name", LITTER)
def test_killed_at_every_call_of_clearing_up(tmp_path: Path, name: str) -> None:
    for number, kill in enumerate(every_kill(clearing(name), name)):
        killed_while_clearing(tmp_path / str(number), name, kill)


# Where a worker is at work when its command is killed; it wakes up after the same command was given again.
AT_WORK = (
    Kill(label="mkdir x.zarr/blocks/.000001.*.partial", when="before", whom="command"),
    Kill(label="rename x.zarr/blocks/000001", when="before", whom="command"),
    Kill(label="write x.zarr/manifest/shards.extract-0.jsonl", when="before", whom="command"),
)


@pytest.mark.parametrize("kill", AT_WORK, ids=lambda kill: kill.label.split()[0])
def test_a_worker_that_outlives_its_command_shares_the_store_with_nobody(tmp_path: Path, kill: Kill) -> None:
    trial = Trial(tmp_path)
    assert trial.extract(kill=kill, linger=True).code in KILLED
    busy = trial.extract(workers_end_s=0.2, linger=True)
    assert (busy.code, "is in use by workers of process" in busy.output) == (44, True), trial.text()
    trial.wake()
    assert trial.extract(shards=2).code == 0, trial.text()
    require_whole(trial)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["everyone", "command", "supervisor", "worker"])
def test_the_real_command_killed(tmp_path: Path, whom: str) -> None:
    """Spawned as a user spawns it, supervisor and workers in sessions of their own, killed once blocks are there."""
    rng = random.Random(f"{SEED}/{whom}")
    trial = Trial(tmp_path)
    for _ in range(2):
        running = spawn(trial, shards=2)
        blocks = rng.randint(0, 3)
        deadline = time.monotonic() + 120
        while len(list(trial.store.glob("blocks/0*"))) < blocks or not pids_of(trial.store, "shared.worker"):
            assert running.poll() is None or running.returncode == 0, trial.text()
            assert time.monotonic() < deadline
            if running.returncode == 0:
                break
            time.sleep(0.005)
        supervisor, workers = (pids_of(trial.store, name) for name in ("manifests.supervisor", "shared.worker"))
        victims = {"command": [running.pid], "supervisor": supervisor, "worker": workers[:1]}
        for pid in victims.get(whom, [running.pid, *supervisor, *workers]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert running.wait(120) in (*KILLED, 0), trial.text()
        while pids_of(trial.store, "manifests.supervisor"):  # the run goes on without its viewer
            time.sleep(0.05)
    # Not `require_whole`: only the forked commands have a target that spoils a document.
    quiet = Trial(tmp_path / "quiet")
    for one in (trial, quiet):
        assert spawn(one, shards=1).wait(120) == 0, one.text()
    assert arrays_and_target(trial.store) == arrays_and_target(quiet.store), trial.text()
    assert list(trial.disk.rglob("*.partial")) == []


def spawn(trial: Trial, shards: int) -> subprocess.Popen[bytes]:
    trial.runs += 1
    trial.disk.mkdir(parents=True, exist_ok=True)
    with trial.output.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "shared", *command(trial.store), "--shards", str(shards)],
            stdout=output,
            stderr=output,
            cwd=Path(__file__).parent.parent,
        )


def pids_of(store: Path, module: str) -> list[int]:
    """Living processes that run a module for this store."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if module.encode() in words and str(store).encode() in words:
                found.append(int(process.name))
    return sorted(found)
