"""The seal of a block: checksums of every chunk of every array, kept in the block's own Zarr metadata.

A shard record holds the hash of that metadata, so a record vouches for every byte below it: what is flipped, cut,
swapped, stale or missing cannot read. Used by store_write.py, store.py and store_check.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.checksum import crc32c
from shared.errors import StoreDamaged
from shared.shard_file import Array, ShardGrid
from shared.store_files import StoreFiles
from shared.store_layout import ARRAYS, STORE_FORMAT, block_name, group_metadata

ATTRIBUTE = "dflash_seal"


@dataclass(frozen=True)
class SealedArray:
    """One array of a block: where its rows lie, the checksum of its metadata file, uint32 checksums of its chunks."""

    grid: ShardGrid
    metadata: int
    sums: Array


Sealed = dict[str, SealedArray]


def document(value: Mapping[str, Any]) -> bytes:
    """The bytes of a metadata file: the same for the same content."""
    return (json.dumps(value, indent=1) + "\n").encode()


def digest(data: bytes) -> str:
    """What a shard record keeps of a block's zarr.json: BLAKE2b, 16 bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed_group(block: int, arrays: Mapping[str, SealedArray]) -> bytes:
    """The bytes of a block's zarr.json, seal inside."""
    entries = {
        name: {
            "shape": list(array.grid.shape),
            "zarr_json": f"{array.metadata:08x}",
            "crc32c": array.sums.astype(">u4").tobytes().hex(),
        }
        for name, array in arrays.items()
    }
    return document(group_metadata({ATTRIBUTE: {"format": STORE_FORMAT, "block": block, "arrays": entries}}))


def read_seal(files: StoreFiles, block: int, seal: str) -> Sealed:
    """The arrays of a block as its record vouches for them. Raises StoreDamaged."""
    name = f"{block_name(block)}/zarr.json"
    try:
        data = files.read_bytes(name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"block {block} is recorded as done but {files.show(name)} is missing") from error
    if digest(data) != seal:
        raise StoreDamaged(
            f"{files.show(name)} is not the one that block {block} was recorded with: its hash is {digest(data)}, "
            f"the record says {seal}"
        )
    try:
        found = json.loads(data)["attributes"][ATTRIBUTE]
        arrays = {
            array: SealedArray(
                ShardGrid.of(block_name(block), array, entry["shape"]),
                int(entry["zarr_json"], 16),
                np.frombuffer(bytes.fromhex(entry["crc32c"]), ">u4").astype(np.uint32),
            )
            for array, entry in found["arrays"].items()
            if array in ARRAYS
        }
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{files.show(name)} holds no seal that this version reads: {error!r}") from error
    if found["block"] != block:
        raise StoreDamaged(f"{files.show(name)} is the seal of block {found['block']}, not of block {block}")
    return arrays


def check_metadata(files: StoreFiles, array: SealedArray) -> bytes:
    """The array's own zarr.json (plain zarr readers go by it). Raises StoreDamaged unless it is the sealed one."""
    name = f"{array.grid.name}/zarr.json"
    try:
        data = files.read_bytes(name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show(name)} is missing") from error
    if (actual := crc32c(data)) != array.metadata:
        raise StoreDamaged(f"{files.show(name)} fails its checksum: {actual:08x}, sealed {array.metadata:08x}")
    return data
