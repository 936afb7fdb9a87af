"""Check every byte of a block: all files, every chunk of every array; says what is wrong instead of stopping at it.

Called by `dflash store verify` and the store commands; reading for training is shared/store.py, which stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.errors import StoreDamaged
from shared.seal import Sealed, SealedArray, check_metadata, read_seal
from shared.shard_file import check_index, read_rows
from shared.store_files import StoreFiles

# Read at a time: many chunks, so that calls cost nothing, and little memory in each of several threads.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Damage:
    """Something of a block that is not what was recorded; rows are of the array, the whole block when it names none."""

    block: int
    array: str
    first_row: int
    last_row: int
    file: str
    reason: str


def check_block(files: StoreFiles, block: int, seal: str) -> Iterator[Damage]:
    """Everything wrong with a block, at most one finding per chunk; nothing when it is whole."""
    try:
        arrays = read_seal(files, block, seal)
    except StoreDamaged as error:
        yield Damage(block, "", 0, 0, f"blocks/{block:06d}/zarr.json", str(error))
        return
    yield from check_arrays(files, block, arrays)


def check_arrays(files: StoreFiles, block: int, arrays: Sealed) -> Iterator[Damage]:
    """Everything wrong with the arrays of a block whose seal was read already."""
    for name, array in sorted(arrays.items()):
        try:
            check_metadata(files, array)
        except StoreDamaged as error:
            yield Damage(block, name, 0, array.grid.shape[0], f"{array.grid.name}/zarr.json", str(error))
        for shard in range(array.grid.num_shards()):
            yield from _check_shard(files, block, name, array, shard)


def _check_shard(files: StoreFiles, block: int, name: str, array: SealedArray, shard: int) -> Iterator[Damage]:
    grid = array.grid
    first = shard * grid.shard_rows
    last = min(first + grid.shard_rows, grid.shape[0])
    file = grid.file(shard)
    try:
        check_index(files, grid, shard)
    except StoreDamaged as error:
        yield Damage(block, name, first, last, file, str(error))
        return
    piece = grid.chunk_rows * max(1, _PIECE_BYTES // max(grid.chunk_bytes, 1))
    buffer = np.empty((min(piece, last - first), *grid.row_shape), grid.dtype)
    for row in range(first, last, piece):
        end = min(row + piece, last)
        try:
            read_rows(files, grid, array.sums, row, end, buffer[: end - row])
        except StoreDamaged:  # chunk by chunk only where something is wrong
            for start in range(row, end, grid.chunk_rows):
                stop = min(start + grid.chunk_rows, end)
                try:
                    read_rows(files, grid, array.sums, start, stop, buffer[: stop - start])
                except StoreDamaged as error:
                    yield Damage(block, name, start, stop, file, str(error))
