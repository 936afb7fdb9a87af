"""`dflash store info`, `gc` and `diff`: what they say is what lies there; gc takes nothing that is part of a store."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from commands import fault
from small_store import HIDDEN, LENGTHS, TAPS, SmallStore, make_small_store, write_store_of

from manifests.blocks import open_store, recorded_blocks
from manifests.commit import Ledger
from manifests.lines import line_of
from manifests.records import DocumentRecord, ShardRecord
from manifests.store_comparison import round_to_bf16
from manifests.store_gc import require_only_unfinished
from shared.atomic import owned
from shared.cli import cli
from shared.documents import write_index
from shared.errors import RunBusy, StoreDamaged, StoreMissing, StoresDiffer
from shared.quantise import channel_scales, decode, encode
from shared.store_layout import ARRAYS, from_bf16

PRECISIONS = ("bfloat16", "int8")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["store", *map(str, arguments)])


def facts(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json").stdout))


def drop_block(store: Path, block: int) -> None:
    """As if it had not been made yet."""
    shutil.rmtree(store / f"blocks/{block:06d}")
    for path in store.glob("manifest/shards.*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for line in lines if json.loads(line)["block"] != block))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_info_counts_what_is_there(tmp_path: Path, precision: str) -> None:
    path = make_small_store(tmp_path / "x.zarr", precision, writers=2).path
    told = facts("info", path)
    sizes: dict[str, int] = {}
    for file in path.glob("blocks/0*/*/**/*"):
        if file.is_file():
            array = file.relative_to(path).parts[2]
            sizes[array] = sizes.get(array, 0) + file.stat().st_size
    sizes["metadata"] = sum(file.stat().st_size for file in path.glob("blocks/0*/zarr.json"))
    assert told["bytes_by_array"] == sizes
    assert told["bytes"] == sum(sizes.values())
    assert (told["documents"], told["tokens"]) == (7, sum(map(sum, LENGTHS)))
    assert (told["blocks"], told["planned_blocks"]) == (2, 2)
    documents = open_store(path).documents
    for split, held in (("train", False), ("heldout", True)):
        part = documents.take(documents.heldout == held)
        expected = (len(part), int(part.length.sum()), int(part.n_supervised.sum()))
        assert tuple(told["by_split"][split].values()) == expected
    assert {name: counts["documents"] for name, counts in told["by_source"].items()} == {"a.jsonl": 4, "b.jsonl": 3}
    first, second = (sum(lengths) for lengths in LENGTHS)
    assert told["topk_mass"] == pytest.approx((0.5 * first + 0.75 * second) / (first + second))
    assert told["skipped"] == {"nonfinite": 1}
    assert [work["blocks"] for work in told["writers"].values()] == [1, 1]
    assert told["relative_error"].keys() == ({"0", "1"} if precision == "int8" else set())
    text = run("info", path)
    assert text.exit_code == 0
    for part in ("329 tokens", "2 of 2", precision, "from a.jsonl", "top-k holds", "extract-1"):
        assert part in text.output


def test_info_of_a_store_in_the_making_and_of_none(tmp_path: Path) -> None:
    path = make_small_store(tmp_path / "x.zarr").path
    drop_block(path, 1)
    told = facts("info", path)
    assert (told["blocks"], told["planned_blocks"], told["documents"]) == (1, 2, 3)
    assert sum(counts["documents"] for counts in told["by_source"].values()) == 3
    drop_block(path, 0)
    (path / "plan.json").unlink()
    empty = facts("info", path)
    assert (empty["blocks"], empty["planned_blocks"], empty["bytes_per_token"], empty["by_split"]) == (
        0,
        None,
        None,
        {},
    )
    assert run("info", path).exit_code == 0
    assert isinstance(fault(run("info", tmp_path / "none.zarr")), StoreMissing)


def test_documents_of_an_earlier_attempt_are_not_counted_twice(tmp_path: Path) -> None:
    path = make_small_store(tmp_path / "x.zarr").path
    lines = (path / "manifest/documents.extract-0.jsonl").read_bytes()
    (path / "manifest/documents.other.jsonl").write_bytes(lines)
    assert sum(counts["documents"] for counts in facts("info", path)["by_split"].values()) == 7


@pytest.fixture
def littered(tmp_path: Path) -> tuple[SmallStore, dict[str, int]]:
    """A store and what lies in it that nobody needs: {path: bytes}."""
    made = make_small_store(tmp_path / "x.zarr")
    opened = open_store(made.path)
    write_index(made.path, opened.snapshot, opened.documents)
    left = {
        "blocks/.000009.dead.partial/topk_ids/c": 10,
        ".store.json.dead.partial": 20,
        "blocks/000007/zarr.json": 30,
        f"index/documents-{'0' * 32}.bin": 40,
    }
    for name, size in {**left, "quarantine/000003-20260101T000000/zarr.json": 50}.items():
        (made.path / name).parent.mkdir(parents=True, exist_ok=True)
        (made.path / name).write_bytes(bytes(size))
    return made, left


def test_gc_lists_first_and_removes_on_request(littered: tuple[SmallStore, dict[str, int]]) -> None:
    made, left = littered
    before = {path for path in made.path.rglob("*") if path.is_file()}
    listed = run("gc", made.path)
    assert listed.exit_code == 0
    assert f"{sum(left.values())}" in listed.output
    assert listed.output.count("would remove") == len(left)
    assert {path for path in made.path.rglob("*") if path.is_file()} == before
    done = run("gc", made.path, "--apply")
    assert "given back  100" in done.output
    kept = {path for path in made.path.rglob("*") if path.is_file()}
    assert before - kept == {made.path / name for name in left}
    assert run("gc", made.path).output.count("would remove") == 0
    assert run("verify", made.path).exit_code == 0
    assert run("gc", made.path, "--keep-days", 1).output.count("would remove") == 0
    run("gc", made.path, "--apply", "--keep-days", 0)
    assert not (made.path / "quarantine/000003-20260101T000000").exists()
    assert run("verify", made.path).exit_code == 0


def test_gc_counts_only_what_comes_back(littered: tuple[SmallStore, dict[str, int]], tmp_path: Path) -> None:
    made, left = littered
    os.link(made.path / "blocks/000007/zarr.json", tmp_path / "elsewhere")
    assert f"given back  {sum(left.values()) - 30}" in run("gc", made.path, "--apply").output


def test_gc_keeps_away_from_stores_at_work_or_damaged(littered: tuple[SmallStore, dict[str, int]]) -> None:
    made, _ = littered
    before = {path for path in made.path.rglob("*") if path.is_file()}
    with owned(made.path):
        for more in ((), ("--apply",)):
            assert isinstance(fault(run("gc", made.path, *more)), RunBusy)
    file = made.path / "manifest/shards.extract-0.jsonl"
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)
    error = fault(run("gc", made.path, "--apply"))  # its block is whole and would go
    assert isinstance(error, StoreDamaged)
    assert "line 1" in str(error)
    assert {path for path in made.path.rglob("*") if path.is_file()} - before <= {made.path / ".owner"}
    assert isinstance(fault(run("gc", made.path.parent / "none.zarr")), StoreMissing)


def test_equal_stores_do_not_differ(tmp_path: Path) -> None:
    one = make_small_store(tmp_path / "a.zarr").path
    other = make_small_store(tmp_path / "b.zarr").path
    for more in ((), ("--content",)):
        result = run("diff", one, other, *more)
        assert result.exit_code == 0, result.output
    told = facts("diff", one, other, "--content")
    assert (told["same"], told["documents"]["common"], told["blocks"]["same_seal"]) == (True, 7, 2)
    assert told["content"].keys() == {name for name in ARRAYS if ARRAYS[name].rows == "tokens" and "_q" not in name
                                      and "scale" not in name}  # fmt: skip
    assert all(difference["differing"] == 0 for difference in told["content"].values())


def test_differences_are_named_with_both_sides(tmp_path: Path) -> None:
    one = make_small_store(tmp_path / "a.zarr").path
    other = make_small_store(tmp_path / "b.zarr", "int8", seed=3).path
    drop_block(other, 1)
    records = other / "manifest/documents.extract-0.jsonl"
    lines = records.read_text().splitlines()
    changed = json.loads(lines[0]) | {"token_sha": "f" * 16}
    records.unlink()
    kept = [json.loads(line) for line in lines[1:]]
    records.write_bytes(b"".join(line_of({k: v for k, v in r.items() if k != "crc"}) for r in [changed, *kept]))
    result = run("diff", one, other)
    error = fault(result)
    assert isinstance(error, StoresDiffer)
    assert error.exit_code == 35
    for part in ("precision", "last_hidden", "6 documents"):
        assert part in str(error) or part in result.output
    told = facts("diff", one, other)
    assert told["identity"]["precision"] == ["bfloat16", "int8"]
    assert told["documents"]["common"] == 2
    assert [doc_id for doc_id, _, _ in told["documents"]["only_first"]] == ["doc-0", "doc-3", "doc-4", "doc-5", "doc-6"]
    assert told["documents"]["other_tokens"] == ["doc-0"]
    assert told["blocks"]["same_seal"] == 0


def test_a_bf16_and_an_int8_store_show_the_error_of_the_codes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokens = sum(map(sum, LENGTHS))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, TAPS, HIDDEN, generator=generator).to(torch.bfloat16)
    last = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    exact = {"hidden_states": bits(hidden), "last_hidden_state": bits(last)}
    codes: dict[str, np.ndarray[Any, Any]] = {}
    errors = {}
    for name, values in (("hidden_states", hidden), ("last_hidden_state", last)):
        channels = channel_scales(values)
        encoded = encode(values, channels)
        codes |= {
            f"{name}_q": encoded.codes.numpy(), f"{name}_scale": encoded.scales.numpy(),
            f"{name}_channel": channels.numpy(),
        }  # fmt: skip
        errors[name] = encoded.relative_error.numpy()
    one = write_store_of(tmp_path / "a.zarr", "bfloat16", exact)
    other = write_store_of(tmp_path / "b.zarr", "int8", codes)
    told = facts("diff", one, other, "--content")
    for name, error in errors.items():
        assert told["content"][name]["largest"] == pytest.approx(error.max(), rel=1e-3)
        assert told["content"][name]["mean"] == pytest.approx(error.mean(), rel=1e-3)
    assert told["content"]["topk_ids"]["differing"] == 0
    assert told["not_compared"] == {}


def bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.view(torch.int16).numpy().view(np.uint16)


def test_codes_are_decoded_as_training_decodes_them() -> None:
    values = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * 100
    channels = channel_scales(values)
    encoded = encode(values, channels)
    theirs = decode(encoded.codes, encoded.scales, channels).float().numpy()
    ours = round_to_bf16(encoded.codes.numpy() * encoded.scales.numpy()[..., None] * channels.numpy())
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(from_bf16(bits(values.to(torch.bfloat16))), values.to(torch.bfloat16).float().numpy())


def test_one_value_that_differs_is_found(tmp_path: Path) -> None:
    one = write_store_of(tmp_path / "a.zarr", "bfloat16", {})
    logsumexp = open_store(one).read_block_array(1, "logsumexp")
    changed = np.concatenate([open_store(one).read_block_array(0, "logsumexp"), logsumexp])
    changed[150] *= 1.5
    other = write_store_of(tmp_path / "b.zarr", "bfloat16", {"logsumexp": changed})
    assert run("diff", one, other).exit_code == 0  # identity and documents are the same
    result = run("diff", one, other, "--content")
    assert fault(result).exit_code == 35
    told = facts("diff", one, other, "--content")["content"]["logsumexp"]
    assert (told["differing"], told["largest"]) == (1, pytest.approx(0.5, rel=1e-5))


def test_a_later_record_of_another_build_counts(tmp_path: Path) -> None:
    made = make_small_store(tmp_path / "x.zarr")
    record = recorded_blocks(made.path)[1]
    names = ("rank", "documents", "tokens", "bytes", "seconds", "seal")
    Ledger(made.path, "repair").append(
        ShardRecord(block=1, state="withdrawn", **{name: record[name] for name in names})
    )
    assert facts("info", made.path)["blocks"] == 1
    assert "blocks/000001: a block without a record" in run("gc", made.path).output


def test_gc_takes_no_block_whose_records_were_lost(tmp_path: Path) -> None:
    made = make_small_store(tmp_path / "x.zarr")
    (records,) = made.path.glob("manifest/shards.*.jsonl")
    text = records.read_bytes()
    lines = text.splitlines(keepends=True)
    records.write_bytes(lines[0])  # one block lost its record: what a kill leaves
    assert run("gc", made.path).output.count("a block without a record") == len(lines) - 1 == 1
    records.unlink()
    for more in ((), ("--apply",)):
        error = fault(run("gc", made.path, *more))
        assert isinstance(error, StoreDamaged)
        assert "not one shard record" in str(error)
    records.write_bytes(text)
    assert "would remove" not in run("gc", made.path).output


def test_gc_tells_lost_records_of_one_writer_from_killed_writers(tmp_path: Path) -> None:
    made = make_small_store(tmp_path / "x.zarr", writers=2)
    files = sorted(made.path.glob("manifest/shards.*.jsonl"))
    assert len(files) == 2
    require_only_unfinished(made.path, [made.path / "blocks/000000", made.path / "blocks/000001"], any_recorded=True)
    for path in made.path.glob("manifest/documents.*.jsonl"):
        path.write_bytes(b"")
    ledger = Ledger(made.path, "one")
    for block, record in recorded_blocks(made.path).items():
        ledger.append(
            DocumentRecord(
                document_index=block,
                doc_id=str(block),
                source="s",
                line=1,
                n_tokens=1,
                n_supervised=1,
                split="train",
                block=block,
                seal=record["seal"],
            )
        )
    with pytest.raises(StoreDamaged) as caught:
        require_only_unfinished(made.path, [made.path / "blocks/000000", made.path / "blocks/000001"], True)
    assert "2 blocks of writer one" in str(caught.value)
