"""The store: what was written is read, plain zarr reads it too, and damage is an error, never zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from shared import store
from shared.errors import StoreDamaged, StoreMismatch, StoreMissing
from shared.store_layout import ARRAYS, block_dir


def arrays_of(
    lengths: list[int], seed: int = 0, taps: int = 2, hidden: int = 8, k: int = 3
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    tokens, documents = sum(lengths), len(lengths)
    return {
        "input_ids": rng.integers(0, 100, tokens, dtype=np.int32),
        "loss_mask": rng.integers(0, 2, tokens, dtype=np.uint8),
        "hidden_states": rng.integers(0, 2**16, (tokens, taps, hidden), dtype=np.uint16),
        "last_hidden_state": rng.integers(0, 2**16, (tokens, hidden), dtype=np.uint16),
        "topk_ids": rng.integers(0, 100, (tokens, k), dtype=np.int32),
        "topk_logits": rng.integers(0, 2**16, (tokens, k), dtype=np.uint16),
        "logsumexp": rng.standard_normal(tokens).astype(np.float32),
        "document_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "document_index": np.arange(10, 10 + documents, dtype=np.int64),
        "document_split": rng.integers(0, 2, documents, dtype=np.uint8),
    }


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    path = tmp_path / "x.zarr"
    arrays = arrays_of([5, 4200, 1, 130])
    store.create(path, {"target": {"weights_sha256": "abc"}})
    store.write_block(path, 3, arrays)
    return path, arrays


def test_documents_come_back_bit_for_bit(made: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    path, arrays = made
    opened = store.TeacherStore(path, [3])
    assert [ref.index for ref in opened.documents] == [10, 11, 12, 13]
    names = [name for name, layout in ARRAYS.items() if layout.per_token]
    for i, ref in enumerate(opened.documents):
        rows = slice(arrays["document_offsets"][i], arrays["document_offsets"][i + 1])
        read = opened.read_document(ref, names)
        for name in names:
            np.testing.assert_array_equal(read[name], arrays[name][rows], strict=True)
        assert ref.n_supervised == arrays["loss_mask"][rows].sum()
        assert ref.split == ("heldout" if arrays["document_split"][i] else "train")


def test_plain_zarr_reads_the_whole_store(made: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    path, arrays = made
    group = zarr.open_group(path, mode="r")
    block = group["blocks/000003"]
    for name, values in arrays.items():
        np.testing.assert_array_equal(block[name][...], values, strict=True)
    assert block["hidden_states"].attrs["bits_of"] == "bfloat16"


def test_all_zero_features_still_read(tmp_path: Path) -> None:
    path = tmp_path / "zeros.zarr"
    arrays = arrays_of([70])
    arrays["hidden_states"][:] = 0
    store.create(path, {})
    store.write_block(path, 0, arrays)
    opened = store.TeacherStore(path, [0])
    assert not opened.read_document(opened.documents[0])["hidden_states"].any()


@pytest.mark.parametrize("damage", ["flip", "truncate", "unlink", "empty"])
@pytest.mark.parametrize(
    "name", ["hidden_states", "input_ids", "loss_mask", "last_hidden_state", "topk_ids", "topk_logits", "logsumexp"]
)
def test_damage_is_named_never_zeros(
    made: tuple[Path, dict[str, np.ndarray[Any, Any]]], name: str, damage: str
) -> None:
    path, _ = made
    file = max((p for p in (block_dir(path, 3) / name / "c").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 0x10
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    opened = store.TeacherStore(path, [3])

    def read_all() -> None:
        for ref in opened.documents:
            opened.read_document(ref, [name])

    with pytest.raises(StoreDamaged) as caught:
        read_all()
    assert name in str(caught.value)
    assert "block 3" in str(caught.value)


def test_missing_block_folder_is_named(made: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    with pytest.raises(StoreDamaged) as caught:
        store.TeacherStore(made[0], [3, 4])
    assert "block 4" in str(caught.value)


def test_a_block_is_written_once(made: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    path, arrays = made
    with pytest.raises(FileExistsError):
        store.write_block(path, 3, arrays_of([5], seed=9))
    opened = store.TeacherStore(path, [3])
    np.testing.assert_array_equal(opened.read_document(opened.documents[0])["input_ids"], arrays["input_ids"][:5])


def test_identity_differences_name_the_field_and_both_values(
    made: tuple[Path, dict[str, np.ndarray[Any, Any]]],
) -> None:
    path, _ = made
    store.create(path, {"target": {"weights_sha256": "abc"}})
    with pytest.raises(StoreMismatch) as caught:
        store.create(path, {"target": {"weights_sha256": "xyz"}})
    for part in ("target.weights_sha256", "'abc'", "'xyz'"):
        assert part in str(caught.value)


def test_no_store_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing) as caught:
        store.TeacherStore(tmp_path / "nothing.zarr", [])
    assert "dflash extract" in str(caught.value)


def test_a_wrong_shape_or_dtype_is_our_bug(tmp_path: Path) -> None:
    store.create(tmp_path / "x.zarr", {})
    for change in ({"logsumexp": np.zeros(3, np.float32)}, {"input_ids": np.zeros(9, np.int64)}):
        with pytest.raises(ValueError):
            store.write_block(tmp_path / "x.zarr", 0, arrays_of([4, 5]) | change)
