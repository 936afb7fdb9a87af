"""A store in a bucket reads as the one in a folder does, by few requests, and every failure is one clear line.

Against a real S3 server process; see tests/s3_server.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3_server import S3, Objects, Wire, s3_fixture, s3_process_fixture, wire_fixture  # noqa: F401
from toy_store import counting_texts, make_store

import shared.bucket
from manifests.blocks import open_store
from manifests.commit import read
from manifests.store_push import PushOptions, push
from shared.bucket import Bucket
from shared.errors import ConfigRefused, DflashError, StorageRefused, StoreDamaged, StoreIncomplete, StoreMissing
from shared.object_files import ObjectFiles
from shared.store_files import LocalFiles, ShortFile, open_files


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return make_store(tmp_path / "x.zarr", counting_texts(24), blocks=3)


@pytest.fixture
def there(s3: S3, local: Path) -> Objects:
    objects = s3.make_bucket()
    push(local, objects.url(), PushOptions())
    return objects


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_every_array_of_every_document_is_the_local_one(
    s3: S3,
    tmp_path: Path,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_store(tmp_path / "p.zarr", counting_texts(30), blocks=4, precision=precision)
    url = s3.make_bucket().url("deep/er/p.zarr")
    push(path, url, PushOptions())
    monkeypatch.setattr(shared.bucket, "PART_BYTES", 700)  # ranges of several parts
    monkeypatch.setattr("shared.object_files._KEPT_RANGE_BYTES", 1000)
    here, away = open_store(path), open_store(url + "/")
    assert away.identity == here.identity
    assert away.snapshot == here.snapshot
    for name, column in here.documents.columns.items():
        np.testing.assert_array_equal(away.documents.columns[name], column, strict=True)
    features = ("hidden_states",) if precision == "bfloat16" else ("hidden_states_q", "hidden_states_scale")
    for ref in here.documents:
        ours, theirs = (store.read_document(ref, ("input_ids", "loss_mask", *features)) for store in (here, away))
        for name, values in ours.items():
            np.testing.assert_array_equal(theirs[name], values, strict=True)
    for name in here.sealed(2):
        np.testing.assert_array_equal(away.read_block_array(2, name), here.read_block_array(2, name), strict=True)
    heads = here.load_head(), away.load_head()
    assert all((heads[0][name] == heads[1][name]).all() for name in heads[0])


def test_opening_costs_a_handful_of_requests_and_a_document_one_range_per_array(
    s3: S3,
    wire: Wire,
    tmp_path: Path,
) -> None:
    objects = s3.make_bucket()
    push(make_store(tmp_path / "x.zarr", counting_texts(24), blocks=2, hidden=512), objects.url(), PushOptions())
    wire.requests.clear()
    store = open_store(objects.url())
    assert len(store.documents) == 24
    assert len(wire.requests) <= 7, wire.requests
    store.read_document(store.documents[0])
    wire.requests.clear()
    store.read_document(store.documents[0])
    assert wire.requests == [], "what was just read was asked for again"
    far = next(ref for ref in store.documents if ref.block == 0 and ref.start > 64 and ref.start // 64 != ref.length)
    store.read_document(far)
    asked = Counter((method, path.partition("/blocks/000000/")[2]) for method, path, span in wire.requests if span)
    assert asked["GET", "hidden_states/c/0/0/0"] == 1, wire.requests
    assert len(wire.requests) == 1, "the other arrays lie in one chunk, which was read before"


def test_ranges_into_any_buffers_are_those_of_the_file(there: Objects, local: Path) -> None:
    name = "blocks/000001/hidden_states/c/0/0/0"
    files, size = ObjectFiles(there.url()), (local / name).stat().st_size
    assert files.size(name) == size
    assert files.read_bytes(name) == (local / name).read_bytes()

    @given(st.integers(0, size), st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.booleans())
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def check(offset: int, lengths: list[int], ask_size: bool) -> None:
        if ask_size:
            files.size(name)
        buffers = [[np.zeros(length, np.uint8) for length in lengths] for _ in range(2)]
        if offset + sum(lengths) > size:
            with pytest.raises(ShortFile):
                files.read_into(name, offset, buffers[0])
            return
        files.read_into(name, offset, buffers[0])
        LocalFiles(local).read_into(name, offset, buffers[1])
        for ours, theirs in zip(*buffers, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    check()


def test_names_sizes_and_what_is_not_there(there: Objects, local: Path) -> None:
    files = open_files(there.url())
    assert files.list("blocks/000002") == ["zarr.json"]
    assert files.list("target") == LocalFiles(local).list("target")
    assert files.list("nothing") == []
    assert files.exists("plan.json")
    assert not files.exists("plan")
    for action in (files.read_bytes, files.size, lambda name: files.read_into(name, 0, [bytearray(3)])):
        with pytest.raises(FileNotFoundError):
            action("blocks/000000/nothing")
    there.write("x.zarr/empty", b"")
    assert files.size("empty") == 0
    assert files.read_bytes("empty") == b""
    assert files.show("plan.json") == there.url() + "/plan.json"


def test_a_store_that_another_tool_copied_reads_too(s3: S3, local: Path) -> None:
    objects = s3.make_bucket()
    for path in local.rglob("*"):
        if path.is_file():
            objects.write(f"copied/{path.relative_to(local)}", path.read_bytes())
    store = open_store(objects.url("copied"))
    assert store.snapshot == open_store(local).snapshot
    assert len(store.documents) == 24
    assert read(objects.url("copied"), "shards") == read(local, "shards")


def test_google_storage_through_the_same_requests(there: Objects, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", s3.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    store = open_store(f"gs://{there.name}/x.zarr")
    assert [ref.length for ref in store.documents] == [ref.length for ref in open_store(there.url()).documents]
    store.read_document(store.documents[0])


def refused(kind: type[DflashError], url: str, *parts: str) -> None:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        open_store(url)
    assert time.monotonic() - started < 30  # the library's own patience is three minutes
    assert "\n" not in str(caught.value)
    for part in (url, *parts):
        assert part in str(caught.value)


def test_who_may_not_or_cannot_is_told_in_one_line(there: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.delenv("AWS_ACCESS_KEY_ID")
        context.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        with pytest.raises(StorageRefused) as caught:
            open_store(there.url())
        assert "no credentials" in str(caught.value)
        assert "AWS_SKIP_SIGNATURE=true" in str(caught.value)
        context.setenv("AWS_SKIP_SIGNATURE", "true")
        refused(StorageRefused, f"s3://{there.name}", "AWS_ACCESS_KEY_ID")  # half of a pair of keys
        context.delenv("AWS_SECRET_ACCESS_KEY")
        refused(StorageRefused, there.url(), "was refused", "AWS_ACCESS_KEY_ID")
    with monkeypatch.context() as context:
        context.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        refused(StorageRefused, there.url(), "http://127.0.0.1:9", "does not answer")
    with pytest.raises(StoreMissing) as missing:
        open_store("s3://no-such-bucket/x.zarr")
    assert "no-such-bucket does not exist" in str(missing.value)
    refused(StoreMissing, there.url("other.zarr"), "dflash store push")
    for endpoint in ("localhost:9000", "http://"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        refused(StorageRefused, f"s3://{there.name}", f"the endpoint {endpoint!r} is no address")
    for url in ("az://container/x", "s3:///x", "s3://bucket/x?y=1"):
        refused(ConfigRefused, url)


def test_keys_may_come_from_the_file_that_other_tools_read(
    there: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "keys").write_text("[work]\naws_access_key_id = test\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    refused(StorageRefused, there.url().split("/x")[0], "no credentials")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert len(open_store(there.url()).documents) == 24


def test_exit_codes_and_the_missing_library_on_the_command_line(there: Objects) -> None:
    code = "import sys, shared.cli\nif sys.argv.pop(1) == 'without': sys.modules['obstore'] = None\nshared.cli.main()"
    for first, url, exit_code, part in (
        ("with", there.url("nothing"), 31, "no teacher store"),
        ("without", there.url(), 43, "pip install 'dflash-offline[s3]'"),
    ):
        words = [sys.executable, "-c", code, first, "store", "pull", url, "y.zarr"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
        assert done.returncode == exit_code, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert part in done.stderr


@pytest.mark.parametrize("fault", ["busy", "cut", "lost answer"])
def test_a_stumbling_network_is_retried_by_the_library(
    there: Objects,
    wire: Wire,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    wire.rule = lambda number, _method, _path: fault if number % 3 == 0 else "pass"
    store = open_store(there.url())
    assert store.read_document(store.documents[0])["input_ids"].size


def test_damage_in_the_bucket_is_named(there: Objects, local: Path) -> None:
    for key in ("blocks/000000/input_ids/c/0", "blocks/000001/zarr.json", "blocks/000002/loss_mask/zarr.json"):
        good, block = there.read(f"x.zarr/{key}"), int(key.split("/")[1])
        array = key.split("/")[2] if "input_ids" in key or "loss_mask" in key else "input_ids"
        for bad in (b"", good[:-1], bytes([good[0] ^ 1]) + good[1:], None):
            there.delete(f"x.zarr/{key}")
            if bad is not None:
                there.write(f"x.zarr/{key}", bad)
            with pytest.raises(StoreDamaged) as caught:
                open_store(there.url()).read_block_array(block, array)
            for part in (f"{there.url()}/{key}", f"block {block}", "dflash store push"):
                assert part in str(caught.value)
        there.write(f"x.zarr/{key}", good)
    head = there.read("x.zarr/manifest/head.json")
    there.write("x.zarr/manifest/head.json", head.replace(b'"complete": true', b'"complete":false'))
    refused(StoreDamaged, there.url(), "manifest/head.json", "checksum")
    there.write("x.zarr/manifest/head.json", head)
    (shards,) = [key for key in there.keys("x.zarr/manifest") if "shards." in key]
    records = there.read(shards)
    there.write(shards, records[: len(records) // 2])
    refused(StoreDamaged, there.url(), shards.rpartition("/")[2])
    there.delete(shards)
    refused(StoreDamaged, there.url(), shards.rpartition("/")[2], "missing")


def test_a_begun_push_is_incomplete_not_a_store(there: Objects) -> None:
    for key in there.keys("x.zarr/manifest"):
        there.delete(key)
    with pytest.raises(StoreIncomplete) as caught:
        open_store(there.url())
    assert "0 of 3" in str(caught.value)


def test_the_target_is_copied_once_checked_and_copied_again_when_it_spoils(there: Objects, wire: Wire) -> None:
    copy = open_store(there.url()).target_dir
    assert copy.is_relative_to(os.environ["DFLASH_CACHE"])
    assert (copy / "head.safetensors").read_bytes() == there.read("x.zarr/target/head.safetensors")
    wire.requests.clear()
    assert open_store(there.url()).target_dir == copy
    assert not [path for _, path, _ in wire.requests if path.endswith("head.safetensors")]
    (copy / "head.safetensors").write_bytes(b"spoiled")
    assert open_store(there.url()).target_dir == copy
    assert (copy / "head.safetensors").read_bytes() == there.read("x.zarr/target/head.safetensors")
    there.write("x.zarr/target/config.json", b"{}")
    assert open_store(there.url()).target_dir == copy
    (copy / "config.json").unlink()
    with pytest.raises(StoreDamaged) as caught:
        _ = open_store(there.url()).target_dir
    assert "target/config.json" in str(caught.value)
    assert not copy.exists()
    assert [path.name for path in copy.parent.iterdir()] == []


def test_a_list_of_files_that_points_outside_is_not_followed(there: Objects) -> None:
    from shared.target_files import list_bytes

    there.write("x.zarr/target/files.json", list_bytes({"../../evil": {"bytes": 2, "crc32c": "0", "blake2b": "0"}}))
    with pytest.raises(StoreDamaged) as caught:
        _ = open_store(there.url()).target_dir
    assert "outside" in str(caught.value)


def test_conditions_on_writes(there: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("etag", "disabled"):
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", setting)
        bucket = Bucket(there.url("conditions"))
        bucket.delete(["a"])
        bucket.create("a", b"1")
        with pytest.raises(shared.bucket.Changed):
            bucket.create("a", b"2")
        data, version = bucket.read_with_version("a")
        bucket.replace("a", data + b"+", version)
        assert bucket.read("a") == b"1+"
        if setting == "etag":
            with pytest.raises(shared.bucket.Changed):
                bucket.replace("a", b"3", version)
