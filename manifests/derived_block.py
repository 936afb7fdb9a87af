"""One block of a store made from other stores: the same files under a new seal, or some of its documents written anew.

Called by manifests/derived_store.py. A block is published by one rename; inputs are only read, and linked to.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shared.atomic import disk_faults
from shared.documents import DocumentRef, Documents
from shared.errors import StoreDamaged
from shared.seal import SealedArray
from shared.shard_file import Array
from shared.store import TeacherStore
from shared.store_check import check_block
from shared.store_files import LocalFiles, ShortFile, StoreFiles
from shared.store_layout import ARRAYS, block_name
from shared.store_write import publish_block, write_arrays, write_block

_PIECE_BYTES = 8 << 20
# Another file system, a system that keeps links to its owners, one without links, a file with too many.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EMLINK)


@dataclass(frozen=True, kw_only=True)
class BlockCopy:
    """What becomes of one block of an input: which of its documents are kept, and under which numbers and splits."""

    source: int
    """Which input."""
    block: int
    """Its number there."""
    documents: Documents
    """All documents of the block, in their order."""
    kept: Array
    """Positions in `documents`, ascending int64 [K]."""
    index: Array
    """New document_index of the kept, int64 [K]."""
    heldout: Array
    """New split of the kept, bool [K]."""

    @property
    def is_whole(self) -> bool:
        """Whether every document is kept."""
        return len(self.kept) == len(self.documents)

    @property
    def tokens(self) -> int:
        """Tokens of the kept documents."""
        return int(self.documents.length[self.kept].sum())


def make_block(store: TeacherStore, copy: BlockCopy, out: Path, number: int, *, link: bool) -> dict[str, Any]:
    """Publish `copy` as block `number` of `out`; returns {"bytes", "files", "seal", "linked_bytes"}.

    A block that was published by a run that died before its record is made again. Raises StoreDamaged, DiskFull.
    """
    final = out / block_name(number)
    if final.exists():
        with disk_faults(final):
            shutil.rmtree(final)
    if copy.is_whole:
        return _take_over(store, copy, out, number, link)
    written = write_block(out, number, _kept_arrays(store, copy))
    return {name: written[name] for name in ("bytes", "files", "seal")} | {"linked_bytes": 0}


def require_whole(store: TeacherStore, block: int) -> None:
    """Check every byte of an input's block. Raises StoreDamaged naming the first damage."""
    for damage in islice(check_block(store.files, block, store.blocks[block]), 1):
        where = f" {damage.array} rows {damage.first_row}..{damage.last_row}" if damage.array else ""
        raise StoreDamaged(
            f"block {block}{where} of {store.location} is damaged: {damage.reason}; "
            f"`dflash store verify {store.location} --repair` sets it aside, the command that made the store makes it "
            "again"
        )


def _take_over(store: TeacherStore, copy: BlockCopy, out: Path, number: int, link: bool) -> dict[str, Any]:
    """All files of the block, but for the per-document arrays that change and the seal, which names the block."""
    wanted = {"document_index": copy.index, "document_split": copy.heldout.astype(np.uint8)}
    changed = {
        name: values
        for name, values in wanted.items()
        if not np.array_equal(values, store.read_block_array(copy.block, name))
    }
    linked = 0

    def fill(folder: Path) -> dict[str, SealedArray]:
        nonlocal linked
        written = write_arrays(folder, number, changed)
        for name, array in store.sealed(copy.block).items():
            if name not in changed:
                for file in _files_of(array):
                    target = folder / name / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    linked += _place(store.files, f"{array.grid.name}/{file}", target, link)
                written[name] = array
        return dict(sorted(written.items()))

    return publish_block(out, number, fill) | {"linked_bytes": linked}


def _files_of(array: SealedArray) -> Iterator[str]:
    """Files of an array, relative to its folder."""
    yield "zarr.json"
    for shard in range(array.grid.num_shards()):
        yield array.grid.file(shard).removeprefix(f"{array.grid.name}/")


def _place(files: StoreFiles, name: str, target: Path, link: bool) -> int:
    """Link one file of an input to `target`, or copy it; returns the bytes that need no room. Raises StoreDamaged."""
    try:
        if link and isinstance(files, LocalFiles) and _linked(files.root / name, target):
            return target.stat().st_size
        size = files.size(name)
        buffer = np.empty(min(size, _PIECE_BYTES), np.uint8)
        with target.open("xb") as file:  # fsynced when the folder is published
            for start in range(0, size, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, size - start)]
                files.read_into(name, start, [piece])
                file.write(piece.data)
        return 0
    except (FileNotFoundError, ShortFile) as error:
        raise StoreDamaged(
            f"{files.show(name)} went missing or changed while it was taken over ({error}); run the same command again"
        ) from error


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    if target.is_symlink():  # a link to a link hangs on the input's folder
        target.unlink()
        return False
    return True


def copy_files(files: StoreFiles, folder: str, names: Sequence[str], target: Path, *, link: bool) -> None:
    """Link or copy files below an input's folder (names relative to it) into an existing one."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _place(files, f"{folder}/{name}", target / name, link)


def _kept_arrays(store: TeacherStore, copy: BlockCopy) -> dict[str, Array]:
    """The block's arrays with the kept documents only; codes and scales of an 8-bit store as they are."""
    lengths = copy.documents.length[copy.kept].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    arrays: dict[str, Array] = {}
    for name, sealed in store.sealed(copy.block).items():
        if ARRAYS[name].rows == "block":
            arrays[name] = store.read_block_array(copy.block, name)
        elif ARRAYS[name].rows == "tokens":
            values = np.empty((int(offsets[-1]), *sealed.grid.row_shape), sealed.grid.dtype)
            for first, end in _runs(copy.kept):
                rows = values[offsets[first] : offsets[end]]
                begin = int(copy.documents.start[copy.kept[first]])
                store.read_document(DocumentRef(0, copy.block, begin, len(rows), "", 0), (name,), {name: rows})
            arrays[name] = values
    return arrays | {
        "document_offsets": offsets,
        "document_index": copy.index,
        "document_split": copy.heldout.astype(np.uint8),
    }


def _runs(kept: Array) -> Iterator[tuple[int, int]]:
    """[first, end) of `kept` for each run of neighbouring documents: their tokens lie together and are one read."""
    breaks = np.flatnonzero(np.diff(kept) != 1) + 1
    edges = [0, *breaks.tolist(), len(kept)]
    yield from pairwise(edges)
