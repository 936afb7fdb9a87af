"""The store commands that only read, on a store in a bucket: they say the same as of the folder it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from s3_server import S3, s3_fixture, s3_process_fixture  # noqa: F401
from small_store import make_small_store

from manifests.store_push import PushOptions, push
from shared.cli import cli
from shared.errors import ConfigRefused, StoreMissing


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["store", *map(str, arguments)])


def facts(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json").stdout))


def test_a_bucket_is_verified_described_and_compared(s3: S3, tmp_path: Path) -> None:
    bucket = s3.make_bucket()
    local, url = make_small_store(tmp_path / "x.zarr", "int8", writers=2).path, bucket.url()
    push(local, url, PushOptions())
    whole = facts("verify", url)
    assert (whole["findings"], whole["blocks"], whole["documents"]) == ([], 2, 7)
    here, there = facts("info", local), facts("info", url)
    assert {name for name in here if here[name] != there[name]} == {"store"}
    assert facts("diff", local, url)["same"]
    key = "x.zarr/blocks/000001/topk_ids/c/0/0"
    data = bytearray(bucket.read(key))
    data[40] ^= 2
    bucket.write(key, bytes(data))
    bucket.delete("x.zarr/blocks/000000/logsumexp/c/0")
    bucket.write("x.zarr/target/tokenizer.json", b"{}")
    found = {(f["block"], f["array"], f["file"]) for f in facts("verify", url)["findings"]}
    assert found == {
        (1, "topk_ids", "blocks/000001/topk_ids/c/0/0"),
        (0, "logsumexp", "blocks/000000/logsumexp/c/0"),
        (None, "", "target/tokenizer.json"),
    }


def test_what_a_bucket_cannot_do_is_refused(s3: S3) -> None:
    url = s3.make_bucket().url()
    for refused in (("verify", url, "--repair"), ("verify", url, "--engine", "zarr"), ("gc", url)):
        assert isinstance(run(*refused).exception, ConfigRefused)
    for missing in (("verify", url), ("info", url)):
        assert isinstance(run(*missing).exception, StoreMissing)
