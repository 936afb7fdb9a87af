"""`dflash store merge`: the documents of several stores in one, their values untouched, their files shared."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from derived_stores import is_complete, listing, made_files, records, require_documents, require_survival, run
from s3_server import S3, s3_fixture, s3_process_fixture  # noqa: F401
from toy_run import config_of, run_here
from toy_store import MASK, Text, counting_text, counting_texts, make_store

from manifests.blocks import open_store, recorded_blocks
from manifests.commit import Ledger, files_of, read
from manifests.records import SkipRecord
from manifests.store_merge import merge
from shared.errors import (
    ConfigRefused,
    DflashError,
    DiskFull,
    MaskTokenInUse,
    RunBusy,
    StoreDamaged,
    StoreIncomplete,
    StoreMismatch,
    StoreMissing,
)
from shared.json_file import sealed
from shared.store import read_identity


def pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Two small stores of other documents: 3 and 2 blocks, 13 and 8 documents."""
    one = make_store(folder / "a.zarr", counting_texts(13, 1), blocks=3, name="a", **changes)
    two = make_store(folder / "b.zarr", counting_texts(8, 2), blocks=2, name="b", **changes)
    return one, two


def everything(*stores: Path) -> list[tuple[Path, int, str]]:
    return [(store, ref.index, ref.split) for store in stores for ref in open_store(store).documents]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("copy", [False, True], ids=["linked", "copied"])
def test_the_documents_of_all_in_their_order(tmp_path: Path, precision: str, copy: bool) -> None:
    one, two = pair(tmp_path, precision=precision)
    before = listing(one, two)
    said = run("merge", tmp_path / "out.zarr", one, two, *(["--copy"] if copy else []))
    assert "21" in said
    require_documents(tmp_path / "out.zarr", everything(one, two))
    assert listing(one, two) == before
    assert list(records(tmp_path / "out.zarr")) == list(range(21))
    identity = read_identity(tmp_path / "out.zarr")
    assert [part["store_uuid"] for part in identity["parts"]] == [
        read_identity(store)["store_uuid"] for store in (one, two)
    ]
    assert [(part["rows_sha256"], part["documents"]) for part in identity["parts"]] == [("1", 13), ("1", 8)]
    assert identity["documents"] == 21
    assert identity["made_by"] == "store merge"
    assert identity["store_uuid"] not in {part["store_uuid"] for part in identity["parts"]}


def test_only_what_must_differ_is_written(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    run("merge", tmp_path / "out.zarr", one, two)
    own = sorted(
        str(path.relative_to(tmp_path / "out.zarr" / "blocks"))
        for path in (tmp_path / "out.zarr" / "blocks").rglob("*")
        if path.is_file() and path.stat().st_nlink == 1
    )
    # The first store keeps its numbers, so its blocks need nothing but their seal.
    seals = [f"00000{block}/zarr.json" for block in range(5)]
    moved = [f"00000{block}/document_index/{file}" for block in (3, 4) for file in ("c/0", "zarr.json")]
    assert own == sorted([*seals, *moved, "zarr.json"])
    shutil.rmtree(one)
    shutil.rmtree(two)
    assert is_complete(tmp_path / "out.zarr")


def test_a_merged_store_is_trained_and_merged_again(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    three = make_store(tmp_path / "c.zarr", counting_texts(6, 3), name="c")
    run("merge", tmp_path / "ab.zarr", one, two)
    run("merge", tmp_path / "abc.zarr", tmp_path / "ab.zarr", three)
    require_documents(tmp_path / "abc.zarr", everything(one, two, three))
    parts = run_here(config_of(tmp_path / "abc.zarr", tmp_path / "run", steps=2))
    train = sum(split == "train" for _, _, split in everything(one, two, three))
    assert len(parts.builder.documents) == train
    assert "nothing to do" in run("merge", tmp_path / "abc.zarr", tmp_path / "ab.zarr", three)


def test_numbers_stay_apart_where_rows_were_skipped(tmp_path: Path) -> None:
    """The first store's rows 13..19 were all skipped; its skips are kept, and counted once however often it runs."""
    one, two = pair(tmp_path)
    edit_identity(one, lambda identity: identity.update(documents=20))
    Ledger(one, "w").append(SkipRecord(doc_id="a-17", source="a.jsonl", line=18, reason="nonfinite"))
    for _ in range(2):
        run("merge", tmp_path / "out.zarr", one, two)
    assert list(records(tmp_path / "out.zarr")) == [*range(13), *range(20, 28)]
    assert [record["doc_id"] for record in read(tmp_path / "out.zarr", "skips")] == ["a-17"]
    assert is_complete(tmp_path / "out.zarr")


def edit_identity(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    identity = json.loads((store / "store.json").read_text())
    del identity["crc32c"]
    change(identity)
    (store / "store.json").write_text(json.dumps(sealed(identity)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("target.weights_sha256", "9", r"target\.weights_sha256 = '9', .* with '0'"),
        ("target.tokenizer_sha256", "9", r"target\.tokenizer_sha256 = '9', .* with None"),
        ("target.chat_template_sha256", "9", r"chat_template_sha256"),
        ("target_layer_ids", [1, 3], r"target_layer_ids = \[1, 3\], .* with \[1, 2\]"),
        ("hidden_size", 64, r"hidden_size = 64, .* with 32"),
        ("vocab_size", 41, r"vocab_size = 41, .* with 40"),
        ("topk", 4, r"topk = 4, .* with 0"),
        ("precision", "int8", r"precision = 'int8', .* with 'bfloat16'"),
        ("last_hidden", "bfloat16", r"last_hidden = 'bfloat16', .* with 'none'"),
        ("dtype", "float32", r"dtype = 'float32', .* with 'bfloat16'"),
        ("chat_template_kwargs", {"enable_thinking": False}, r"chat_template_kwargs"),
    ],
)
def test_stores_that_disagree_are_refused_with_field_and_values(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    one, two = pair(tmp_path)

    def change(identity: dict[str, Any]) -> None:
        place, _, name = field.rpartition(".")
        (identity[place] if place else identity)[name] = value

    edit_identity(two, change)
    with pytest.raises(StoreMismatch, match=said):
        run("merge", tmp_path / "out.zarr", one, two)
    with pytest.raises(StoreMismatch, match=field.rpartition(".")[2]):
        run("merge", tmp_path / "out.zarr", two, one)
    assert not (tmp_path / "out.zarr").exists()


def test_what_moves_no_feature_may_differ(tmp_path: Path) -> None:
    one, two = pair(tmp_path)

    def change(identity: dict[str, Any]) -> None:
        identity["target"].update(name="elsewhere", kind="folder", revision="r")
        identity.update(rows_sha256="2", block_tokens=7, version="0.0.9", documents=8, tokens=99)

    edit_identity(two, change)
    run("merge", tmp_path / "out.zarr", one, two)
    require_documents(tmp_path / "out.zarr", everything(one, two))


def test_the_mask_token_occurs_in_no_part(tmp_path: Path) -> None:
    texts = counting_texts(4)
    one = make_store(tmp_path / "a.zarr", texts, name="a", identity={"mask_token_id": 38})
    two = make_store(tmp_path / "b.zarr", texts, name="b", identity={"mask_token_id": 39})
    run("merge", tmp_path / "out.zarr", one, two)
    assert read_identity(tmp_path / "out.zarr")["mask_token_id"] == 38
    three = make_store(tmp_path / "c.zarr", [Text([1, 38, 2], [1, 1, 1])], name="c", identity={"mask_token_id": 39})
    run("merge", tmp_path / "out2.zarr", one, three)
    assert read_identity(tmp_path / "out2.zarr")["mask_token_id"] == 39
    four = make_store(tmp_path / "d.zarr", [Text([1, 39, 2], [1, 1, 1])], name="d", identity={"mask_token_id": 38})
    with pytest.raises(MaskTokenInUse, match=r"\[39, 38\].*39 in .*d\.zarr, 38 in .*c\.zarr|38 in .*39 in"):
        run("merge", tmp_path / "out3.zarr", three, four)
    assert MASK == 39


def overlapping(folder: Path) -> tuple[Path, Path]:
    """The second store holds documents 2 and 5 of the first, and one with the id of document 3 but other tokens."""
    texts = counting_texts(9, 1)
    one = make_store(folder / "a.zarr", texts, blocks=2, name="a")
    again = list(texts)
    for i in (0, 1, 3, 4, 6, 7, 8):
        again[i] = counting_text(i, 3, 2, 11 + i)
    return one, make_store(folder / "b.zarr", again, blocks=3, name="a")


def test_documents_in_two_stores_are_refused_with_an_example(tmp_path: Path) -> None:
    one, two = overlapping(tmp_path)
    with pytest.raises(ConfigRefused, match=r"2 documents .*'a-2' \(a\.jsonl:3\) of .*b\.zarr is in .*a\.zarr too"):
        run("merge", tmp_path / "out.zarr", one, two)
    with pytest.raises(ConfigRefused, match="9 documents"):
        run("merge", tmp_path / "out.zarr", one, one)
    assert not (tmp_path / "out.zarr").exists()


def test_keep_first_drops_the_later_ones_and_keep_all_none(tmp_path: Path) -> None:
    one, two = overlapping(tmp_path)
    said = run("merge", tmp_path / "first.zarr", one, two, "--on-duplicate", "keep-first")
    assert "2 duplicates left out" in said
    kept = [item for item in everything(two) if item[1] not in (2, 5)]
    require_documents(tmp_path / "first.zarr", [*everything(one), *kept])
    run("merge", tmp_path / "all.zarr", one, two, "--on-duplicate", "keep-all")
    require_documents(tmp_path / "all.zarr", everything(one, two))


def test_a_block_of_duplicates_alone_vanishes(tmp_path: Path) -> None:
    texts = counting_texts(9, 1)
    one = make_store(tmp_path / "a.zarr", texts, blocks=2, name="a")
    again = [*(counting_text(i, 3, 2, 11 + i) for i in range(6)), *texts[6:]]  # the third block is the first store's
    two = make_store(tmp_path / "b.zarr", again, blocks=3, name="a")
    run("merge", tmp_path / "out.zarr", one, two, "--on-duplicate", "keep-first")
    require_documents(tmp_path / "out.zarr", [*everything(one), *everything(two)[:6]])
    assert len(recorded_blocks(tmp_path / "out.zarr")) == 4


def test_token_checksums_come_from_the_tokens_where_records_have_none(tmp_path: Path) -> None:
    one, two = overlapping(tmp_path)
    from dataclasses import replace

    from manifests.derived_merge import keep
    from manifests.derived_source import Source

    sources = [Source.open(store) for store in (one, two)]
    bare = [replace(source, lines=[replace(line, token_sha="") for line in source.lines]) for source in sources]
    for mixed in (bare, [bare[0], sources[1]]):
        assert [np.flatnonzero(~kept).tolist() for kept in keep(mixed, "keep-first")] == [[], [2, 5]]


def test_a_damaged_block_is_not_taken_over(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    path = two / "blocks" / "000001" / "hidden_states" / "c" / "0" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[7] ^= 4
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"block 1 hidden_states rows 0\..* of .*b\.zarr is damaged"):
        run("merge", tmp_path / "out.zarr", one, two)
    assert not is_complete(tmp_path / "out.zarr")
    run("merge", tmp_path / "blind.zarr", one, two, "--no-verify")  # as asked; its own readers still see it
    with pytest.raises(StoreDamaged):
        open_store(tmp_path / "blind.zarr").read_block_array(4, "hidden_states")
    data[7] ^= 4
    path.write_bytes(data)
    run("merge", tmp_path / "out.zarr", one, two)
    require_documents(tmp_path / "out.zarr", everything(one, two))


def test_a_damaged_target_is_not_taken_over(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    path = one / "target" / "head.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"head\.safetensors fails its checksum"):
        run("merge", tmp_path / "out.zarr", one, two)


def lost_record(store: Path) -> None:
    (path,) = files_of(store, "documents")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3].replace(b"a-3", b"a-4"), *lines[4:]]))


def unfinished(store: Path) -> None:
    (path,) = files_of(store, "shards")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lost_record, StoreDamaged, r"no whole record of 1 of its 13 documents, the first is document 3 of block 0"),
        (unfinished, StoreIncomplete, "2 of 3 planned blocks"),
        (shutil.rmtree, StoreMissing, "no teacher store"),
    ],
)
def test_inputs_must_be_whole(
    tmp_path: Path, damage: Callable[[Path], None], error: type[DflashError], said: str
) -> None:
    one, two = pair(tmp_path)
    damage(one)
    with pytest.raises(error, match=said):
        run("merge", tmp_path / "out.zarr", one, two)
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("place", ["a.zarr", "a.zarr/inside", "."])
def test_inputs_are_never_written_to(tmp_path: Path, place: str) -> None:
    one, two = pair(tmp_path)
    before = listing(one, two)
    with pytest.raises(ConfigRefused, match=r"lie in each other|no part of a store"):
        run("merge", tmp_path / place, one, two)
    assert listing(one, two) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    for name in ("target", "notes"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(ConfigRefused, match=f"holds {name}, which is no part of a store"):
            run("merge", tmp_path / name, one, two)
    other = make_store(tmp_path / "c.zarr", counting_texts(3), name="c")
    with pytest.raises(StoreMismatch, match=r"c\.zarr was made with"):
        run("merge", other, one, two)


def test_a_merge_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    run("merge", tmp_path / "out.zarr", one, two)
    with pytest.raises(StoreMismatch, match=r"parts\.0\.store_uuid = "):
        run("merge", tmp_path / "out.zarr", two, one)
    with pytest.raises(StoreMismatch, match=r"on_duplicate = 'refuse', this command asks 'keep-all'"):
        run("merge", tmp_path / "out.zarr", one, two, "--on-duplicate", "keep-all")
    three = make_store(tmp_path / "c.zarr", counting_texts(3), name="c")
    with pytest.raises(StoreMismatch, match=r"number of parts = 2, this command asks 3"):
        run("merge", tmp_path / "out.zarr", one, two, three)


def test_one_store_is_no_merge(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match="two or more"):
        run("merge", tmp_path / "out.zarr", tmp_path / "a.zarr")
    assert merge.name == "merge"


def test_two_merges_into_one_folder(tmp_path: Path) -> None:
    from shared.atomic import owned

    one, two = pair(tmp_path)
    run("merge", tmp_path / "out.zarr", one, two)
    with owned(tmp_path / "out.zarr"), pytest.raises(RunBusy):
        run("merge", tmp_path / "out.zarr", one, two)


def test_another_file_system_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair(tmp_path)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    said = run("merge", tmp_path / "out.zarr", one, two)
    assert " 0 GB of it linked" in said
    assert {path.stat().st_nlink for path in (tmp_path / "out.zarr").rglob("*") if path.is_file()} == {1}
    require_documents(tmp_path / "out.zarr", everything(one, two))


@pytest.mark.skipif(Path("/dev/shm").stat().st_dev == Path("/tmp").stat().st_dev, reason="one file system only")
def test_a_real_other_file_system(tmp_path: Path) -> None:
    import tempfile

    one, two = pair(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = Path(folder) / "out.zarr"
        run("merge", out, one, two)
        require_documents(out, everything(one, two))
        run("merge", tmp_path / "linked.zarr", one, two)
        assert made_files(out) == made_files(tmp_path / "linked.zarr")


def test_no_room_for_copies_is_said_before_any_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manifests import derived_store

    one, two = pair(tmp_path)
    monkeypatch.setattr(derived_store, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFull, match=r"GB for what cannot be linked, 1e-06 GB are free"):
        run("merge", tmp_path / "out.zarr", one, two, "--copy")
    assert recorded_blocks(tmp_path / "out.zarr") == {}
    run("merge", tmp_path / "out.zarr", one, two)


def test_a_block_set_aside_is_made_again_by_the_same_command(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    out = tmp_path / "out.zarr"
    run("merge", out, one, two, "--copy")
    expected = made_files(out)
    path = out / "blocks" / "000003" / "input_ids" / "c" / "0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreIncomplete, match=rf"dflash store merge {out} {one} {two} .*--copy"):
        run("verify", out, "--repair")
    with pytest.raises(StoreIncomplete, match=r"the first missing is 3; finish it with the same `dflash store merge`"):
        open_store(out)
    run("merge", out, one, two, "--copy")
    assert made_files(out) == expected
    require_documents(out, everything(one, two))


def test_an_extraction_does_not_go_on_with_it(tmp_path: Path) -> None:
    from manifests.derived_store import require_extracted
    from stage1_extract.config import ExtractConfig
    from stage1_extract.extract import run as extract

    one, two = pair(tmp_path)
    run("merge", tmp_path / "out.zarr", one, two)
    with pytest.raises(ConfigRefused, match=r"from 2 other stores and has no rows of its own"):
        extract(ExtractConfig(target="t", data=tmp_path / "rows", out=tmp_path / "out.zarr"))
    require_extracted(one)
    require_extracted(tmp_path / "nothing.zarr")


def crash_inputs(tmp_path: Path) -> tuple[list[object], Path, list[Path]]:
    one, two = overlapping(tmp_path)
    (tmp_path / "disk").mkdir()
    out = tmp_path / "disk" / "out.zarr"
    return ["merge", out, one, two, "--on-duplicate", "keep-first"], out, [one, two]


@pytest.mark.crash
def test_a_kill_anywhere_is_mended_by_the_same_command(tmp_path: Path) -> None:
    words, out, inputs = crash_inputs(tmp_path)
    require_survival(words, out, inputs, tmp_path / "disk", trials=4)


@pytest.mark.crash
@pytest.mark.slow
def test_many_kills_anywhere(tmp_path: Path) -> None:
    words, out, inputs = crash_inputs(tmp_path)
    require_survival(words, out, inputs, tmp_path / "disk", trials=60)


def test_an_input_in_a_bucket_is_copied(s3: S3, tmp_path: Path) -> None:
    from manifests.store_push import PushOptions, push

    one, two = pair(tmp_path)
    url = s3.make_bucket().url()
    push(two, url, PushOptions())
    said = run("merge", tmp_path / "out.zarr", one, url)
    assert "0.000" in said
    require_documents(tmp_path / "out.zarr", everything(one, two))
    run("merge", tmp_path / "local.zarr", one, two)
    assert made_files(tmp_path / "out.zarr") == made_files(tmp_path / "local.zarr")
    run("merge", tmp_path / "first.zarr", url, one)  # the target comes from the bucket, too
    require_documents(tmp_path / "first.zarr", everything(two, one))
