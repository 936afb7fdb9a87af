"""`dflash store verify`: what it says of whole, damaged and unfinished stores; a repaired store is as it was before."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import fault, flip, found, verify
from small_store import LENGTHS, SmallStore, make_small_store

from manifests.blocks import open_store, recorded_blocks
from manifests.commit import Ledger
from manifests.records import ShardRecord
from manifests.store_findings import Finding, joined
from manifests.store_verify import parse_since
from shared.documents import index_name, write_index
from shared.errors import ConfigRefused, StoreMissing
from shared.shard_file import ShardGrid

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(params=["bfloat16", "int8"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> SmallStore:
    return make_small_store(tmp_path / "x.zarr", request.param)


@pytest.mark.parametrize("more", [(), ("--threads", 1), ("--sample", 3), ("--since", "1h"), ("--engine", "zarr")])
def test_a_whole_store_is_called_whole(small: SmallStore, more: tuple[object, ...]) -> None:
    before = {path: path.read_bytes() for path in small.path.rglob("*") if path.is_file()}
    result = verify(small.path, *more)
    assert result.exit_code == 0, result.output
    assert "damages        0" in result.output
    assert {path: path.read_bytes() for path in small.path.rglob("*") if path.is_file()} == before


def test_a_damage_is_one_line_that_says_where_and_whose(small: SmallStore) -> None:
    file = "blocks/000001/topk_ids/c/0/0"
    flip(small.path / file, 300)
    result = verify(small.path)
    error = fault(result)
    assert (error.exit_code, "--repair" in str(error)) == (32, True)
    (line,) = [line for line in result.output.splitlines() if line.startswith("damage:")]
    for part in ("block 1", "topk_ids", "rows 0..216", "doc-3", "doc-4", "1 more", file, "fails its checksum"):
        assert part in line, line
    (finding,) = found(small.path)["findings"]
    assert (finding["block"], finding["array"], finding["file"]) == (1, "topk_ids", file)
    assert finding["documents"] == ["doc-3", "doc-4", "doc-5", "doc-6"]


def test_only_the_documents_of_a_damaged_chunk_are_named(tmp_path: Path) -> None:
    made = make_small_store(tmp_path / "x.zarr")
    grid = ShardGrid.of("blocks/000001", "hidden_states", made.arrays[1]["hidden_states"].shape)
    assert grid.num_chunks() > 3
    flip(made.path / grid.file(0), 2 * grid.step + 5)
    (finding,) = found(made.path)["findings"]
    first, last = 2 * grid.chunk_rows, 3 * grid.chunk_rows
    ends = np.cumsum(LENGTHS[1])
    concerned = [f"doc-{3 + i}" for i in range(4) if ends[i] > first and ends[i] - LENGTHS[1][i] < last]
    assert (finding["rows"], finding["documents"]) == ([first, last], concerned)
    assert 0 < len(concerned) < 4


PARTS: dict[str, tuple[str, str]] = {
    "identity": ("store.json", "fails its checksum"),
    "plan": ("plan.json", "fails its checksum"),
    "groups": ("blocks/zarr.json", "is not the one"),
    "target": ("target/head.safetensors", "fails its checksum"),
    "manifest": ("manifest/documents.extract-0.jsonl", "says"),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_other_file_is_checked_too(small: SmallStore, part: str) -> None:
    file, reason = PARTS[part]
    flip(small.path / file)
    findings = found(small.path)["findings"]
    assert any(f["part"] == part and f["file"] == file and reason in f["reason"] for f in findings), findings


def test_what_is_missing_only_because_nobody_made_it_yet_is_another_exit_code(small: SmallStore) -> None:
    ledger = small.path / "manifest" / "shards.extract-0.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    result = verify(small.path)
    assert fault(result).exit_code == 33
    assert "missing: block 1" in result.output
    assert "note: block 1, blocks/000001: no record says that it is done" in result.output
    assert isinstance(fault(verify(small.path.parent / "none.zarr")), StoreMissing)


def test_a_sample_and_a_time_limit_what_is_read(small: SmallStore) -> None:
    facts = found(small.path, "--sample", 2)
    assert (facts["documents"], facts["bytes"] > 0) == (2, True)
    time.sleep(0.01)
    now = time.time()
    assert found(small.path, "--since", now)["blocks"] == 0
    Ledger(small.path, "later").append(
        ShardRecord(**{name: recorded_blocks(small.path)[0][name] for name in
                       ("block", "rank", "documents", "tokens", "bytes", "seconds", "seal")})
    )  # fmt: skip
    assert found(small.path, "--since", now)["blocks"] == 1
    flip(small.path / "blocks/000001/topk_ids/c/0/0", 300)
    assert found(small.path, "--since", now)["damage"] == 0
    assert found(small.path, "--sample", 7)["damage"] == 4  # each of block 1's documents reads that chunk


def test_times_as_people_write_them() -> None:
    assert time.time() - parse_since("36h") == pytest.approx(36 * 3600, abs=5)
    assert parse_since("1970-01-02T00:00+00:00") == 86400
    assert parse_since("12.5") == 12.5
    for wrong in ("yesterday", "5 h", ""):
        with pytest.raises(ConfigRefused):
            parse_since(wrong)


def test_options_that_exclude_each_other_are_refused(small: SmallStore) -> None:
    for more in (("--sample", 3, "--since", "1h"), ("--repair", "--sample", 3), ("--repair", "--engine", "zarr")):
        assert fault(verify(small.path, *more)).exit_code == 43


def test_zarr_python_gives_a_second_opinion(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import zarr

    real = zarr.Array.__getitem__

    def other(self: zarr.Array[Any], selection: Any) -> Any:
        values = real(self, selection).copy()
        if self.path.endswith("topk_ids") and "000001" in self.path:
            values[5] += 1
        return values

    monkeypatch.setattr(zarr.Array, "__getitem__", other)
    (finding,) = found(small.path, "--engine", "zarr")["findings"]
    assert (finding["block"], finding["array"]) == (1, "topk_ids")
    assert "from row 5 on" in finding["reason"]


def test_the_documents_cache_is_compared_with_the_blocks(small: SmallStore) -> None:
    opened = open_store(small.path)
    documents = opened.documents
    documents.columns["n_supervised"][1] += 1
    write_index(small.path, opened.snapshot, documents)
    (finding,) = found(small.path)["findings"]
    assert finding["file"] == index_name(opened.snapshot)
    assert "n_supervised" in finding["reason"]
    assert verify(small.path, "--repair").exit_code == 0
    assert not (small.path / index_name(opened.snapshot)).exists()


def test_help_of_every_store_command_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom shared.cli import cli\n"
        "cli.main(['store', sys.argv[1], '--help'], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'transformers', 'zarr', 'duckdb', 'numpy', 'rich'} & set(sys.modules)))"
    )
    for command in ("verify", "info", "gc", "diff"):
        done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "heavy: []", command
        assert f"dflash store {command}" in done.stdout


def test_blocks_that_lack_alike_are_one_line() -> None:
    def missing(block: int, reason: str = "planned") -> Finding:
        return Finding(kind="missing", part="block", block=block, file=f"blocks/{block:06d}", reason=reason)

    told = [finding.text() for finding in joined([*map(missing, (1, 2, 3, 7)), missing(8, "other")])]
    assert told == [
        "missing: block 1, blocks/000001 and the 2 after it: planned",
        "missing: block 7, blocks/000007: planned",
        "missing: block 8, blocks/000008: other",
    ]
