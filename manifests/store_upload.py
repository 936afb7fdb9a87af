"""Put the parts of a store into a bucket: a block, the target, the plan and group files, the documents cache.

Every byte is compared with the checksum it was recorded with while it is read, and what lies there already with the
same size and checksum is not sent again. Nothing here counts until manifests/store_publish.py says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from shared.block_bytes import block_files, file_sizes
from shared.bucket import Bucket
from shared.checksum import crc32c
from shared.documents import index_name, read_index, write_index
from shared.errors import StoreDamaged, StoreMismatch
from shared.json_file import read_object
from shared.seal import digest
from shared.store import TeacherStore
from shared.store_files import LocalFiles
from shared.target_files import LIST, damaged

Sent = Callable[[int], None]
"""Told the bytes of each object that was sent or found there."""


def upload_block(bucket: Bucket, store: Path, block: int, seal: str, place: str, sent: Sent) -> int:
    """Make a block's folder whole in the bucket, its zarr.json last; returns the bytes sent.

    Raises StoreDamaged for what is wrong here, StorageRefused for what is wrong there.
    """
    files = LocalFiles(store)
    there = {key.removeprefix(f"{place}/"): size for key, size in bucket.sizes(place).items()}
    if "zarr.json" in there and digest(bucket.read(f"{place}/zarr.json")) == seal:
        sizes = file_sizes(files, block, seal)
        if all(
            there.get(name, -1) in ((size,) if size is not None else range(1, 1 << 62)) for name, size in sizes.items()
        ):
            sent(sum(there[name] for name in sizes))
            return 0
    total = 0
    for name, data in block_files(files, block, seal):
        checksum = f"crc32c:{crc32c(data):08x}"
        if there.get(name) != len(data) or bucket.checksum(f"{place}/{name}") != checksum:
            bucket.write(f"{place}/{name}", data, checksum)
            total += len(data)
        sent(len(data))
    return total


def upload_plan(bucket: Bucket, store: Path) -> None:
    """The plan and the group files that let plain zarr walk the store. Raises StoreMismatch for another plan."""
    for name in ("zarr.json", "blocks/zarr.json", "plan.json"):
        data = (store / name).read_bytes()
        try:
            there = bucket.read(name)
        except FileNotFoundError:
            bucket.write(name, data)
            continue
        if there != data:
            raise StoreMismatch(
                f"{bucket.show(name)} is not the {store / name} of this store ({len(there):,} and {len(data):,} "
                "bytes); restore the local one, or push to another prefix"
            )


def is_exported(store: Path) -> bool:
    """Whether target/ is there in full (it appears by one rename)."""
    return (store / "target" / "head.safetensors").is_file()


def upload_target(bucket: Bucket, store: Path, sent: Sent) -> None:
    """The target's files, the list of them last. Raises StoreMismatch when another export lies there already."""
    listed = (store / "target" / LIST).read_bytes() if (store / "target" / LIST).exists() else b""
    try:
        there = bucket.read(f"target/{LIST}")
    except FileNotFoundError:
        there = None
    if there == listed:
        return
    if there is not None:
        raise StoreMismatch(
            f"{bucket.show(f'target/{LIST}')} lists another export of the target than {store / 'target' / LIST}; push "
            "to another prefix"
        )
    for name, reason in damaged(LocalFiles(store), "target", strict=True):
        raise StoreDamaged(
            f"{store / name} {reason}; delete {store / 'target'} and run the same `dflash extract` command: it is made "
            "again"
        )
    entries = read_object(store / "target" / LIST, "export the target again")["files"]
    for name, entry in sorted(entries.items()):
        if not _is_there(bucket, f"target/{name}", entry):
            # By path, not in memory: a head can be gigabytes.
            bucket.write(f"target/{name}", store / "target" / name, f"blake2b:{entry['blake2b']}")
        sent(int(entry["bytes"]))
    bucket.write(f"target/{LIST}", listed)


def _is_there(bucket: Bucket, key: str, entry: Mapping[str, int | str]) -> bool:
    try:
        return bucket.size(key) == entry["bytes"] and bucket.checksum(key) == f"blake2b:{entry['blake2b']}"
    except FileNotFoundError:
        return False


def upload_index(bucket: Bucket, store: Path, blocks: Mapping[int, str]) -> None:
    """The cache of all documents of these blocks, so that opening needs one request instead of several a block."""
    opened = TeacherStore(store, blocks)
    name = index_name(opened.snapshot)
    if read_index(opened.files, opened.snapshot) is None:
        write_index(store, opened.snapshot, opened.documents_in_blocks())
    bucket.write(name, (store / name).read_bytes())
