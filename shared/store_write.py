"""Make a teacher store and write its blocks: each once, aside, fsynced, sealed, then published by one rename.

Called by stage 1's workers and by the store commands. Who is done is said by the shard records (manifests/blocks.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shared.atomic import aside, disk_faults, publish_dir, write_json
from shared.checksum import crc32c
from shared.json_file import sealed
from shared.seal import SealedArray, digest, document, sealed_group
from shared.shard_file import ShardGrid, write_shard
from shared.store import read_identity, require_same
from shared.store_layout import ARRAYS, STORE_FORMAT, array_metadata, block_name, group_metadata

Arrays = Mapping[str, np.ndarray[Any, Any]]
# Two shard files at a time: the checksum of one is computed while the other is written (0.5 -> 1.0 of a raw file).
WRITERS = 2
IDENTITY_ATTRIBUTE = "dflash_store"
# The same in every store, as all of blocks/ is for the same rows and settings.
BLOCKS_METADATA = group_metadata({"dflash_format": STORE_FORMAT})


def create(store: Path, identity: dict[str, Any]) -> None:
    """Make an empty store with this identity; an existing one must have the same (StoreMismatch otherwise)."""
    if (store / "store.json").exists():
        require_same(read_identity(store), identity, store)
        return
    with disk_faults(store):
        (store / "blocks").mkdir(parents=True, exist_ok=True)
    identity = sealed({"format": STORE_FORMAT, "store_uuid": uuid.uuid4().hex} | identity)
    write_json(store / "zarr.json", root_metadata(identity))
    write_json(store / "blocks" / "zarr.json", BLOCKS_METADATA)
    write_json(store / "store.json", identity)


def root_metadata(identity: dict[str, Any]) -> dict[str, Any]:
    """What the store's own zarr.json says: the whole of store.json again, so that either can restore the other."""
    return group_metadata({"dflash_format": STORE_FORMAT, IDENTITY_ATTRIBUTE: identity})


def write_block(
    store: Path, block: int, arrays: Arrays, told: Callable[[int], None] = lambda size: None
) -> dict[str, Any]:
    """Write one block of whole documents and publish it by rename; `told` hears of every piece that is written, and
    again when it is on the disk, from threads.

    `arrays` hold every array of shared.store_layout.ARRAYS that the store keeps, with those dtypes (document_supervised
    is counted here); per-token arrays have N rows, document_offsets D + 1, the other per-document arrays D. Returns
    {"tokens", "documents", "bytes", "files", "seal"}. Raises FileExistsError if the block is there already, DiskFull,
    or ValueError for our own mistakes.
    """
    arrays = _with_counts(arrays)
    _check_shapes(arrays)
    counts = {"tokens": int(arrays["input_ids"].shape[0]), "documents": int(arrays["document_index"].shape[0])}
    return counts | publish_block(store, block, lambda folder: write_arrays(folder, block, arrays, told), told)


def publish_block(
    store: Path,
    block: int,
    fill: Callable[[Path], Mapping[str, SealedArray]],
    told: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Publish a block of whatever arrays `fill` puts into a folder; returns {"bytes", "files", "seal"}."""
    final = store / block_name(block)
    with aside(final) as temporary:
        data = sealed_group(block, fill(temporary))
        (temporary / "zarr.json").write_bytes(data)
        sizes = [path.stat().st_size for path in temporary.rglob("*") if path.is_file()]
        publish_dir(temporary, final, told)
    return {"bytes": sum(sizes), "files": len(sizes), "seal": digest(data)}


def write_arrays(
    folder: Path, block: int, arrays: Arrays, told: Callable[[int], None] = lambda size: None
) -> dict[str, SealedArray]:
    """Write whole arrays of a block below `folder`, and return what the block's seal says of each; not yet durable."""
    grids: dict[str, tuple[ShardGrid, int]] = {}
    tasks: list[tuple[str, int]] = []
    ready: dict[str, np.ndarray[Any, Any]] = {}
    for name in sorted(arrays):
        ready[name] = np.ascontiguousarray(arrays[name])
        grid = ShardGrid.of("", name, arrays[name].shape)
        metadata = document(array_metadata(name, grid.shape))
        (folder / name).mkdir()
        (folder / name / "zarr.json").write_bytes(metadata)
        grids[name] = grid, crc32c(metadata)
        tasks += [(name, shard) for shard in range(grid.num_shards())]

    def write(task: tuple[str, int]) -> np.ndarray[Any, Any]:
        name, shard = task
        grid = ShardGrid.of(".", name, ready[name].shape)
        return write_shard(folder, grid, shard, ready[name], told)

    with ThreadPoolExecutor(WRITERS, thread_name_prefix="shard-writer") as pool:
        sums = dict(zip(tasks, pool.map(write, tasks), strict=True))
    return {
        name: SealedArray(
            ShardGrid.of(block_name(block), name, grid.shape),
            metadata,
            np.concatenate([sums[name, shard] for shard in range(grid.num_shards())]),
        )
        for name, (grid, metadata) in grids.items()
    }


def _with_counts(arrays: Arrays) -> Arrays:
    # Kept per document so that opening a store never reads its token arrays.
    sums = np.concatenate([[0], np.cumsum(arrays["loss_mask"], dtype=np.int64)])
    offsets = arrays["document_offsets"]
    return {**arrays, "document_supervised": sums[offsets[1:]] - sums[offsets[:-1]]}


def _check_shapes(arrays: Arrays) -> None:
    offsets = arrays["document_offsets"]
    rows = {"tokens": arrays["input_ids"].shape[0], "offsets": len(offsets), "documents": len(offsets) - 1}
    for name, values in arrays.items():
        layout = ARRAYS[name]
        if values.dtype != np.dtype(layout.dtype):
            raise ValueError(f"{name} has dtype {values.dtype}, the layout says {layout.dtype}")
        if layout.rows != "block" and values.shape[0] != rows[layout.rows]:
            raise ValueError(f"{name} has {values.shape[0]} rows, {rows[layout.rows]} expected")
    if offsets[0] != 0 or offsets[-1] != rows["tokens"] or (np.diff(offsets) <= 0).any():
        raise ValueError("document_offsets must rise from 0 to the number of tokens")
