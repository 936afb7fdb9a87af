"""A prepared folder reads back as it was written; an unfinished or damaged one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import StoreDamaged, StoreIncomplete, StoreMismatch, StoreMissing
from shared.rows import Document, PreparedRows, write_rows


def document(ids: list[int], split: str = "train", doc_id: str = "d") -> Document:
    mask = [0] + [1] * (len(ids) - 1)
    return Document(
        doc_id=doc_id,
        source="f.jsonl",
        line=3,
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        split=split,
    )  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=6))
def test_documents_read_back_in_order(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    info = write_rows(folder, [document(ids, doc_id=str(i)) for i, ids in enumerate(rows)], {"k": 1})
    opened = PreparedRows.open(folder, verify=True)
    assert opened.n_documents == len(rows)
    for i, ids in enumerate(rows):
        found, mask = opened.document(i)
        assert found.tolist() == ids
        assert mask.tolist() == [0] + [1] * (len(ids) - 1)
    assert opened.lengths.tolist() == [len(ids) for ids in rows]
    assert (info["tokens"], info["supervised"]) == (sum(map(len, rows)), sum(map(len, rows)) - len(rows))


def test_every_document_line_says_where_it_came_from(tmp_path: Path) -> None:
    write_rows(tmp_path, [document([1, 2, 3], "heldout", "x")], {})
    (line,) = [json.loads(text) for text in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert {
        key: line[key]
        for key in ("index", "doc_id", "source", "line", "n_tokens", "n_supervised", "truncated", "split")
    } == {
        "index": 0,
        "doc_id": "x",
        "source": "f.jsonl",
        "line": 3,
        "n_tokens": 3,
        "n_supervised": 2,
        "truncated": False,
        "split": "heldout",
    }


@pytest.mark.parametrize("change", ["ids", "mask", "boundary", "split"])
def test_the_hash_covers_all_that_training_sees(tmp_path: Path, change: str) -> None:
    base = write_rows(tmp_path / "a", [document([1, 2, 3]), document([4, 5])], {})
    other = {
        "ids": [document([1, 2, 9]), document([4, 5])],
        "mask": [
            document([1, 2, 3]),
            Document(
                doc_id="d",
                source="s",
                line=1,
                input_ids=np.array([4, 5], np.int32),
                loss_mask=np.array([1, 1], np.uint8),
            ),
        ],
        "boundary": [document([1, 2]), document([3, 4, 5])],
        "split": [document([1, 2, 3]), document([4, 5], "heldout")],
    }[change]
    assert write_rows(tmp_path / "b", other, {})["rows_sha256"] != base["rows_sha256"]


def test_missing_unfinished_and_foreign_folders(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    with pytest.raises(StoreMissing, match=r"prompts\.jsonl is a file .*`dflash prepare .*prompts\.jsonl --target"):
        PreparedRows.open(tmp_path / "prompts.jsonl")
    with pytest.raises(StoreMissing, match="dflash prepare"):
        PreparedRows.open(tmp_path / "none")
    write_rows(tmp_path / "r", [document([1, 2])], {})
    info = (tmp_path / "r" / "prepare.json").read_text()
    (tmp_path / "r" / "prepare.json").unlink()
    with pytest.raises(StoreIncomplete, match="did not finish"):
        PreparedRows.open(tmp_path / "r")
    (tmp_path / "r" / "prepare.json").write_text(info.replace('"format": 1', '"format": 99'))
    with pytest.raises(StoreMismatch, match="format 99"):
        PreparedRows.open(tmp_path / "r")
    (tmp_path / "r" / "prepare.json").write_text("{")
    with pytest.raises(StoreDamaged, match="not JSON"):
        PreparedRows.open(tmp_path / "r")


@pytest.mark.parametrize("name", ["input_ids.npy", "loss_mask.npy", "offsets.npy", "documents.jsonl"])
def test_a_cut_or_missing_file_is_damage(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path, [document([1, 2, 3]), document([4, 5])], {})
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-3])
    with pytest.raises(StoreDamaged):
        PreparedRows.open(tmp_path, verify=True)
    (tmp_path / name).unlink()
    with pytest.raises(StoreDamaged):
        PreparedRows.open(tmp_path)


def test_one_changed_token_is_found_when_verifying(tmp_path: Path) -> None:
    write_rows(tmp_path, [document([1, 2, 3])], {})
    ids = np.load(tmp_path / "input_ids.npy")
    ids[1] = 7
    np.save(tmp_path / "input_ids.npy", ids)
    with pytest.raises(StoreDamaged, match="prepare again"):
        PreparedRows.open(tmp_path, verify=True)
