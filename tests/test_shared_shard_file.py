"""The direct shard files are zarr-python's own, byte for byte, in both directions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec

from shared.errors import StoreDamaged
from shared.shard_file import ShardGrid, read_index, read_rows, write_shards


def zarr_array(folder: Path, grid: ShardGrid) -> zarr.Array:
    return zarr.create_array(
        folder, shape=grid.shape, dtype=grid.dtype, chunks=(grid.chunk_rows, *grid.row_shape),
        shards=(grid.shard_rows, *grid.row_shape), fill_value=grid.fill, compressors=[Crc32cCodec()],
        serializer=BytesCodec(endian="little"), filters=None, config={"write_empty_chunks": True},
    )  # fmt: skip


shapes = st.tuples(st.integers(1, 40), st.sampled_from([(), (3,), (2, 5)]), st.integers(1, 8), st.integers(1, 4))


@given(case=shapes, dtype=st.sampled_from(["uint8", "int32", "uint16", "float32", "int64"]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_equal_zarr_python_and_any_range_reads_back(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, tuple[int, ...], int, int], dtype: str, seed: int
) -> None:
    rows, row_shape, chunk, per_shard = case
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 200, (rows, *row_shape)).astype(dtype)
    grids = [
        ShardGrid(folder / who, np.dtype(dtype), values.shape, chunk, chunk * per_shard, 7)
        for who in ("ours", "theirs")
    ]
    write_shards(grids[0], values)
    zarr_array(folder / "theirs", grids[1])[...] = values
    for shard in range(grids[0].num_shards()):
        assert grids[0].path(shard).read_bytes() == grids[1].path(shard).read_bytes()
        read_index(grids[1], shard)
    start, stop = sorted(rng.integers(0, rows + 1, 2))
    out = np.full((stop - start, *row_shape), 99).astype(dtype)
    read_rows(grids[1], start, stop, out)
    np.testing.assert_array_equal(out, values[start:stop], strict=True)


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint16).reshape(20, 3)
    grid = ShardGrid(tmp_path, values.dtype, values.shape, 4, 8, 0x7FC1)
    write_shards(grid, values)

    def read() -> None:
        for shard in range(grid.num_shards()):
            read_index(grid, shard)
        read_rows(grid, 0, 20, np.empty_like(values))

    read()
    for shard in range(grid.num_shards()):
        path = grid.path(shard)
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
