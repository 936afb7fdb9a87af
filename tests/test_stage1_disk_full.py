"""A full disk stops extraction with the numbers, or holds it; what was finished stays, and the rest is made later.

On real memory disks of a few hundred kilobytes. Mounting one needs root or user namespaces.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fault_calls import FILLER, Kill
from fault_extraction import Trial, arrays_and_target, occurrence, reference, require_whole, server, sites

from manifests.blocks import recorded_blocks
from manifests.commit import read
from shared.errors import DiskFull
from shared.store_layout import block_name
from stage1_extract import headroom as headroom_module
from stage1_extract.disk_plan import StoreShape
from stage1_extract.headroom import Headroom, reserve_of
from stage1_extract.plan import make_plan

SEED = int(os.environ.get("DFLASH_FAULT_SEED", "3"))
PAGE = 4096
PARTS = 6


class SmallDisk(Trial):
    """A trial whose store lies on a memory disk of its own."""

    def mount(self, options: str) -> None:
        server().ask("mount", path=str(self.place), options=options)

    def fill(self) -> None:
        with (self.disk / FILLER).open("ab", buffering=0) as file:
            try:
                while file.write(bytes(PAGE)) == PAGE:
                    pass
            except OSError:
                return

    def empty(self) -> None:
        (self.disk / FILLER).unlink()

    def free(self) -> int:
        """Bytes that the store could still take."""
        found = os.statvfs(self.disk)
        filler = self.disk / FILLER
        return found.f_bavail * found.f_frsize + (filler.stat().st_blocks * 512 if filler.exists() else 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if not server().may_mount:
        pytest.skip(
            "mounting a memory disk needs root or a user namespace (unshare --map-root-user --mount); both are refused"
        )
    trial = SmallDisk(tmp_path)
    yield trial
    server().ask("unmount", path=str(trial.place))


def require_whole_blocks(trial: Trial) -> int:
    """Every recorded block is there in full; returns how many."""
    found, expected = arrays_and_target(trial.store), reference().files
    blocks = recorded_blocks(trial.store) if trial.store.exists() else {}
    for block in blocks:
        name = f"blocks/{block:06d}/"
        assert {path: data for path, data in found.items() if path.startswith(name)} == {
            path: data for path, data in expected.items() if path.startswith(name)
        }, trial.text()
    return len(blocks)


def partials(trial: Trial) -> list[str]:
    return [str(path) for path in trial.disk.rglob("*.partial")]


def test_a_disk_that_is_too_small_is_refused_with_the_numbers_before_any_block(disk: SmallDisk) -> None:
    disk.mount("size=600k")
    done = disk.extract()
    assert done.code == 41, disk.text()
    assert re.search(
        r"x\.zarr: [0-9.]+ .?B are needed, [0-9.]+ kB are free \(with 30.7 kB in reserve\); make room", done.output
    ), done.output
    assert require_whole_blocks(disk) == 0
    disk.mount("remount,size=8m")
    assert disk.extract().code == 0, disk.text()
    require_whole(disk)


def test_room_that_somebody_else_takes_stops_before_the_next_block(disk: SmallDisk) -> None:
    disk.mount("size=8m")
    kill = Kill(label="fsync x.zarr/manifest/shards.extract-0.jsonl", occurrence=2, whom="nobody")
    done = disk.extract(kill=kill)
    assert done.code == 41, disk.text()
    assert require_whole_blocks(disk) >= 2
    assert partials(disk) == []
    disk.empty()
    assert disk.extract(shards=2).code == 0, disk.text()
    require_whole(disk)


def test_the_reserve_is_left_free(disk: SmallDisk) -> None:
    disk.mount("size=8m")
    done = disk.extract("--disk-reserve-gb", 0.0075)
    assert done.code == 41, disk.text()
    assert disk.extract("--disk-reserve-gb", 0.001).code == 0, disk.text()
    assert disk.free() > 1_000_000
    require_whole(disk)


def test_a_disk_without_inodes_is_refused_and_resumes(disk: SmallDisk) -> None:
    disk.mount("size=16m,nr_inodes=150")
    done = disk.extract()
    assert done.code == 41, disk.text()
    assert re.search(r"[0-9]+ files and folders are needed, [0-9]+ are free", done.output), done.output
    disk.mount("remount,nr_inodes=2000")
    assert disk.extract().code == 0, disk.text()
    require_whole(disk)


def test_inodes_that_run_out_inside_a_block_lose_nothing(disk: SmallDisk) -> None:
    disk.mount("size=16m,nr_inodes=250")
    pid = disk.start("--on-disk-full", "wait")  # which does not look before the start
    assert re.search(r"free [0-9]+ files  needed [0-9]+ files", wait_for(disk, "wait for room"))
    server().ask("stop", pid=pid)
    assert disk.finish(pid).code == 75, disk.text()
    assert partials(disk) == []
    require_whole_blocks(disk)
    disk.mount("remount,nr_inodes=2000")
    assert disk.extract().code == 0, disk.text()
    require_whole(disk)


@dataclass
class Watched:
    """A worker's headroom over an empty store of ten blocks, with what it reported."""

    headroom: Headroom
    reports: list[tuple[str, str]]


def watched(store: Path, *, wait: bool, workers: int = 2) -> Watched:
    (store / "blocks").mkdir(parents=True)
    shape = StoreShape(
        hidden_size=64, num_taps=2, topk=4, vocab_size=320, precision="bfloat16", last_hidden="bfloat16", tied=True
    )
    reports: list[tuple[str, str]] = []
    headroom = Headroom(
        store=store,
        shape=shape,
        lengths=np.full(20, 500, np.int64),
        plan=make_plan([500] * 20, 1000),
        remaining=range(10),
        workers=workers,
        reserve_gb=None,
        wait=wait,
        report=lambda free, needed: reports.append((free, needed)),
    )
    return Watched(headroom, reports)


def test_what_is_needed_is_what_all_workers_are_at_and_the_reserve(disk: SmallDisk) -> None:
    disk.mount("size=64m")
    one, eight = (watched(disk.disk / str(workers), wait=False, workers=workers).headroom for workers in (1, 8))
    reserve = reserve_of(disk.disk, None)
    assert reserve.allocated == 64 * 1024 * 1024 * 5 // 100  # 5 % of a small disk, not 1 GB
    assert reserve_of(disk.disk, 0.002).allocated == 2_000_000
    block = (one.needed().allocated - reserve.allocated) / 2  # one at the target, one being written
    assert 380_000 < block < 800_000  # 2 + 1 features of 64 x 2 bytes, and whole pages for small arrays
    assert eight.needed().allocated - reserve.allocated == pytest.approx(10 * block, rel=0.1)  # all there is to do
    for number in range(9):
        (one.store / block_name(number)).mkdir()
    last = one.needed().allocated
    assert last - reserve.allocated == pytest.approx(block, rel=0.1)
    aside = one.store / "blocks" / ".000009.x.partial"
    aside.mkdir()
    (aside / "half").write_bytes(bytes(100 * PAGE))  # already on the disk: not needed twice
    assert one.needed().allocated == last - 100 * PAGE


def test_before_a_block_the_worker_stops_with_the_numbers(disk: SmallDisk) -> None:
    disk.mount("size=8m")
    headroom = watched(disk.disk / "x.zarr", wait=False).headroom
    headroom.require(3)
    with (disk.disk / FILLER).open("wb") as file:
        file.write(bytes(6 << 20))
    with pytest.raises(DiskFull) as caught:
        headroom.require(3)
    pattern = (
        r"x\.zarr: no room for block 3: [0-9.]+ MB are needed, [0-9.]+ MB are free \(for the blocks that 2 processes "
        r"are at, with 419 kB in reserve\); make room, then run the same command again: finished blocks are kept\. "
        r"--on-disk-full wait waits for room, --disk-reserve-gb sets the reserve$"
    )
    assert re.search(pattern, str(caught.value)), caught.value


def test_a_waiting_worker_sees_that_room_was_made(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom_module, "LOOK_EVERY_S", 0.1)
    disk.mount("size=8m")
    waiting = watched(disk.disk / "x.zarr", wait=True)
    disk.fill()

    def free_it() -> None:
        deadline = time.monotonic() + 60
        while len(waiting.reports) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        disk.empty()

    freed = threading.Thread(target=free_it)
    freed.start()
    waiting.headroom.require(0)
    freed.join()
    assert len(waiting.reports) >= 2
    assert {free for free, _ in waiting.reports} == {"0 B"}


def wait_for(trial: Trial, words: str) -> str:
    """What the running command says, once these words are in it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if trial.output.exists() and words in (told := trial.output.read_text()):
            return told
        time.sleep(0.02)
    raise AssertionError(trial.text())


FULL_AT = (
    "open x.zarr/.target.*.partial/config.json",
    "mkdir x.zarr/blocks/.000001.*.partial",
    "writev x.zarr/blocks/.000001.*.partial/hidden_states/c/0/0/0",
    "rename x.zarr/blocks/000001",
    "write x.zarr/manifest/documents.extract-0.jsonl",
    "write x.zarr/manifest/shards.extract-0.jsonl",
)


@pytest.mark.parametrize("label", FULL_AT)
def test_waiting_work_goes_on_when_there_is_room(disk: SmallDisk, label: str) -> None:
    disk.mount("size=8m")
    kill = Kill(label=label, when="before", whom="nobody")
    pid = disk.start("--on-disk-full", "wait", shards=1, kill=kill)
    told = wait_for(disk, "wait for room")
    assert re.search(r"wait for room [0-9,]+/[0-9,]+ tokens  .*free [0-9.]+ k?B  needed [0-9.]+ .?B", told), told
    disk.empty()
    assert disk.finish(pid).code == 0, disk.text()
    require_whole(disk)


def test_a_stop_request_ends_the_wait(disk: SmallDisk) -> None:
    disk.mount("size=8m")
    kill = Kill(label="mkdir x.zarr/blocks/.000002.*.partial", when="before", whom="nobody")
    pid = disk.start("--on-disk-full", "wait", kill=kill)
    wait_for(disk, "wait for room")
    server().ask("stop", pid=pid)
    done = disk.finish(pid)
    assert (done.code, partials(disk)) == (75, []), disk.text()
    disk.empty()
    assert disk.extract().code == 0, disk.text()
    require_whole(disk)


def full_then_room(disk: SmallDisk, kill: Kill, shards: int) -> int:
    """Fill the disk at a call; nothing half done stays, and with room the same command ends as if nothing had been."""
    done = disk.extract(shards=shards, kill=kill)
    assert done.landed, f"{kill}\n{disk.text()}"
    assert done.code in (0, 41), f"{kill}\n{disk.text()}"
    assert "Traceback" not in disk.text(), disk.text()
    if done.code == 41:
        assert "free" in done.output, disk.text()
    assert partials(disk) == [], f"{kill}\n{disk.text()}"
    require_whole_blocks(disk)
    disk.empty()
    assert disk.extract(shards=shards).code == 0, f"{kill}\n{disk.text()}"
    require_whole(disk)
    return done.code


@pytest.mark.parametrize("label", FULL_AT)
def test_a_disk_that_fills_inside_a_block(disk: SmallDisk, label: str) -> None:
    disk.mount("size=8m")
    assert full_then_room(disk, Kill(label=label, when="before", whom="nobody"), shards=1) == 41


@pytest.mark.parametrize("label", FULL_AT[2:4])
def test_a_paused_run_goes_on_by_itself_when_there_is_room(disk: SmallDisk, label: str) -> None:
    disk.mount("size=8m")
    pid = disk.start("--on-disk-full", "pause", kill=Kill(label=label, when="before", whom="nobody"))
    told = wait_for(disk, "paused until there is room")
    assert re.search(r"the disk of .*x\.zarr is full: [0-9,]+ of [0-9,]+ bytes are free", told), told
    disk.empty()
    assert disk.finish(pid).code == 0, disk.text()
    assert [e["event"] for e in read(disk.store, "events") if e["event"] in PAUSE] == list(PAUSE)
    require_whole(disk)


PAUSE = ("paused", "continued")


def test_a_paused_run_can_be_stopped(disk: SmallDisk) -> None:
    disk.mount("size=8m")
    kill = Kill(label=FULL_AT[1], when="before", whom="nobody")
    pid = disk.start("--on-disk-full", "pause", kill=kill)
    wait_for(disk, "paused until there is room")
    server().ask("stop", pid=pid)
    assert disk.finish(pid).code == 75, disk.text()
    disk.empty()
    assert disk.extract().code == 0, disk.text()
    require_whole(disk)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_disk_that_fills_at_every_call(disk: SmallDisk, part: int) -> None:
    rng = random.Random(f"{SEED}/{part}")
    classes = sorted(sites(reference().outcome.events).items())
    disk.mount("size=8m")
    for _, labels in classes[part::PARTS]:
        label, count = rng.choice(labels)
        kill = Kill(label=label, occurrence=occurrence(rng, label, count), when="before", whom="nobody")
        full_then_room(disk, kill, shards=2)
        shutil.rmtree(disk.store)
