"""Zarr v3 shard files written and read directly: rows go from the file into place in one call, checksums on.

For the one codec chain we store, `sharding_indexed{bytes(little), crc32c}` with the index at the end, a shard is
plain rows with 4 checksum bytes after every inner chunk. zarr-python reads these files and writes the same bytes
(a test compares them), at a fraction of the speed: it copies each chunk several times. Only the first axis is
chunked. Called by shared/store.py, store_write.py and store_check.py.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from shared.checksum import crc32c, crc32c_of_each
from shared.early_writeback import start_writing
from shared.errors import StoreDamaged
from shared.store_files import ShortFile, StoreFiles
from shared.store_layout import ARRAYS, chunks_of

Array = np.ndarray[Any, Any]
CRC_BYTES = 4
# Read so much, then check it: it is still in the processor's second cache.
_PIECE_BYTES = 1 << 19
_MAX_CHUNKS = 512
# The disk begins with what is written while the rest is still being checked and copied.
_STARTED_BYTES = 4 << 20
ABSENT = 2**64 - 1


@dataclass(frozen=True)
class ShardGrid:
    """How the rows of one array lie in its shard files."""

    name: str
    """The array's folder (the one with zarr.json), relative to the store."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    fill: float

    @classmethod
    def of(cls, folder: str, array: str, shape: Sequence[int]) -> ShardGrid:
        """The grid that the layout gives an array of this shape in a block's folder."""
        layout, rows = ARRAYS[array], tuple(int(size) for size in shape)
        chunk, shard = chunks_of(array, rows)
        return cls(f"{folder}/{array}", np.dtype(layout.dtype), rows, chunk[0], shard[0], layout.fill)

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Bytes of one inner chunk without its checksum."""
        return self.chunk_rows * self.row_bytes

    @functools.cached_property
    def step(self) -> int:
        """Bytes from one inner chunk to the next."""
        return self.chunk_bytes + CRC_BYTES

    def file(self, shard: int) -> str:
        """The file of one shard, relative to the store: <array>/c/<shard>/0/0... ."""
        return "/".join([self.name, "c", str(shard), *("0" for _ in self.row_shape)])

    def num_shards(self) -> int:
        """Shard files of the whole array."""
        return -(-self.shape[0] // self.shard_rows)

    def num_chunks(self) -> int:
        """Inner chunks of the whole array."""
        return -(-self.shape[0] // self.chunk_rows)

    def chunks_in(self, shard: int) -> int:
        """Inner chunks of a shard that hold at least one row of the array."""
        rows = min(self.shard_rows, self.shape[0] - shard * self.shard_rows)
        return -(-rows // self.chunk_rows)

    def index_of(self, shard: int) -> bytes:
        """The shard's index as it must stand at the end of the file: offsets and sizes in order, checksum."""
        chunks = self.chunks_in(shard)
        index = np.full((self.shard_rows // self.chunk_rows, 2), ABSENT, dtype="<u8")
        index[:chunks, 0] = np.arange(chunks, dtype=np.uint64) * np.uint64(self.step)
        index[:chunks, 1] = self.step
        data = index.tobytes()
        return data + crc32c(data).to_bytes(CRC_BYTES, "little")

    def file_bytes(self, shard: int) -> int:
        """Size of a shard file."""
        return self.chunks_in(shard) * self.step + self.shard_rows // self.chunk_rows * 16 + CRC_BYTES


def write_shard(
    root: Path, grid: ShardGrid, shard: int, values: Array, told: Callable[[int], None] = lambda size: None
) -> Array:
    """Write one shard file of an array, not yet fsynced; returns the checksums of its inner chunks, uint32.

    `values` is the whole array, contiguous. The last chunk is padded with the fill value as zarr-python pads it. `told`
    hears the bytes of every piece that is written.
    """
    path = root / grid.file(shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    first = shard * grid.shard_rows
    sums = np.empty(grid.chunks_in(shard), "<u4")
    tails = sums.view(np.uint8).reshape(-1, CRC_BYTES)
    step = min(_MAX_CHUNKS, max(1, _PIECE_BYTES // grid.chunk_bytes))
    with path.open("xb", buffering=0) as file:
        started = written = 0
        for done in range(0, len(sums), step):
            start = first + done * grid.chunk_rows
            chunks = _chunks(values[start : start + min(step, len(sums) - done) * grid.chunk_rows], grid)
            end = done + len(chunks)
            sums[done:end] = crc32c_of_each(chunks)
            _write_all(file.fileno(), [part for pair in zip(chunks, tails[done:end], strict=True) for part in pair])
            written += len(chunks) * grid.step
            if written - started >= _STARTED_BYTES:
                start_writing(file.fileno(), started, written - started)
                told(written - started)
                started = written
        _write_all(file.fileno(), [grid.index_of(shard)])
        told(written - started)
    return sums


def _chunks(rows: Array, grid: ShardGrid) -> list[Array]:
    """The bytes of each chunk of these rows, the last one padded if need be."""
    whole = len(rows) // grid.chunk_rows
    flat = rows[: whole * grid.chunk_rows].reshape(-1).view(np.uint8)
    chunks = list(flat.reshape(whole, grid.chunk_bytes))
    if len(rows) > whole * grid.chunk_rows:
        last = np.full((grid.chunk_rows, *grid.row_shape), grid.fill, dtype=grid.dtype)
        last[: len(rows) - whole * grid.chunk_rows] = rows[whole * grid.chunk_rows :]
        chunks.append(last.reshape(-1).view(np.uint8))
    return chunks


def _write_all(descriptor: int, parts: list[Any]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if views:
            views[0] = views[0][written:]


def check_index(files: StoreFiles, grid: ShardGrid, shard: int) -> None:
    """Raise StoreDamaged, naming the file, unless a shard file has its size and its index."""
    name, expected, size = grid.file(shard), grid.index_of(shard), grid.file_bytes(shard)
    try:
        actual = files.size(name)
        if actual != size:
            raise StoreDamaged(f"{files.show(name)} has {actual:,} bytes, {size:,} expected")
        data = bytearray(len(expected))
        files.read_into(name, size - len(expected), [data])
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show(name)} is missing") from error
    except ShortFile as error:
        raise StoreDamaged(f"{files.show(name)} {error}") from error
    if data != expected:
        raise StoreDamaged(
            f"the index of {files.show(name)} is not that of {grid.chunks_in(shard)} chunks of {grid.step:,} bytes"
        )


def read_rows(files: StoreFiles, grid: ShardGrid, sums: Array, start: int, stop: int, out: Array) -> None:
    """Read rows [start, stop) into `out` (contiguous, same dtype and row shape), checking every chunk touched.

    A chunk must have the checksum that stands behind it and the one in `sums` (uint32 per inner chunk of the array,
    from the block's seal): the first finds a flipped bit, the second also a chunk of another place or time. The
    shards' indices must have been checked (`check_index`). Raises StoreDamaged naming file, chunk and rows.
    """
    if not out.flags.c_contiguous or out.dtype != grid.dtype or out.shape != (stop - start, *grid.row_shape):
        raise ValueError(f"rows {start}..{stop} of {grid.name} do not fit into {out.dtype}{out.shape}")
    flat = out.reshape(-1).view(np.uint8)
    row = start
    while row < stop:
        end = min(stop, (row // grid.shard_rows + 1) * grid.shard_rows)
        place = flat[(row - start) * grid.row_bytes : (end - start) * grid.row_bytes]
        try:
            if end - row < grid.chunk_rows and row // grid.chunk_rows == (end - 1) // grid.chunk_rows:
                _read_within_chunk(files, grid, sums, row, place)
            else:
                _read_from_shard(files, grid, sums, (row, end), place)
        except FileNotFoundError as error:
            raise StoreDamaged(f"{files.show(grid.file(row // grid.shard_rows))} is missing") from error
        except ShortFile as error:
            raise StoreDamaged(f"{files.show(grid.file(row // grid.shard_rows))} {error}") from error
        row = end


def _read_within_chunk(files: StoreFiles, grid: ShardGrid, sums: Array, row: int, out: Array) -> None:
    """What a small array needs of most documents: a part of one chunk, with few calls."""
    chunk = row // grid.chunk_rows
    shard, inside = divmod(chunk, grid.shard_rows // grid.chunk_rows)
    aside = _scratch(0, grid.step)
    files.read_into(grid.file(shard), inside * grid.step, [aside])
    data = aside[: grid.chunk_bytes]
    found = ([crc32c(data)], [int.from_bytes(aside[grid.chunk_bytes :], "little")], [int(sums[chunk])])
    if not found[0] == found[1] == found[2]:
        _refuse(files, grid, chunk, found)
    skipped = (row - chunk * grid.chunk_rows) * grid.row_bytes
    out[:] = data[skipped : skipped + len(out)]


def _read_from_shard(files: StoreFiles, grid: ShardGrid, sums: Array, rows: tuple[int, int], out: Array) -> None:
    first = rows[0] // grid.chunk_rows
    shard, inside = divmod(first, grid.shard_rows // grid.chunk_rows)
    chunks, edges = _places(grid, rows, out)
    stored = np.empty(len(chunks), "<u4")
    tails = stored.view(np.uint8).reshape(-1, CRC_BYTES)
    buffers = [part for pair in zip(chunks, tails, strict=True) for part in pair]
    step = min(_MAX_CHUNKS, max(1, _PIECE_BYTES // grid.chunk_bytes))
    pieces = [buffers[i : i + 2 * step] for i in range(0, len(buffers), 2 * step)]
    reading = files.read_pieces(grid.file(shard), inside * grid.step, pieces)
    done = 0
    for piece, _ in zip(pieces, reading, strict=True):
        end = done + len(piece) // 2
        actual = crc32c_of_each(chunks[done:end])
        behind, sealed = stored[done:end].tolist(), sums[first + done : first + end].tolist()
        if not actual == behind == sealed:
            _refuse(files, grid, first + done, (actual, behind, sealed))
        done = end
    for target, source in edges:
        target[:] = source


def _places(grid: ShardGrid, rows: tuple[int, int], out: Array) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """Where the bytes of each chunk of these rows go, in order; and what to copy afterwards, as (target, source).

    A chunk of which only a part is asked for is read whole, aside: its checksum needs all of it.
    """
    size, row = grid.chunk_bytes, grid.row_bytes
    chunks: list[Array] = []
    edges: list[tuple[Array, Array]] = []
    at, (start, stop) = 0, rows
    while start < stop:
        skipped = start % grid.chunk_rows * row
        if skipped == 0 and stop - start >= grid.chunk_rows:
            count = (stop - start) // grid.chunk_rows
            chunks.extend(out[at : at + count * size].reshape(count, size))
            start, at = start + count * grid.chunk_rows, at + count * size
            continue
        taken = min(size - skipped, (stop - start) * row)
        aside = _scratch(len(edges), size)
        chunks.append(aside)
        edges.append((out[at : at + taken], aside[skipped : skipped + taken]))
        start, at = start + taken // row, at + taken
    return chunks, edges


_threads = threading.local()


def _scratch(number: int, size: int) -> Array:
    """Memory of this thread for one chunk, kept from call to call: touching fresh memory costs as much as reading."""
    kept: dict[int, Array] = _threads.__dict__.setdefault("kept", {})
    if number not in kept or len(kept[number]) < size:
        kept[number] = np.empty(size, np.uint8)
    return kept[number][:size]


def _refuse(files: StoreFiles, grid: ShardGrid, first: int, sums: tuple[list[int], list[int], list[int]]) -> NoReturn:
    """Say which of the chunks from `first` on is not what was sealed: (checksum, the one behind it, the sealed one)."""
    number = next(i for i, found in enumerate(zip(*sums, strict=True)) if len(set(found)) > 1)
    actual, behind, sealed = (found[number] for found in sums)
    chunk = first + number
    reason = "fails its checksum" if actual != behind else "is not the chunk that was sealed here"
    raise StoreDamaged(
        f"chunk {chunk} of {files.show(grid.file(chunk * grid.chunk_rows // grid.shard_rows))} "
        f"(rows {chunk * grid.chunk_rows}..{min((chunk + 1) * grid.chunk_rows, grid.shape[0])}) {reason}: "
        f"{actual:08x}, behind it {behind:08x}, sealed {sealed:08x}"
    )
