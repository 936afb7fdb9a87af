"""The files of a sealed block, one after another as bytes, each checked in full before it is handed out.

For commands that carry blocks from one place to another: what is wrong is never carried. Used by
manifests/store_push.py and store_pull.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shared.checksum import crc32c
from shared.errors import StoreDamaged
from shared.seal import SealedArray, check_metadata, digest, read_seal
from shared.shard_file import CRC_BYTES, Array
from shared.store_files import ShortFile, StoreFiles
from shared.store_layout import block_name


def block_files(files: StoreFiles, block: int, seal: str) -> Iterator[tuple[str, Array]]:
    """(name in the block's folder, content uint8) of every file, the group's zarr.json last. Raises StoreDamaged."""
    folder = block_name(block)
    for array in read_seal(files, block, seal).values():
        prefix = array.grid.name.removeprefix(f"{folder}/")
        for shard in range(array.grid.num_shards()):
            name = array.grid.file(shard).removeprefix(f"{folder}/")
            yield name, _shard(files, array, shard)
        yield f"{prefix}/zarr.json", np.frombuffer(check_metadata(files, array), np.uint8)
    yield "zarr.json", np.frombuffer(_group(files, f"{folder}/zarr.json", seal), np.uint8)


def file_sizes(files: StoreFiles, block: int, seal: str) -> dict[str, int | None]:
    """Names in the block's folder and their sizes, None for those of metadata. Raises StoreDamaged."""
    folder = block_name(block)
    sizes: dict[str, int | None] = {"zarr.json": None}
    for array in read_seal(files, block, seal).values():
        sizes[f"{array.grid.name.removeprefix(f'{folder}/')}/zarr.json"] = None
        for shard in range(array.grid.num_shards()):
            sizes[array.grid.file(shard).removeprefix(f"{folder}/")] = array.grid.file_bytes(shard)
    return sizes


def _group(files: StoreFiles, name: str, seal: str) -> bytes:
    try:
        data = files.read_bytes(name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show(name)} is missing") from error
    if digest(data) != seal:
        raise StoreDamaged(f"{files.show(name)} changed while the block was read")
    return data


def _shard(files: StoreFiles, array: SealedArray, shard: int) -> Array:
    """One shard file with its size, its index and each of its chunks compared with the seal."""
    grid, name = array.grid, array.grid.file(shard)
    expected = grid.file_bytes(shard)
    data = np.empty(expected, np.uint8)
    try:
        if (size := files.size(name)) != expected:
            raise StoreDamaged(f"{files.show(name)} has {size:,} bytes, {expected:,} expected")
        files.read_into(name, 0, [data])
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show(name)} is missing") from error
    except ShortFile as error:
        raise StoreDamaged(f"{files.show(name)} {error}") from error
    index = grid.index_of(shard)
    if data[-len(index) :].tobytes() != index:
        raise StoreDamaged(f"the index of {files.show(name)} is not that of {grid.chunks_in(shard)} chunks")
    first = shard * (grid.shard_rows // grid.chunk_rows)
    for number in range(grid.chunks_in(shard)):
        begin = number * grid.step
        actual = crc32c(data[begin : begin + grid.chunk_bytes])
        tail = data[begin + grid.chunk_bytes : begin + grid.step].tobytes()
        stored, sealed = int.from_bytes(tail, "little"), int(array.sums[first + number])
        if len(tail) != CRC_BYTES or not actual == stored == sealed:
            raise StoreDamaged(
                f"chunk {first + number} of {files.show(name)} is not what was sealed: {actual:08x}, behind it "
                f"{stored:08x}, sealed {sealed:08x}"
            )
    return data
