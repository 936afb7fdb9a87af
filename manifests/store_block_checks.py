"""Checks of a store's blocks: every byte against the seals, or a sample of documents, or zarr-python beside our reader.

Called by manifests/store_verify.py, several blocks at a time in threads. What a seal covers is in shared/seal.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manifests.blocks import MOVED
from manifests.store_findings import Finding, damages
from shared.documents import DocumentRef
from shared.errors import StoreDamaged
from shared.shard_file import Array, ShardGrid, read_rows
from shared.store import TeacherStore
from shared.store_check import Damage, check_arrays, check_block
from shared.store_files import StoreFiles
from shared.store_layout import ARRAYS, arrays_of, block_name

_TOPK = ("topk_ids", "topk_logits", "logsumexp")


@dataclass(frozen=True)
class Blocks:
    """A store as its records describe it: what each block must hold, and the prepared rows planned for it."""

    store: TeacherStore
    records: dict[int, dict[str, Any]]
    planned: Sequence[tuple[int, int]]

    @property
    def files(self) -> StoreFiles:
        """Where the store lies."""
        return self.store.files

    def arrays(self) -> set[str]:
        """Names of the arrays that the store's identity asks of every block."""
        identity = self.store.identity
        names = set(arrays_of(identity["precision"], identity["last_hidden"]))
        return names - set(_TOPK) if identity.get("topk") == 0 else names


def check(blocks: Blocks, block: int) -> list[Finding]:
    """Everything wrong with one block: each chunk of each array, then what the arrays say against record and plan."""
    found: list[Finding] = []
    try:
        for damage in _damages(blocks, block):
            rows = (damage.first_row, damage.last_row) if damage.array else None
            found.append(_finding(blocks, block, damage.file, damage.reason, damage.array, rows))
        found = _without_moved(blocks, block, found)
        if not damages(found):
            group = f"{block_name(block)}/zarr.json"
            found += [_finding(blocks, block, group, reason) for reason in _contradictions(blocks, block)]
        return found
    except OSError as error:  # a dying disk: the other blocks are still to be checked
        return [*found, _finding(blocks, block, str(error.filename or block_name(block)), f"cannot be read: {error}")]


def _damages(blocks: Blocks, block: int) -> Iterator[Damage]:
    try:
        arrays = blocks.store.sealed(block)  # read once, kept by the store for what follows
    except StoreDamaged:
        yield from check_block(blocks.files, block, str(blocks.records[block]["seal"]))
        return
    yield from check_arrays(blocks.files, block, arrays)


def moved_arrays(blocks: Blocks, block: int) -> frozenset[str]:
    """Arrays whose files `dflash store push --free-local` removed once they were safe in a bucket."""
    if not blocks.records[block]["detail"].get(MOVED):
        return frozenset()
    from manifests.store_free import LARGE

    return frozenset(LARGE)


def _without_moved(blocks: Blocks, block: int, found: list[Finding]) -> list[Finding]:
    """Findings less the arrays that are in a bucket and no longer here, which become one note."""
    moved = moved_arrays(blocks, block)
    kept = [finding for finding in found if finding.array not in moved or blocks.files.exists(finding.file)]
    if len(kept) == len(found):
        return kept
    reason = f"its large arrays were moved to {blocks.records[block]['detail'][MOVED]}: verify them there"
    return [*kept, Finding(kind="note", part="block", block=block, file=block_name(block), reason=reason)]


def _finding(
    blocks: Blocks, block: int, file: str, reason: str, array: str = "", rows: tuple[int, int] | None = None
) -> Finding:
    concerned = tuple(f"#{index}" for index in _documents_in(blocks, block, array, rows))
    return Finding(
        kind="damage", part="block", block=block, array=array, rows=rows, file=file, reason=reason, documents=concerned
    )


def _documents_in(blocks: Blocks, block: int, array: str, rows: tuple[int, int] | None) -> list[int]:
    """Row numbers of the documents that rows of an array belong to; those planned for the block when it cannot say."""
    planned = list(range(*blocks.planned[block])) if block < len(blocks.planned) else []
    try:
        index = blocks.store.read_block_array(block, "document_index")
        if rows is None or ARRAYS[array].rows == "block":
            return [int(number) for number in index]
        first, last = rows
        if ARRAYS[array].rows == "tokens":
            offsets = blocks.store.read_block_array(block, "document_offsets")
            first, last = int(np.searchsorted(offsets, first, "right")) - 1, int(np.searchsorted(offsets, last))
        return [int(number) for number in index[first:last]]
    except (StoreDamaged, OSError):
        return planned


def _contradictions(blocks: Blocks, block: int) -> Iterator[str]:
    record, arrays = blocks.records[block], blocks.store.sealed(block)
    if missing := sorted(blocks.arrays() - set(arrays)):
        yield f"seals no {', '.join(missing)}, which a store of this precision holds"
        return
    tokens = arrays["input_ids"].grid.shape[0]
    index = blocks.store.read_block_array(block, "document_index")
    if (tokens, len(index)) != (record["tokens"], record["documents"]):
        yield (
            f"holds {tokens:,} tokens of {len(index):,} documents, its record says {record['tokens']:,} of "
            f"{record['documents']:,}"
        )
    if block < len(blocks.planned) and len(index):
        first, end = blocks.planned[block]
        if not (first <= index[0] and index[-1] < end and (np.diff(index) > 0).all()):
            yield f"holds documents {index[0]}..{index[-1]}, plan.json gives it {first}..{end - 1}"


def check_document(blocks: Blocks, ref: DocumentRef) -> tuple[list[Finding], int]:
    """Everything wrong with the rows of one document, array by array; and how many bytes were read."""
    found, size = [], 0
    for name in sorted(blocks.arrays()):
        if ARRAYS[name].rows != "tokens" or name in moved_arrays(blocks, ref.block):
            continue
        try:
            size += blocks.store.read_document(ref, (name,))[name].nbytes
        except StoreDamaged as error:
            found.append(
                Finding(
                    kind="damage", part="block", block=ref.block, array=name, rows=(ref.start, ref.start + ref.length),
                    file=f"{block_name(ref.block)}/{name}", reason=str(error), documents=(f"#{ref.index}",),
                )
            )  # fmt: skip
    return found, size


def second_opinion(blocks: Blocks, block: int) -> list[Finding]:
    """Read a block through zarr-python, shard by shard, and compare with our own reader.

    Call for blocks of a local store that `check` found whole.
    """
    import zarr

    group = zarr.open_group(Path(blocks.store.location), mode="r")[block_name(block)]
    found = []
    for name, array in sorted(blocks.store.sealed(block).items()):
        grid = array.grid
        for first in range(0, grid.shape[0], grid.shard_rows):
            last = min(first + grid.shard_rows, grid.shape[0])
            reason = _compare(blocks.files, grid, array.sums, (first, last), group[name])  # type: ignore[index, unused-ignore]
            if reason:
                found.append(_finding(blocks, block, grid.file(first // grid.shard_rows), reason, name, (first, last)))
    return found


def _compare(files: StoreFiles, grid: ShardGrid, sums: Array, rows: tuple[int, int], theirs: Any) -> str:
    first, last = rows
    ours = np.empty((last - first, *grid.row_shape), grid.dtype)
    try:
        read_rows(files, grid, sums, first, last, ours)
        other = np.asarray(theirs[first:last])
    except Exception as error:  # noqa: BLE001 - zarr and its codecs raise a dozen kinds; all mean that it cannot read this
        return f"zarr-python cannot read it: {type(error).__name__}: {error}"
    if other.dtype != ours.dtype or other.shape != ours.shape:
        return f"zarr-python reads {other.dtype} {other.shape}, our reader {ours.dtype} {ours.shape}"
    different = np.flatnonzero(
        (other.reshape(len(other), -1).view(np.uint8) != ours.reshape(len(ours), -1).view(np.uint8)).any(axis=1)
    )
    return f"zarr-python reads other values from row {first + int(different[0])} on" if len(different) else ""
