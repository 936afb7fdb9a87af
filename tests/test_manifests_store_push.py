"""Pushing a store to a bucket and pulling it back: whole, resumable, never half; against a real S3 server process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import S3, Objects, Wire, s3_fixture, s3_process_fixture, wire_fixture  # noqa: F401
from toy_run import config_of as train_config
from toy_run import curve, run_here
from toy_store import counting_texts, make_store

from manifests import store_push
from manifests.blocks import open_store, recorded_blocks
from manifests.commit import Ledger, files_of, latest, read
from manifests.lines import records_in
from manifests.records import DocumentRecord, RunRecord, ShardRecord
from manifests.store_pull import pull
from manifests.store_push import PushOptions, push
from shared.atomic import owned
from shared.errors import ConfigRefused, StorageRefused, StoreDamaged, StoreIncomplete, StoreMismatch
from shared.store import TeacherStore
from shared.store_files import open_files
from shared.store_layout import block_name
from shared.store_write import write_block
from stage1_extract.plan import done_blocks

BLOCKS = 4
ROOT = Path(__file__).parent.parent


@pytest.fixture
def local(tmp_path: Path) -> Path:
    store = make_store(tmp_path / "x.zarr", counting_texts(24), blocks=BLOCKS)
    Ledger(store, "extract-1").append(RunRecord(run_id="1", command="extract", state="finished"))
    for block, record in recorded_blocks(store).items():
        Ledger(store, "extract-1").append(
            DocumentRecord(
                document_index=block, doc_id=f"d{block}", source="s", line=1, n_tokens=1, n_supervised=1, split="train",
                block=block, seal=record["seal"],
            )
        )  # fmt: skip
    return store


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_push, "POLL_S", 0.01)


def only(store: Path, *blocks: int) -> list[bytes]:
    """Take the records of all other blocks out of the store; returns the file's lines for `restore`."""
    (path,) = files_of(store, "shards")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[block] for block in blocks))
    return lines


def restore(store: Path, lines: list[bytes]) -> None:
    files_of(store, "shards")[0].write_bytes(b"".join(lines))


def blocks_at(location: Path | str) -> list[int]:
    """The blocks that a reader sees, after reading every document of them."""
    try:
        store = open_store(location, partial=True)
    except StoreIncomplete:
        return []
    for ref in store.documents:
        store.read_document(ref)
    return sorted(store.blocks)


def tree(store: Path) -> dict[str, bytes]:
    """Every file that is the store itself."""
    found = {}
    for path in sorted(store.rglob("*")):
        name = path.relative_to(store)
        if path.is_file() and name.parts[0] in ("blocks", "target", "store.json", "plan.json", "zarr.json"):
            found[str(name)] = path.read_bytes()
    return found


def lines_of(store: Path) -> dict[str, list[bytes]]:
    return {
        kind: sorted(line for path in files_of(store, kind) for line in path.read_bytes().splitlines())
        for kind in ("shards", "documents", "skips", "runs")
    }


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "shared", "store", *map(str, words)]


def test_what_is_pulled_is_what_was_pushed_byte_for_byte(s3: S3, local: Path, tmp_path: Path) -> None:
    url, copy = s3.make_bucket().url(), tmp_path / "copy.zarr"
    push(local, url, PushOptions())
    pull(url, copy, 2)
    assert tree(copy) == tree(local)
    assert lines_of(copy) == lines_of(local)
    assert open_store(copy).snapshot == open_store(local).snapshot
    (copy / block_name(2) / "input_ids" / "c" / "0").unlink()  # an interrupted pull goes on with what is not whole
    pull(url, copy, 2)
    assert tree(copy) == tree(local)
    assert lines_of(copy) == lines_of(local)
    other = make_store(tmp_path / "other.zarr", counting_texts(3))
    with pytest.raises(StoreMismatch):
        pull(url, other, 2)


def test_a_second_push_sends_nothing_and_later_blocks_are_added(s3: S3, wire: Wire, local: Path) -> None:
    url = s3.make_bucket().url()
    lines = only(local, 0, 2)
    push(local, url, PushOptions())
    assert blocks_at(url) == [0, 2]
    with pytest.raises(StoreIncomplete) as caught:
        open_store(url)
    assert "2 of 4" in str(caught.value)
    restore(local, lines)
    wire.requests.clear()
    push(local, url, PushOptions())
    sent = [path for method, path, _ in wire.requests if method == "PUT" and "/blocks/" in path]
    assert {path.partition("/blocks/")[2].split("/")[0] for path in sent} == {"000001", "000003"}
    assert blocks_at(url) == [0, 1, 2, 3]
    assert open_store(url).snapshot == open_store(local).snapshot
    wire.requests.clear()
    push(local, url, PushOptions())
    assert {method for method, _, _ in wire.requests} == {"GET"}
    assert len(wire.requests) < 16, wire.requests


def test_cut_off_at_any_request_a_reader_sees_the_state_before_or_after(
    s3: S3, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_push, "_TRIES", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    objects, store = s3.make_bucket(), make_store(tmp_path / "two.zarr", counting_texts(6), blocks=2)
    lines = only(store, 0)
    push(store, objects.url("before"), PushOptions(threads=1))
    before = {key.removeprefix("before/"): objects.read(key) for key in objects.keys("before")}
    restore(store, lines)
    wire.requests.clear()
    push(store, objects.url("before"), PushOptions(threads=1))
    requests = len(wire.requests)
    assert requests > 25
    seen = set()
    for number, fault in zip(range(1, requests, 8), itertools.cycle(["cut", "lost answer"]), strict=False):
        prefix = f"cut-{number}"
        for key, data in before.items():
            objects.write(f"{prefix}/{key}", data)
        first = len(wire.requests)
        wire.rule = lambda n, _method, _path, at=first + number, fault=fault: (
            "pass" if n < at else fault if n == at else "cut"
        )
        with pytest.raises(StorageRefused):
            push(store, objects.url(prefix), PushOptions(threads=1))
        wire.rule = lambda _number, _method, _path: "pass"
        with monkeypatch.context() as context:
            context.setenv("AWS_ENDPOINT_URL", s3.endpoint)
            seen.add(tuple(blocks_at(objects.url(prefix))))
            push(store, objects.url(prefix), PushOptions(threads=1))
            assert blocks_at(objects.url(prefix)) == [0, 1], number
    assert seen <= {(0,), (0, 1)}
    assert (0,) in seen


def test_a_killed_push_goes_on_where_it_was(s3: S3, wire: Wire, tmp_path: Path) -> None:
    store = make_store(tmp_path / "many.zarr", counting_texts(40), blocks=8)
    objects = s3.make_bucket()
    for objects_there in (3, 90):
        process = subprocess.Popen(command("push", store, objects.url(), "--threads", 2), cwd=ROOT)
        while len(objects.keys()) < objects_there and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
        assert blocks_at(objects.url()) == [] if objects.keys("x.zarr/store.json") else True
    there = set(objects.keys("x.zarr/blocks"))
    assert len({key.split("/")[2] for key in there}) >= 4
    wire.requests.clear()
    push(store, objects.url(), PushOptions())
    sent = {path.removeprefix(f"/{objects.name}/") for method, path, _ in wire.requests if method == "PUT"}
    assert len(sent) > 20
    assert not sent & there, "what was there was sent again"
    assert blocks_at(objects.url()) == list(range(8))
    assert open_store(objects.url()).snapshot == open_store(store).snapshot


def test_another_store_is_refused_with_both_ids(s3: S3, local: Path, tmp_path: Path) -> None:
    objects = s3.make_bucket()
    push(local, objects.url(), PushOptions())
    other = make_store(tmp_path / "other.zarr", counting_texts(5))
    before = objects.keys()
    with pytest.raises(StoreMismatch) as caught:
        push(other, objects.url(), PushOptions())
    for store in (local, other):
        assert open_store(store).identity["store_uuid"] in str(caught.value)
    assert objects.keys() == before


def test_verify_names_what_was_altered_deleted_or_swapped(s3: S3, local: Path) -> None:
    objects = s3.make_bucket()
    push(local, objects.url(), PushOptions())
    assert subprocess.run(command("verify", objects.url()), cwd=ROOT, check=False).returncode == 0
    good = objects.read("x.zarr/blocks/000001/hidden_states/c/0/0/0")
    flipped = good[:100] + bytes([good[100] ^ 4]) + good[101:]
    objects.write("x.zarr/blocks/000001/hidden_states/c/0/0/0", flipped)
    objects.delete("x.zarr/blocks/000002/loss_mask/c/0")
    swapped = [objects.read(f"x.zarr/blocks/00000{block}/document_index/c/0") for block in (0, 3)]
    for block, data in zip((3, 0), swapped, strict=True):
        objects.write(f"x.zarr/blocks/00000{block}/document_index/c/0", data)
    done = subprocess.run(command("verify", objects.url()), cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 32
    damages = [line for line in done.stdout.splitlines() if line.startswith("damage")]
    for block, array in ((0, "document_index"), (1, "hidden_states"), (2, "loss_mask"), (3, "document_index")):
        assert any(f"block {block}, {array}" in line for line in damages), done.stdout


def test_training_from_the_bucket_gives_the_losses_of_the_local_store(s3: S3, local: Path, tmp_path: Path) -> None:
    url = s3.make_bucket().url()
    push(local, url, PushOptions())
    ours = run_here(train_config(local, tmp_path / "here", steps=4))
    theirs = run_here(dataclasses.replace(train_config(local, tmp_path / "there", steps=4), store=url))
    assert curve(tmp_path / "here") == curve(tmp_path / "there")
    for name, tensor in ours.drafter.state_dict().items():
        assert np.array_equal(tensor.numpy(), theirs.drafter.state_dict()[name].numpy()), name


def test_a_store_is_followed_while_it_grows(s3: S3, local: Path, tmp_path: Path) -> None:
    """The extraction is a thread that owns the store as `dflash extract` does and commits block by block."""
    url, lines = s3.make_bucket().url(), only(local)
    kept = tmp_path / "kept"
    (local / "blocks").rename(kept)
    (local / "blocks").mkdir()
    shutil.copy(kept / "zarr.json", local / "blocks")
    (local / "target").rename(tmp_path / "target")
    follower = subprocess.Popen(command("push", local, url, "--watch"), cwd=ROOT)
    with owned(local):
        for block, line in enumerate(lines):
            (kept / f"{block:06d}").rename(local / block_name(block))
            with files_of(local, "shards")[0].open("ab") as file:
                file.write(line)
            if block == 1:
                (tmp_path / "target").rename(local / "target")
            deadline = time.monotonic() + 60
            while block == 0 and not (open_files(url).list("manifest") and blocks_at(url) == [0]):
                assert time.monotonic() < deadline, "the first block was not published while the extraction went on"
                time.sleep(0.05)
    assert follower.wait(120) == 0
    assert open_store(url).snapshot == open_store(local).snapshot


def test_following_outlives_storage_that_is_away_and_ends_when_nothing_more_comes(
    s3: S3, wire: Wire, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_push, "PATIENCE_S", 0.3)
    monkeypatch.setattr(store_push, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url, lines = s3.make_bucket().url(), only(local, 0, 2)
    owning, ended = threading.Event(), threading.Event()

    def away_for_a_while(number: int, _method: str, _path: str) -> str:
        if number >= 60:
            ended.set()  # the extraction lives as long as the storage is away, however slow this machine
        return "cut" if 30 <= number < 60 else "pass"

    wire.rule = away_for_a_while

    def extraction() -> None:
        with owned(local):
            owning.set()
            ended.wait(60)

    thread = threading.Thread(target=extraction)
    thread.start()
    assert owning.wait(60)
    with pytest.raises(StoreIncomplete) as caught:
        push(local, url, PushOptions(watch=True))
    thread.join()
    assert "2 of 4" in str(caught.value)
    assert len(read(local, "events")) > store_push._TRIES
    assert blocks_at(url) == [0, 2]
    restore(local, lines)
    push(local, url, PushOptions(watch=True))  # nothing runs, but everything is there
    assert blocks_at(url) == [0, 1, 2, 3]


def test_storage_that_fails_is_retried_recorded_and_named(
    s3: S3, wire: Wire, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url = s3.make_bucket().url()
    wire.rule = lambda _number, method, path: "busy" if method == "PUT" and "000002/hidden_states/c" in path else "pass"
    with pytest.raises(StorageRefused) as caught:
        push(local, url, PushOptions())
    for part in ("block 2", url, "SlowDown", "again"):
        assert part in str(caught.value)
    events = read(local, "events")
    assert [event["message"] for event in events] == ["block 2 not pushed"] * 3
    assert "SlowDown" in events[0]["detail"]["message"]
    assert blocks_at(url) == [0, 1, 3]
    wire.rule = lambda _number, _method, _path: "pass"
    push(local, url, PushOptions())
    assert blocks_at(url) == [0, 1, 2, 3]


def test_a_damaged_block_is_not_pushed(s3: S3, local: Path) -> None:
    url = s3.make_bucket().url()
    path = local / block_name(1) / "hidden_states" / "c" / "0" / "0" / "0"
    good = path.read_bytes()
    path.write_bytes(good[:50] + bytes([good[50] ^ 1]) + good[51:])
    with pytest.raises(StoreDamaged) as caught:
        push(local, url, PushOptions())
    for part in ("block 1", str(path), "dflash store verify"):
        assert part in str(caught.value)
    assert blocks_at(url) == [0, 2, 3]
    path.write_bytes(good)
    push(local, url, PushOptions())
    assert len(blocks_at(url)) == BLOCKS


def test_what_is_safe_there_is_removed_here_and_can_be_pulled_back(s3: S3, local: Path) -> None:
    objects = s3.make_bucket()
    url, before = objects.url(), tree(local)
    push(local, url, PushOptions())
    key = "x.zarr/blocks/000003/hidden_states/c/0/0/0"
    good = objects.read(key)
    objects.write(key, good[:-1])
    with pytest.raises(StoreDamaged) as caught:
        push(local, url, PushOptions(free_local=True))
    assert key in str(caught.value)
    assert (local / block_name(3) / "hidden_states" / "c").exists(), "removed although the copy is damaged"
    objects.write(key, good)
    push(local, url, PushOptions(free_local=True))
    assert not list((local / "blocks").glob("*/hidden_states/c"))
    assert sorted(done_blocks(local)) == list(range(BLOCKS)), "an extraction would make them again"
    with pytest.raises(StoreIncomplete) as refused:
        open_store(local)
    assert url in str(refused.value)
    assert "dflash store pull" in str(refused.value)
    assert blocks_at(url) == list(range(BLOCKS))
    pull(url, local, 2)
    assert tree(local) == before
    assert len(open_store(local).documents) == 24


def test_what_lies_in_one_bucket_only_is_not_pushed_to_another(s3: S3, local: Path) -> None:
    first, second = s3.make_bucket(), s3.make_bucket()
    push(local, first.url(), PushOptions(free_local=True))
    with pytest.raises(StoreIncomplete, match=f"only at {first.url()}; `dflash store pull"):
        push(local, second.url(), PushOptions())
    pull(first.url(), local, 2)
    push(local, second.url(), PushOptions())
    assert open_store(second.url()).snapshot == open_store(local).snapshot


def test_a_folder_of_something_else_is_not_pulled_into(s3: S3, local: Path, tmp_path: Path) -> None:
    objects = s3.make_bucket()
    push(local, objects.url(), PushOptions())
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "prepare.json").write_text("{}")
    with pytest.raises(ConfigRefused, match=r"rows holds prepare\.json, which is no part of a store"):
        pull(objects.url(), tmp_path / "rows", 2)
    assert [entry.name for entry in (tmp_path / "rows").iterdir()] == ["prepare.json"]
    begun = tmp_path / "begun.zarr"  # by a pull that was killed
    (begun / "blocks").mkdir(parents=True)
    (begun / ".owner").touch()
    (begun / "zarr.json").write_bytes((local / "zarr.json").read_bytes())
    pull(objects.url(), begun, 2)
    assert open_store(begun).snapshot == open_store(local).snapshot


def test_a_block_made_again_does_not_disturb_those_who_read_the_old_one(s3: S3, local: Path) -> None:
    url = s3.make_bucket().url()
    push(local, url, PushOptions())
    old = open_store(url)
    before = old.read_block_array(1, "input_ids")
    here = open_store(local)
    arrays = {name: here.read_block_array(1, name) for name in here.sealed(1) if name != "document_supervised"}
    record = recorded_blocks(local)[1]
    shutil.rmtree(local / block_name(1))
    written = write_block(local, 1, {**arrays, "input_ids": (arrays["input_ids"] + 1) % 37})
    names = {field.name for field in dataclasses.fields(ShardRecord)}
    values: dict[str, Any] = {name: value for name, value in record.items() if name in names}
    Ledger(local, "again").append(ShardRecord(**{**values, "seal": written["seal"]}))
    push(local, url, PushOptions())
    again = TeacherStore(url, old.blocks)
    np.testing.assert_array_equal(old.read_block_array(1, "input_ids"), before)
    new = open_store(url)
    np.testing.assert_array_equal(new.read_block_array(1, "input_ids"), (before + 1) % 37)
    with pytest.raises(StoreDamaged):  # opened by the new state with the old seal: refused, not mixed
        again.read_block_array(1, "input_ids")
    pull(url, local.with_name("copy.zarr"), 2)
    assert tree(local.with_name("copy.zarr")) == tree(local)


def test_two_pushes_from_two_copies_add_up(s3: S3, local: Path, tmp_path: Path) -> None:
    url, copy = s3.make_bucket().url(), tmp_path / "copy.zarr"
    shutil.copytree(local, copy)
    only(local, 0, 1)
    only(copy, 2, 3)
    failures: list[BaseException] = []

    def run(store: Path) -> None:
        try:
            push(store, url, PushOptions())
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(store,)) for store in (local, copy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert blocks_at(url) == [0, 1, 2, 3]


def test_only_the_records_of_now_and_before_are_kept(s3: S3, local: Path) -> None:
    objects = s3.make_bucket()
    lines = only(local)
    for count in range(1, BLOCKS + 1):
        restore(local, lines[:count])
        push(local, objects.url(), PushOptions())
        shards = [key for key in objects.keys("x.zarr/manifest") if "/shards." in key]
        assert len(shards) == min(count, 2)
        (current,) = [name for name in open_files(objects.url()).list("manifest") if name.startswith("shards.")]
        records, damaged = records_in(objects.read(f"x.zarr/manifest/{current}"))
        assert not damaged
        assert sorted(latest(records, "block")) == list(range(count))


def test_nothing_to_push_yet(s3: S3, local: Path) -> None:
    objects = s3.make_bucket()
    only(local)
    with pytest.raises(StoreIncomplete):
        push(local, objects.url(), PushOptions())
    assert objects.keys() == []
    assert os.environ["AWS_ENDPOINT_URL"] == s3.endpoint
