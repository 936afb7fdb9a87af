"""Zarr v3 shard files written and read directly: one write and one read per run of rows, checksums on.

For the one codec chain we store, `sharding_indexed{bytes(little), crc32c}` with the index at the end, a shard is
plain rows with 4 checksum bytes after every inner chunk. zarr-python reads these files and writes the same bytes
(a test compares them), at a fraction of the speed: it copies each chunk several times. Only the first axis is
chunked. Called by shared/store.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from shared.errors import StoreDamaged

Array = np.ndarray[Any, Any]
CRC_BYTES = 4
ABSENT = 2**64 - 1


def crc32c(data: Array) -> int:
    """CRC-32C of a contiguous array's bytes."""
    return int(google_crc32c.value(data.reshape(-1).view(np.uint8)))


@dataclass(frozen=True)
class ShardGrid:
    """How the rows of one array lie in its shard files."""

    folder: Path
    """The array's folder (the one with zarr.json)."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    fill: float

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one inner chunk without its checksum."""
        return self.chunk_rows * int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def path(self, shard: int) -> Path:
        """The file of one shard: c/<shard>/0/0... ."""
        return self.folder.joinpath("c", str(shard), *("0" for _ in self.row_shape))

    def num_shards(self) -> int:
        """Shard files of the whole array."""
        return -(-self.shape[0] // self.shard_rows)

    def chunks_in(self, shard: int) -> int:
        """Inner chunks of a shard that hold at least one row of the array."""
        rows = min(self.shard_rows, self.shape[0] - shard * self.shard_rows)
        return -(-rows // self.chunk_rows)


def write_shards(grid: ShardGrid, values: Array) -> None:
    """Write every shard file of an array; the last chunk is padded with the fill value as zarr-python pads it."""
    values = np.ascontiguousarray(values, dtype=grid.dtype)
    for shard in range(grid.num_shards()):
        path = grid.path(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        first = shard * grid.shard_rows
        index = np.full((grid.shard_rows // grid.chunk_rows, 2), ABSENT, dtype="<u8")
        with path.open("wb", buffering=0) as file:
            for chunk in range(grid.chunks_in(shard)):
                start = first + chunk * grid.chunk_rows
                rows = _padded(values[start : start + grid.chunk_rows], grid)
                index[chunk] = (chunk * (grid.chunk_bytes + CRC_BYTES), grid.chunk_bytes + CRC_BYTES)
                _write_all(
                    file.fileno(), [rows.reshape(-1).view(np.uint8).data, crc32c(rows).to_bytes(CRC_BYTES, "little")]
                )
            _write_all(file.fileno(), [index.tobytes(), crc32c(index).to_bytes(CRC_BYTES, "little")])


def _padded(rows: Array, grid: ShardGrid) -> Array:
    if len(rows) == grid.chunk_rows:
        return rows
    whole = np.full((grid.chunk_rows, *grid.row_shape), grid.fill, dtype=grid.dtype)
    whole[: len(rows)] = rows
    return whole


def _write_all(descriptor: int, parts: list[Any]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if views:
            views[0] = views[0][written:]


def read_index(grid: ShardGrid, shard: int) -> Array:
    """The (offset, bytes) table of a shard, checked. Raises StoreDamaged naming the file and what is wrong."""
    path = grid.path(shard)
    slots = grid.shard_rows // grid.chunk_rows
    size = slots * 16 + CRC_BYTES
    chunks = grid.chunks_in(shard)
    expected = chunks * (grid.chunk_bytes + CRC_BYTES) + size
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected:
                raise StoreDamaged(f"{path} has {actual:,} bytes, {expected:,} expected")
            data = os.pread(file.fileno(), size, actual - size)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing") from error
    index = np.frombuffer(data[:-CRC_BYTES], dtype="<u8").reshape(slots, 2)
    if crc32c(index) != int.from_bytes(data[-CRC_BYTES:], "little"):
        raise StoreDamaged(f"the index of {path} fails its checksum")
    step = grid.chunk_bytes + CRC_BYTES
    if (
        not np.array_equal(index[:chunks, 0], np.arange(chunks, dtype=np.uint64) * np.uint64(step))
        or (index[:chunks, 1] != step).any()
    ):
        raise StoreDamaged(f"the index of {path} does not describe {chunks} chunks of {step:,} bytes in order")
    return index


def read_rows(grid: ShardGrid, start: int, stop: int, out: Array) -> None:
    """Read rows [start, stop) into `out` (same dtype, row shape), checking the checksum of every chunk touched.

    The shards' indices must have been checked (`read_index`). Raises StoreDamaged naming file, chunk and rows.
    """
    step = grid.chunk_bytes + CRC_BYTES
    row = start
    while row < stop:
        shard, inside = divmod(row, grid.shard_rows)
        last = min(stop - shard * grid.shard_rows, grid.shard_rows)
        first_chunk, last_chunk = inside // grid.chunk_rows, -(-last // grid.chunk_rows)
        path = grid.path(shard)
        data = np.empty((last_chunk - first_chunk, step), np.uint8)
        _read_all(path, data, first_chunk * step)
        stored = np.ascontiguousarray(data[:, -CRC_BYTES:]).view("<u4")[:, 0]
        for chunk in range(len(data)):
            if crc32c(data[chunk, :-CRC_BYTES]) != stored[chunk]:
                rows = shard * grid.shard_rows + (first_chunk + chunk) * grid.chunk_rows
                raise StoreDamaged(
                    f"chunk {first_chunk + chunk} of {path} (rows {rows}..{rows + grid.chunk_rows}) fails its checksum"
                )
        rows_read = np.ascontiguousarray(data[:, :-CRC_BYTES]).view(grid.dtype).reshape(-1, *grid.row_shape)
        skip = inside - first_chunk * grid.chunk_rows
        count = last - inside
        out[row - start : row - start + count] = rows_read[skip : skip + count]
        row += count


def _read_all(path: Path, data: Array, offset: int) -> None:
    view = data.reshape(-1).data
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing") from error
    try:
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if got == 0:
                raise StoreDamaged(f"{path} ends at byte {offset + done:,}, {offset + len(view):,} expected")
            done += got
    finally:
        os.close(descriptor)
