"""Which blocks count: the newest whole record of each decides, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_store import counting_texts, make_store

from manifests.blocks import open_store, planned_blocks, recorded_blocks
from manifests.commit import Ledger, files_of, read
from manifests.records import ShardRecord
from shared.documents import index_name
from shared.errors import StoreDamaged, StoreIncomplete, StoreMissing


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "x.zarr", counting_texts(9), blocks=3)


def withdraw(store: Path, block: int, state: str = "withdrawn") -> None:
    seal = next(record["seal"] for record in read(store, "shards") if record["block"] == block)
    zeros = {"rank": 0, "documents": 3, "tokens": 1, "bytes": 1, "seconds": 0.0}
    Ledger(store, "verify").append(ShardRecord(block=block, seal=seal, state=state, **zeros))  # type: ignore[arg-type]


def test_the_newest_record_of_a_block_decides(store: Path) -> None:
    assert list(recorded_blocks(store)) == [0, 1, 2]
    withdraw(store, 1)
    assert list(recorded_blocks(store)) == [0, 2]
    withdraw(store, 1, "done")
    assert list(recorded_blocks(store)) == [0, 1, 2]
    assert recorded_blocks(store)[1]["writer"] == "verify"


def test_a_finished_store_opens_with_all_its_documents(store: Path) -> None:
    opened = open_store(store)
    assert (planned_blocks(store), sorted(opened.blocks)) == (3, [0, 1, 2])
    assert [ref.index for ref in opened.documents] == list(range(9))
    moved = store.rename(store.parent / "another name.zarr")
    assert open_store(moved).snapshot == opened.snapshot


def test_an_unfinished_store_is_refused_unless_a_part_will_do(store: Path) -> None:
    withdraw(store, 1)
    with pytest.raises(StoreIncomplete, match=r"2 of 3 planned blocks, the first missing is 1; finish") as caught:
        open_store(store)
    assert caught.value.exit_code == 33
    assert [ref.index for ref in open_store(store, partial=True).documents] == [0, 1, 2, 6, 7, 8]
    for block in (0, 2):
        withdraw(store, block)
    with pytest.raises(StoreIncomplete, match="0 of 3 planned blocks, the first missing is 0"):
        open_store(store, partial=True)


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_damaged_record_is_no_record_and_is_named(store: Path, line: int) -> None:
    path = files_of(store, "shards")[0]
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = lines[line - 1].replace(b'"documents":3', b'"documents":4')
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(StoreIncomplete) as caught:
        open_store(store)
    message = str(caught.value)
    assert f"the first missing is {line - 1}" in message
    assert f"line {line} of {path} (its bytes give" in message
    assert len(open_store(store, partial=True).documents) == 6


def test_a_record_cut_short_is_no_record(store: Path) -> None:
    path = files_of(store, "shards")[0]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StoreIncomplete, match=r"2 of 3 planned blocks, the first missing is 2; finish"):
        open_store(store)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "another store's", "no plan"])
def test_a_plan_that_cannot_be_trusted(store: Path, damage: str) -> None:
    path = store / "plan.json"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "flipped":
        plan = json.loads(path.read_text())
        plan["blocks"][2] = [6, 8]
        path.write_text(json.dumps(plan))
    elif damage == "no plan":
        path.write_text(json.dumps([1]))
    else:
        other = make_store(store.parent / "y.zarr", counting_texts(4), blocks=2)
        path.write_bytes((other / "plan.json").read_bytes())
    for partial in (False, True):
        with pytest.raises(StoreDamaged, match="plan"):
            open_store(store, partial=partial)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        open_store(tmp_path / "nothing.zarr")
    assert recorded_blocks(tmp_path / "nothing.zarr") == {}


def test_a_record_of_another_block_does_not_open_this_one(store: Path) -> None:
    seals = {record["block"]: record["seal"] for record in read(store, "shards")}
    zeros = {"rank": 0, "documents": 3, "tokens": 1, "bytes": 1, "seconds": 0.0}
    Ledger(store, "forger").append(ShardRecord(block=1, seal=seals[2], **zeros))  # type: ignore[arg-type]
    with pytest.raises(StoreDamaged, match="block 1"):
        open_store(store).documents  # noqa: B018 - read when first asked for


def test_documents_of_many_blocks_are_cached_once_complete(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(40), blocks=40)
    withdraw(store, 7)
    assert len(open_store(store, partial=True).documents) == 39
    assert not (store / "index").exists(), "a part is no snapshot to keep"
    withdraw(store, 7, "done")
    opened = open_store(store)
    cache = store / index_name(opened.snapshot)
    assert cache.is_file()
    for block in range(40):
        (store / "blocks" / f"{block:06d}" / "zarr.json").rename(store / "blocks" / f"{block:06d}" / "hidden")
    again = open_store(store)
    assert [ref for ref in again.documents] == [ref for ref in opened.documents]
    with pytest.raises(StoreDamaged, match="block 0"):
        again.read_document(again.documents[0])


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(40), blocks=40)
    (store / "index").touch()
    assert len(open_store(store).documents) == 40
