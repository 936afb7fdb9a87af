"""The direct shard files are zarr-python's own, byte for byte, in both directions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec

from shared import shard_file
from shared.errors import StoreDamaged
from shared.shard_file import Array, ShardGrid, check_index, read_rows, write_shard
from shared.store_files import LocalFiles


def write(root: Path, grid: ShardGrid, values: Array) -> Array:
    return np.concatenate([write_shard(root, grid, shard, values) for shard in range(grid.num_shards())])


def zarr_array(folder: Path, grid: ShardGrid) -> zarr.Array:
    return zarr.create_array(
        folder, shape=grid.shape, dtype=grid.dtype, chunks=(grid.chunk_rows, *grid.row_shape),
        shards=(grid.shard_rows, *grid.row_shape), fill_value=grid.fill, compressors=[Crc32cCodec()],
        serializer=BytesCodec(endian="little"), filters=None, config={"write_empty_chunks": True},
    )  # fmt: skip


shapes = st.tuples(st.integers(1, 40), st.sampled_from([(), (3,), (2, 5)]), st.integers(1, 8), st.integers(1, 4))


@given(
    case=shapes, dtype=st.sampled_from(["uint8", "int8", "int32", "uint16", "float32", "int64"]), seed=st.integers(0, 9)
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_bytes_equal_zarr_python_and_any_range_reads_back(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, tuple[int, ...], int, int], dtype: str, seed: int
) -> None:
    rows, row_shape, chunk, per_shard = case
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 100, (rows, *row_shape)).astype(dtype)
    grids = [ShardGrid(who, np.dtype(dtype), values.shape, chunk, chunk * per_shard, 7) for who in ("ours", "theirs")]
    sums = write(folder, grids[0], values)
    files = LocalFiles(folder)
    zarr_array(folder / "theirs", grids[1])[...] = values
    for shard in range(grids[0].num_shards()):
        assert files.read_bytes(grids[0].file(shard)) == files.read_bytes(grids[1].file(shard))
        check_index(files, grids[1], shard)
    start, stop = sorted(rng.integers(0, rows + 1, 2))
    out = np.full((stop - start, *row_shape), 99).astype(dtype)
    read_rows(files, grids[1], sums, start, stop, out)
    np.testing.assert_array_equal(out, values[start:stop], strict=True)


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint16).reshape(20, 3)
    grid = ShardGrid("x", values.dtype, values.shape, 4, 8, 0x7FC1)
    sums = write(tmp_path, grid, values)
    files = LocalFiles(tmp_path)

    def read() -> None:
        for shard in range(grid.num_shards()):
            check_index(files, grid, shard)
        read_rows(files, grid, sums, 0, 20, np.empty_like(values))

    read()
    for shard in range(grid.num_shards()):
        path = tmp_path / grid.file(shard)
        good = path.read_bytes()
        for position in range(len(good)):
            for bad in (
                good[:position] + bytes([good[position] ^ 1 << position % 8]) + good[position + 1 :],
                good[:position],
            ):
                path.write_bytes(bad)
                with pytest.raises(StoreDamaged) as caught:
                    read()
                assert str(path) in str(caught.value)
        path.write_bytes(good + b"\0")
        with pytest.raises(StoreDamaged):
            read()
        path.write_bytes(good)
    read()


def test_a_chunk_of_another_place_or_time_is_found_although_its_own_checksum_fits(tmp_path: Path) -> None:
    old, new = (np.arange(first, first + 60, dtype=np.uint16).reshape(20, 3) for first in (500, 0))
    grid = ShardGrid("x", new.dtype, new.shape, 4, 8, 0x7FC1)
    write(tmp_path / "old", grid, old)
    sums = write(tmp_path / "new", grid, new)
    path = tmp_path / "new" / grid.file(0)
    good = path.read_bytes()
    stale = (tmp_path / "old" / grid.file(0)).read_bytes()
    first, second = good[: grid.step], good[grid.step : 2 * grid.step]
    for bad in (second + first + good[2 * grid.step :], stale[: grid.step] + good[grid.step :], stale):
        path.write_bytes(bad)
        with pytest.raises(StoreDamaged) as caught:
            read_rows(LocalFiles(tmp_path / "new"), grid, sums, 0, 20, np.empty_like(new))
        assert "not the chunk that was sealed here" in str(caught.value)


def test_a_range_reads_no_more_than_the_chunks_it_touches(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint16).reshape(20, 3)
    grid = ShardGrid("x", values.dtype, values.shape, 4, 8, 0x7FC1)
    sums = write(tmp_path, grid, values)
    path = tmp_path / grid.file(0)
    data = bytearray(path.read_bytes())
    data[grid.step] ^= 1  # in chunk 1, rows 4..8
    path.write_bytes(data)
    files = LocalFiles(tmp_path)
    for start, stop, whole in ((0, 4, True), (8, 20, True), (1, 3, True), (3, 5, False), (4, 8, False), (7, 9, False)):
        out = np.empty((stop - start, 3), np.uint16)
        if whole:
            read_rows(files, grid, sums, start, stop, out)
            np.testing.assert_array_equal(out, values[start:stop])
        else:
            with pytest.raises(StoreDamaged):
                read_rows(files, grid, sums, start, stop, out)


def test_rows_never_go_to_a_place_that_does_not_fit(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint16).reshape(20, 3)
    grid = ShardGrid("x", values.dtype, values.shape, 4, 8, 0x7FC1)
    sums = write(tmp_path, grid, values)
    # A view with gaps would be filled in a copy, and read as whatever it held before.
    for bad in (np.zeros((9, 6), np.uint16)[:, :3], np.zeros((9, 3), np.int16), np.zeros((8, 3), np.uint16)):
        with pytest.raises(ValueError, match="do not fit"):
            read_rows(LocalFiles(tmp_path), grid, sums, 1, 10, bad)


@pytest.mark.parametrize("piece", [1, 100, 1 << 19])
def test_a_long_range_is_read_and_checked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(shard_file, "_PIECE_BYTES", piece)
    values = np.random.default_rng(0).integers(0, 2**16, (2100, 3), np.uint16)
    grid = ShardGrid("x", values.dtype, values.shape, 2, 2048, 0x7FC1)
    sums = write(tmp_path, grid, values)  # more chunks than one system call takes buffers
    files = LocalFiles(tmp_path)
    out = np.empty_like(values)[:2099]
    read_rows(files, grid, sums, 1, 2100, out)
    np.testing.assert_array_equal(out, values[1:])
    path = tmp_path / grid.file(0)
    good = path.read_bytes()
    for chunk in (0, 500, 1023):
        for position in (chunk * grid.step, (chunk + 1) * grid.step - 1):
            data = bytearray(good)
            data[position] ^= 4
            path.write_bytes(data)
            with pytest.raises(StoreDamaged, match=rf"chunk {chunk} of .*\(rows {2 * chunk}\.\.{2 * chunk + 2}\)"):
                read_rows(files, grid, sums, 1, 2100, out)
    path.write_bytes(good[: 700 * grid.step])
    with pytest.raises(StoreDamaged, match="expected"):
        read_rows(files, grid, sums, 1, 2100, out)
    path.write_bytes(good)
    read_rows(files, grid, sums, 1, 2100, out)


def test_threads_do_not_share_the_memory_for_a_chunk_read_in_part(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (4000, 3), np.uint16)
    grid = ShardGrid("x", values.dtype, values.shape, 16, 4096, 0x7FC1)
    sums = write(tmp_path, grid, values)
    files = LocalFiles(tmp_path)

    def read(start: int) -> None:
        out = np.empty((25, 3), np.uint16)
        read_rows(files, grid, sums, start, start + 25, out)
        np.testing.assert_array_equal(out, values[start : start + 25])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, 3900, 3)))
