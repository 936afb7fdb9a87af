"""`dflash store verify --repair`: set aside, withdrawn, made again by the command it names, and then as before."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import fault, flip, found, run, verify, workers_in_process
from small_store import SmallStore, make_small_store
from tiny_target import save_target

import stage1_extract.extract as extract_module
from manifests.blocks import recorded_blocks
from manifests.commit import Ledger, read
from manifests.making_command import making_command
from manifests.records import RunRecord
from shared.atomic import owned
from shared.errors import RunBusy, StoreDamaged, StoreIncomplete, StoreMissing
from stage1_extract import worker

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(params=["bfloat16", "int8"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> SmallStore:
    return make_small_store(tmp_path / "x.zarr", request.param)


def test_a_store_under_extraction_is_not_repaired(small: SmallStore) -> None:
    flip(small.path / "blocks/000001/topk_ids/c/0/0", 300)
    with owned(small.path):
        assert isinstance(fault(verify(small.path, "--repair")), RunBusy)
        assert isinstance(fault(verify(small.path)), StoreDamaged)
    assert not (small.path / "quarantine").exists()


def test_a_whole_store_needs_no_repair(small: SmallStore) -> None:
    before = sorted(small.path.rglob("*"))
    assert verify(small.path, "--repair").exit_code == 0
    assert {path for path in small.path.rglob("*")} - set(before) == {small.path / ".owner"}
    assert isinstance(fault(verify(small.path.parent / "none.zarr", "--repair")), StoreMissing)
    assert not (small.path.parent / "none.zarr").exists()


@pytest.mark.parametrize("file", ["store.json", "zarr.json", "blocks/zarr.json"])
@pytest.mark.parametrize("kind", ["flip", "unlink", "a folder in its place", "other JSON"])
def test_the_identity_is_restored_from_its_copy(small: SmallStore, file: str, kind: str) -> None:
    path, before = small.path / file, (small.path / file).read_bytes()
    if kind == "flip":
        flip(path)
    elif kind == "other JSON":
        path.write_text('{"a": 1}')
    else:
        path.unlink()
        if kind != "unlink":
            path.mkdir()
    assert fault(verify(small.path)).exit_code == 32
    result = verify(small.path, "--repair")
    assert result.exit_code == 0, result.output
    assert path.read_bytes() == before
    assert verify(small.path).exit_code == 0


@pytest.mark.parametrize("file", ["store.json", "zarr.json"])
def test_which_of_two_whole_identities_is_right_is_for_people_to_say(small: SmallStore, file: str) -> None:
    other = make_small_store(small.path.parent / "other.zarr").path
    shutil.copy(other / file, small.path / file)
    ours, theirs = (json.loads((path / "store.json").read_text())["store_uuid"] for path in (small.path, other))
    error = fault(verify(small.path, "--repair"))
    assert error.exit_code == 32
    assert theirs in str(error)
    assert (small.path / file).read_bytes() == (other / file).read_bytes()
    assert ours in str(error)


def test_an_identity_without_a_witness_is_left_alone(small: SmallStore) -> None:
    flip(small.path / "store.json")
    flip(small.path / "zarr.json", 300)
    before = (small.path / "store.json").read_bytes()
    error = fault(verify(small.path, "--repair"))
    assert error.exit_code == 32
    assert (small.path / "store.json").read_bytes() == before


def test_the_command_is_that_of_the_newest_run_for_where_the_store_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "began" / "rows here").mkdir(parents=True)
    config = {
        "target": "Org/Model", "data": "rows here", "out": "x.zarr", "shards": 8, "target_layer_ids": [1, 9],
        "mask_token_id": None, "flag": True, "other": False,
    }  # fmt: skip
    ledger = Ledger(tmp_path / "moved.zarr", "extract-a")
    detail = {"config": config, "provenance": {"cwd": str(tmp_path / "began")}}
    ledger.append(RunRecord(run_id="a", command="extract", state="started", detail=detail))
    refused = {"config": {**config, "shards": 3}, "provenance": {"cwd": "."}}
    ledger.append(RunRecord(run_id="b", command="extract", state="started", detail=refused))
    ledger.append(RunRecord(run_id="b", command="extract", state="refused", exit_code=30))
    monkeypatch.chdir(tmp_path)
    assert shlex.split(making_command(tmp_path / "moved.zarr") or "") == [
        "dflash", "extract", "--target", "Org/Model", "--data", str(tmp_path / "began" / "rows here"),
        "--out", str(tmp_path / "moved.zarr"), "--shards", "8", "--target-layer-ids", "1,9", "--flag", "--no-other",
    ]  # fmt: skip
    merge = {"config": {"out": "m.zarr", "stores": ["a", "b"], "on_duplicate": "keep-all", "copy": False}}
    Ledger(tmp_path / "m.zarr", "m").append(RunRecord(run_id="m", command="store merge", state="started", detail=merge))
    assert shlex.split(making_command(tmp_path / "m.zarr") or "") == [
        "dflash", "store", "merge", str(tmp_path / "m.zarr"), "a", "b", "--on-duplicate", "keep-all", "--no-copy",
    ]  # fmt: skip
    assert making_command(tmp_path / "began") is None


# From here on with a target: what is set aside is made again, byte by byte.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/x.zarr: a finished extraction of ten documents in several blocks."""
    root = tmp_path_factory.mktemp("verify")
    rows = [
        {"id": f"row {i}", "messages": [{"role": "user", "content": " ".join(WORDS[: 1 + i])},
                                        {"role": "assistant", "content": " ".join(WORDS[i:])}]}
        for i in range(10)
    ]  # fmt: skip
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_target(root / "target", layers=3)
    done = run("prepare", root / "data.jsonl", "--target", root / "target", "--out", root / "rows", "--heldout-rows", 2)
    assert done.exit_code == 0, done.output
    with pytest.MonkeyPatch.context() as patch:
        workers_in_process(patch, extract_module, worker)
        done = run(
            "extract", "--target", root / "target", "--data", root / "rows", "--out", root / "x.zarr",
            "--target-layer-ids", "0,1", "--topk", 8, "--block-tokens", 150, "--batch-tokens", 200, "--device", "cpu",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert len(recorded_blocks(root / "x.zarr")) > 3
    return root


def contents(store: Path) -> dict[str, bytes]:
    """Everything but history: records, logs, what was set aside."""
    parts = ("blocks", "target", "store.json", "zarr.json", "plan.json")
    files = [
        file for part in parts for file in ((store / part).rglob("*") if (store / part).is_dir() else [store / part])
    ]
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(files) if file.is_file()}


def damage_block(store: Path) -> None:
    flip(store / "blocks/000001/hidden_states/c/0/0/0", 100)


def damage_all(store: Path) -> None:
    for block in recorded_blocks(store):
        flip(store / f"blocks/{block:06d}/logsumexp/c/0", 3)


def lose_block(store: Path) -> None:
    shutil.rmtree(store / "blocks/000002")


def swap_blocks(store: Path) -> None:
    (store / "blocks/000000").rename(store / "blocks/kept")
    (store / "blocks/000001").rename(store / "blocks/000000")
    (store / "blocks/kept").rename(store / "blocks/000001")


def damage_everything_else(store: Path) -> None:
    for file in ("store.json", "plan.json", "blocks/zarr.json", "target/tokenizer.json"):
        flip(store / file)


def damage_record(store: Path) -> None:
    flip(store / "manifest/shards.extract-0.jsonl", 200)


def damage_document_record(store: Path) -> None:
    flip(store / "manifest/documents.extract-0.jsonl", 200)


def lose_plan(store: Path) -> None:
    (store / "plan.json").unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    f.__name__: f
    for f in (
        damage_block, damage_all, lose_block, swap_blocks, damage_everything_else, damage_record,
        damage_document_record, lose_plan,
    )
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_after_a_repair_and_the_command_it_names_the_store_is_as_before(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    workers_in_process(monkeypatch, extract_module, worker)
    store = tmp_path / "moved.zarr"
    shutil.copytree(made / "x.zarr", store)
    before = contents(store)
    documents = sorted((r["document_index"], r["doc_id"]) for r in read(store, "documents"))
    DAMAGES[damage](store)
    facts = found(store, "--repair")
    error = fault(verify(store, "--repair"))  # a second repair finds nothing new to do
    assert isinstance(error, StoreIncomplete), str(error)
    assert facts["command"] in str(error)
    assert (store / "quarantine").exists() == (damage not in ("lose_block", "lose_plan"))
    done = run(*shlex.split(facts["command"])[1:])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert contents(store) == before
    result = verify(store)
    assert result.exit_code == 0, result.output
    kept = {(r["document_index"], r["doc_id"]) for r in read(store, "documents")}
    assert sorted(kept) == documents
