"""The folder `dflash prepare` writes and `dflash extract` reads: token ids, loss masks, one line per document.

DIR/input_ids.npy    int32 [N]     all documents one after another
    loss_mask.npy    uint8 [N]     1 = supervised
    offsets.npy      int64 [D+1]   document i is [offsets[i], offsets[i+1])
    documents.jsonl                one line per document: where it came from, its split
    prepare.json                   written last; without it the folder is not finished
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shared.atomic import disk_faults, write_bytes, write_json
from shared.errors import StoreDamaged, StoreIncomplete, StoreMismatch, StoreMissing
from shared.json_file import read_object, require_keys

ROWS_FORMAT = 1
# What `write_rows` adds to whatever its caller says.
INFO_KEYS = ("rows_sha256", "documents", "tokens", "supervised")
IntArray = np.ndarray[Any, Any]
Split = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One prepared row: input_ids int32 [n], loss_mask uint8 [n], and where it came from."""

    doc_id: str
    source: str
    line: int
    input_ids: IntArray
    loss_mask: IntArray
    split: Split = "train"
    truncated: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def n_supervised(self) -> int:
        """Number of supervised tokens."""
        return int(self.loss_mask.sum())

    @property
    def sha(self) -> str:
        """sha256 hex over ids and mask."""
        return hashlib.sha256(self.input_ids.tobytes() + self.loss_mask.tobytes()).hexdigest()


def write_rows(folder: Path, documents: Sequence[Document], info: dict[str, Any]) -> dict[str, Any]:
    """Write all files of a prepared folder, prepare.json last, and return what prepare.json says.

    `info` is extended by format, rows_sha256, documents, tokens and supervised. Raises DiskFull, PathNotWritable.
    """
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    input_ids = np.concatenate([document.input_ids for document in documents]).astype(np.int32)
    loss_mask = np.concatenate([document.loss_mask for document in documents]).astype(np.uint8)
    offsets = np.cumsum([0, *(len(document.input_ids) for document in documents)], dtype=np.int64)
    for name, array in (("input_ids", input_ids), ("loss_mask", loss_mask), ("offsets", offsets)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        write_bytes(folder / f"{name}.npy", buffer.getvalue())
    lines = [json.dumps(_line(index, document), ensure_ascii=False) for index, document in enumerate(documents)]
    write_bytes(folder / "documents.jsonl", ("\n".join(lines) + "\n").encode())
    splits = [document.split for document in documents]
    info = {
        "format": ROWS_FORMAT,
        **info,
        "rows_sha256": rows_sha256(input_ids, loss_mask, offsets, splits),
        "documents": len(documents),
        "tokens": int(offsets[-1]),
        "supervised": int(loss_mask.sum()),
    }
    write_json(folder / "prepare.json", info)
    return info


def _line(index: int, document: Document) -> dict[str, Any]:
    plain = {key: value for key, value in asdict(document).items() if key not in ("input_ids", "loss_mask")}
    return {
        "index": index,
        **plain,
        "n_tokens": len(document.input_ids),
        "n_supervised": document.n_supervised,
        "sha": document.sha,
    }


def rows_sha256(input_ids: IntArray, loss_mask: IntArray, offsets: IntArray, splits: Sequence[str]) -> str:
    """One hash over everything that training sees of the rows: ids, masks, boundaries, splits."""
    digest = hashlib.sha256()
    for array in (input_ids, loss_mask, offsets):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(json.dumps(list(splits)).encode())
    return digest.hexdigest()


def read_info(folder: Path) -> dict[str, Any]:
    """What prepare.json says.

    Raises StoreMissing (no such folder), StoreIncomplete (not finished), StoreDamaged, StoreMismatch.
    """
    path = folder / "prepare.json"
    if folder.is_file():
        raise StoreMissing(
            f"{folder} is a file and no folder of prepared rows; make one with "
            f"`dflash prepare {folder} --target T --out ROWS`"
        )
    if not folder.is_dir():
        raise StoreMissing(
            f"no prepared rows at {folder}; make them with `dflash prepare DATA --target T --out {folder}`"
        )
    if not path.is_file():
        raise StoreIncomplete(f"{folder} has no prepare.json, so `dflash prepare` did not finish there; run it again")
    info = read_object(path, "delete it and run `dflash prepare` again")
    if info.get("format") != ROWS_FORMAT:
        raise StoreMismatch(
            f"{folder} has format {info.get('format')}, this version reads {ROWS_FORMAT}; prepare again"
        )
    require_keys(info, INFO_KEYS, path, "delete it and run `dflash prepare` again")
    return info


class PreparedRows:
    """A finished prepared folder, token arrays memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = read_info(folder)
        try:
            self.input_ids = np.load(folder / "input_ids.npy", mmap_mode="r")
            self.loss_mask = np.load(folder / "loss_mask.npy", mmap_mode="r")
            self.offsets = np.load(folder / "offsets.npy")
            text = (folder / "documents.jsonl").read_text(encoding="utf-8")
            self.documents: list[dict[str, Any]] = [json.loads(line) for line in text.split("\n") if line]
        except (OSError, ValueError, EOFError) as error:
            raise StoreDamaged(
                f"prepared rows at {folder} cannot be read ({error}); run `dflash prepare` again"
            ) from error
        sizes = (len(self.documents), len(self.offsets) - 1, self.info["documents"])
        if (
            len(set(sizes)) != 1
            or self.offsets[-1] != len(self.input_ids)
            or len(self.input_ids) != len(self.loss_mask)
        ):
            raise StoreDamaged(
                f"prepared rows at {folder} disagree: {sizes[0]} lines, {sizes[1]} offsets, {sizes[2]} recorded; "
                "prepare again"
            )

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> PreparedRows:
        """Open; `verify` also hashes all tokens against prepare.json. Raises as `read_info`, and StoreDamaged."""
        rows = cls(folder)
        if verify:
            found = rows_sha256(rows.input_ids, rows.loss_mask, rows.offsets, rows.splits)
            if found != rows.info["rows_sha256"]:
                raise StoreDamaged(
                    f"prepared rows at {folder} hash to {found[:12]}, prepare.json says "
                    f"{rows.info['rows_sha256'][:12]}; prepare again"
                )
        return rows

    @property
    def n_documents(self) -> int:
        """Number of documents D."""
        return len(self.documents)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, int64 [D]."""
        return np.asarray(np.diff(self.offsets))

    @property
    def splits(self) -> list[str]:
        """ "train" or "heldout" for each document."""
        return [document["split"] for document in self.documents]

    def document(self, index: int) -> tuple[IntArray, IntArray]:
        """(input_ids int32 [n], loss_mask uint8 [n]) of one document."""
        where = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return np.array(self.input_ids[where]), np.array(self.loss_mask[where])
