"""The store: what was written is read, plain zarr reads it too, and damage is an error, never zeros."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec

from shared.documents import Documents, index_name, read_index, write_index
from shared.errors import StoreDamaged, StoreMismatch, StoreMissing
from shared.seal import digest
from shared.store import TeacherStore, snapshot_of
from shared.store_check import check_block
from shared.store_files import LocalFiles
from shared.store_layout import ARRAYS, array_metadata, arrays_of, block_name, chunks_of
from shared.store_write import create, write_block

Arrays = dict[str, np.ndarray[Any, Any]]


def make_arrays(lengths: list[int], seed: int = 0, *, precision: str = "bfloat16") -> Arrays:
    rng = np.random.default_rng(seed)
    tokens, documents, taps, hidden, k = sum(lengths), len(lengths), 2, 8, 3
    shapes = {
        "hidden_states": (tokens, taps, hidden), "hidden_states_q": (tokens, taps, hidden),
        "hidden_states_scale": (tokens, taps), "hidden_states_channel": (taps, hidden),
        "last_hidden_state": (tokens, hidden), "last_hidden_state_q": (tokens, hidden),
        "last_hidden_state_scale": (tokens,), "last_hidden_state_channel": (hidden,),
        "topk_ids": (tokens, k), "topk_logits": (tokens, k), "logsumexp": (tokens,),
    }  # fmt: skip
    arrays: Arrays = {
        "input_ids": rng.integers(0, 100, tokens, dtype=np.int32),
        "loss_mask": rng.integers(0, 2, tokens, dtype=np.uint8),
        "document_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "document_index": np.arange(10, 10 + documents, dtype=np.int64),
        "document_split": rng.integers(0, 2, documents, dtype=np.uint8),
    }
    for name in arrays_of(precision, precision):
        if name in shapes:
            kind = np.dtype(ARRAYS[name].dtype)
            high = 127 if kind.itemsize == 1 else 2**15
            values = rng.standard_normal(shapes[name]) if kind.kind == "f" else rng.integers(0, high, shapes[name])
            arrays[name] = values.astype(kind)
    return arrays


Made = tuple[Path, Arrays, str]


@pytest.fixture(params=["bfloat16", "int8"])
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Made:
    path = tmp_path / "x.zarr"
    arrays = make_arrays([5, 4200, 1, 130], precision=request.param)
    create(path, {"target": {"weights_sha256": "abc"}})
    return path, arrays, write_block(path, 3, arrays)["seal"]


def test_documents_come_back_bit_for_bit(made: Made) -> None:
    path, arrays, seal = made
    opened = TeacherStore(path, {3: seal})
    assert [ref.index for ref in opened.documents] == [10, 11, 12, 13]
    names = [name for name in arrays if ARRAYS[name].rows == "tokens"]
    for i, ref in enumerate(opened.documents):
        rows = slice(arrays["document_offsets"][i], arrays["document_offsets"][i + 1])
        read = opened.read_document(ref, names)
        for name in names:
            np.testing.assert_array_equal(read[name], arrays[name][rows], strict=True)
        assert ref.n_supervised == arrays["loss_mask"][rows].sum()
        assert ref.split == ("heldout" if arrays["document_split"][i] else "train")
    for name in arrays:
        np.testing.assert_array_equal(opened.read_block_array(3, name), arrays[name], strict=True)


def test_plain_zarr_reads_the_whole_store(made: Made) -> None:
    path, arrays, _ = made
    block = zarr.open_group(path, mode="r")["blocks/000003"]
    assert isinstance(block, zarr.Group)
    for name, values in arrays.items():
        array = block[name]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[...], values, strict=True)
        assert array.attrs["bits_of"] == ARRAYS[name].bits_of


@pytest.mark.parametrize("name", list(ARRAYS))
def test_metadata_says_what_zarr_itself_would_write(tmp_path: Path, name: str) -> None:
    layout = ARRAYS[name]
    shape = (4200, 2, 600)[: 3 if name in ("hidden_states", "hidden_states_q") else 2]
    chunk, shard = chunks_of(name, shape)
    zarr.create_array(
        tmp_path / name, shape=shape, dtype=layout.dtype, chunks=chunk, shards=shard, fill_value=layout.fill,
        compressors=[Crc32cCodec()], serializer=BytesCodec(endian="little"), filters=None,
        attributes={"bits_of": layout.bits_of},
    )  # fmt: skip
    theirs = json.loads((tmp_path / name / "zarr.json").read_text())
    ours = array_metadata(name, shape)
    codecs = theirs["codecs"][0]["configuration"]["codecs"]
    if np.dtype(layout.dtype).itemsize == 1:  # zarr versions differ in whether they name the order of one byte
        codecs[0].pop("configuration", None)
    assert {key: theirs[key] for key in ours} == ours


def test_all_zero_features_still_read(tmp_path: Path) -> None:
    path = tmp_path / "zeros.zarr"
    arrays = make_arrays([70])
    arrays["hidden_states"][:] = 0
    create(path, {})
    opened = TeacherStore(path, {0: write_block(path, 0, arrays)["seal"]})
    assert not opened.read_document(opened.documents[0])["hidden_states"].any()
    block = zarr.open_group(path, mode="r")["blocks/000000"]
    assert isinstance(block, zarr.Group)
    assert not np.asarray(block["hidden_states"][...]).any()


def damage(kind: str, file: Path) -> None:
    content = bytearray(file.read_bytes())
    if kind == "flip":
        content[len(content) // 3] ^= 0x10
        file.write_bytes(content)
    elif kind == "truncate":
        file.write_bytes(content[:-1])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "zero":
        file.write_bytes(bytes(len(content)))
    else:
        file.unlink()


@pytest.mark.parametrize("kind", ["flip", "truncate", "unlink", "empty", "zero"])
def test_damage_to_any_file_of_a_block_is_named_never_zeros(made: Made, kind: str) -> None:
    path, _, seal = made
    folder = path / block_name(3)
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        good = file.read_bytes()
        damage(kind, file)
        name = file.relative_to(folder).parts[0].removesuffix("zarr.json")
        found = list(check_block(LocalFiles(path), 3, seal))
        assert found, file
        assert all(item.array == name and item.block == 3 and item.file in str(file) for item in found)

        def read_all(array: str = name) -> None:
            opened = TeacherStore(path, {3: seal})
            opened.read_block_array(3, array or "input_ids")

        with pytest.raises(StoreDamaged) as caught:
            read_all()
        for part in (name or "zarr.json", "block 3", str(file), "--repair"):
            assert part in str(caught.value)
        file.write_bytes(good)
    assert list(check_block(LocalFiles(path), 3, seal)) == []


def test_another_build_of_the_block_or_another_block_in_its_place_is_refused(made: Made, tmp_path: Path) -> None:
    path, arrays, seal = made
    other = tmp_path / "other.zarr"
    create(other, {})
    changed = {**arrays, "input_ids": arrays["input_ids"] + 1}
    stale = write_block(other, 3, changed)["seal"]
    assert stale != seal
    write_block(other, 4, arrays)
    kept = tmp_path / "kept"
    (path / block_name(3)).rename(kept)
    for source in (other / block_name(3), other / block_name(4)):
        shutil.copytree(source, path / block_name(3))
        with pytest.raises(StoreDamaged):
            len(TeacherStore(path, {3: seal}).documents)
        assert list(check_block(LocalFiles(path), 3, seal))
        shutil.rmtree(path / block_name(3))
    # Only the data of the older build: every checksum inside the file fits, the seal does not.
    shutil.copytree(kept, path / block_name(3))
    stale_file = "input_ids/c/0"
    shutil.copy(other / block_name(3) / stale_file, path / block_name(3) / stale_file)
    with pytest.raises(StoreDamaged) as caught:
        TeacherStore(path, {3: seal}).read_block_array(3, "input_ids")
    assert "sealed" in str(caught.value)


def test_missing_block_folder_is_named(made: Made) -> None:
    with pytest.raises(StoreDamaged) as caught:
        len(TeacherStore(made[0], {3: made[2], 4: "0" * 32}).documents)
    assert "block 4" in str(caught.value)


def test_a_block_is_written_once_and_the_same_arrays_give_the_same_bytes(made: Made, tmp_path: Path) -> None:
    path, arrays, seal = made
    with pytest.raises(FileExistsError):
        write_block(path, 3, make_arrays([5], seed=9))
    opened = TeacherStore(path, {3: seal})
    first = opened.read_document(opened.documents[0], ("input_ids",))
    np.testing.assert_array_equal(first["input_ids"], arrays["input_ids"][:5])
    create(tmp_path / "again.zarr", {})
    assert write_block(tmp_path / "again.zarr", 3, arrays)["seal"] == seal
    for file in (path / block_name(3)).rglob("*"):
        if file.is_file():
            twin = tmp_path / "again.zarr" / file.relative_to(path)
            assert file.read_bytes() == twin.read_bytes()


def test_identity_differences_name_the_field_and_both_values(made: Made) -> None:
    path, _, _ = made
    create(path, {"target": {"weights_sha256": "abc"}})
    with pytest.raises(StoreMismatch) as caught:
        create(path, {"target": {"weights_sha256": "xyz"}})
    for part in ("target.weights_sha256", "'abc'", "'xyz'"):
        assert part in str(caught.value)


def test_a_changed_identity_file_is_damage(made: Made) -> None:
    path, _, seal = made
    text = (path / "store.json").read_text()
    (path / "store.json").write_text(text.replace("abc", "abd"))
    with pytest.raises(StoreDamaged) as caught:
        TeacherStore(path, {3: seal})
    assert "store.json" in str(caught.value)


def test_no_store_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing) as caught:
        TeacherStore(tmp_path / "nothing.zarr", {})
    assert "dflash extract" in str(caught.value)


def test_a_wrong_shape_or_dtype_is_our_bug(tmp_path: Path) -> None:
    create(tmp_path / "x.zarr", {})
    for change in ({"logsumexp": np.zeros(3, np.float32)}, {"input_ids": np.zeros(9, np.int64)}):
        with pytest.raises(ValueError):
            write_block(tmp_path / "x.zarr", 0, make_arrays([4, 5]) | change)


def test_the_documents_cache_is_used_only_for_its_own_snapshot_and_when_whole(made: Made) -> None:
    path, _, seal = made
    opened = TeacherStore(path, {3: seal})
    columns = opened.documents.columns
    written = write_index(path, opened.snapshot, opened.documents)
    moved = path.with_name("moved.zarr")
    os.rename(path / "blocks", path / "elsewhere")  # noqa: PTH104 - the cache alone must do
    cached = TeacherStore(path, {3: seal}).documents
    for name, column in columns.items():
        np.testing.assert_array_equal(cached.columns[name], column, strict=True)
    assert read_index(LocalFiles(path), snapshot_of({3: "0" * 32})) is None
    data = bytearray(written.read_bytes())
    data[-3] ^= 1
    written.write_bytes(data)
    assert read_index(LocalFiles(path), opened.snapshot) is None
    written.write_bytes(data[:-1])
    assert read_index(LocalFiles(path), opened.snapshot) is None
    data[-3] ^= 1
    assert b'"documents": %d,' % len(opened.documents) in data
    written.write_bytes(data.replace(b'"documents": %d,' % len(opened.documents), b'"documents": 0,'))
    assert read_index(LocalFiles(path), opened.snapshot) is None
    written.write_bytes(data)
    assert read_index(LocalFiles(path), opened.snapshot) is not None
    os.rename(path / "elsewhere", path / "blocks")  # noqa: PTH104
    path.rename(moved)
    assert len(TeacherStore(moved, {3: seal}).documents) == 4
    assert index_name(opened.snapshot) in str(written)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
@settings(max_examples=30, deadline=None)
def test_documents_behave_as_a_sequence(lengths: list[int], data: st.DataObject) -> None:
    count = len(lengths)
    documents = Documents(
        {
            "index": np.arange(count) * 3,
            "block": np.zeros(count),
            "start": np.cumsum([0, *lengths[:-1]]),
            "length": lengths,
            "n_supervised": np.ones(count),
            "heldout": np.arange(count) % 2,
        }
    )
    slow = [(3 * i, sum(lengths[:i]), lengths[i], "heldout" if i % 2 else "train") for i in range(count)]
    assert [(ref.index, ref.start, ref.length, ref.split) for ref in documents] == slow
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    assert [ref.index for ref in documents[first:last]] == [row[0] for row in slow[first:last]]
    assert [ref.index for ref in Documents.concatenate([documents, documents])] == [row[0] for row in slow] * 2
    assert [ref.index for ref in documents.take(~documents.heldout)] == [row[0] for row in slow if row[3] == "train"]


def test_the_seal_is_the_hash_of_the_metadata_file(made: Made) -> None:
    path, _, seal = made
    assert digest((path / block_name(3) / "zarr.json").read_bytes()) == seal
