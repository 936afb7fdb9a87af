"""`dflash store pull`: a store from a bucket into a folder, byte for byte, each byte compared with its checksum.

Blocks appear one by one, each by one rename, and the records last, so that an interrupted pull goes on and a folder
never says more than it has. The counterpart of manifests/store_push.py.
"""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.blocks import MOVED, planned_blocks, recorded_blocks
from manifests.commit import Ledger
from manifests.derived_store import STORE_PARTS
from manifests.records import ShardRecord
from manifests.store_publish import KINDS, local_lines
from shared.atomic import (
    aside,
    disk_faults,
    make_dir,
    owned,
    publish_dir,
    remove_partials,
    require_writable,
    write_bytes,
)
from shared.block_bytes import block_files, file_sizes
from shared.documents import index_name, read_index
from shared.errors import ConfigRefused, StoreDamaged, StoreIncomplete, StoreMismatch, StoreMissing
from shared.object_files import ObjectFiles, copy_listed
from shared.progress import Bar, progress, summary
from shared.seal import digest
from shared.store import read_identity, snapshot_of
from shared.store_files import LocalFiles, is_remote
from shared.store_layout import block_name
from shared.target_files import LIST

_SHARDS = "shards."


def pull(url: str, store: Path, threads: int) -> None:
    """Bring the published state of the store at `url` to a folder, or go on with it.

    Raises StoreMissing, StoreIncomplete when nothing is published, StoreDamaged, StoreMismatch for a folder with
    another store, DiskFull, PathNotWritable, StorageRefused.
    """
    if not is_remote(url):
        raise ConfigRefused(f"{url} is a folder; `dflash store pull s3://BUCKET/PREFIX FOLDER` copies from a bucket")
    files = ObjectFiles(url)
    identity = read_identity(url)
    blocks = recorded_blocks(url)
    if not blocks:
        raise StoreIncomplete(f"{files.location} has none of {planned_blocks(url)} planned blocks yet; push it first")
    require_writable(store)
    with suppress(StoreMissing):
        there = read_identity(store)
        if there["store_uuid"] != identity["store_uuid"]:
            raise StoreMismatch(
                f"{store} holds store {there['store_uuid']}, {files.location} is store {identity['store_uuid']}; pull "
                "to another folder"
            )
    _require_place(store)
    with owned(store):
        remove_partials(store / "blocks")
        _small_files(files, store)
        total = sum(int(record["bytes"]) for record in blocks.values())
        with progress("pull", total, "bytes", title="pull") as bar:
            copied = _blocks(files, store, blocks, threads, bar)
        _records(files, store)
        _moved_back(store, blocks)
    summary(
        "pulled",
        [
            ("blocks", f"{len(blocks)} of {planned_blocks(store)} planned, {copied} copied now"),
            ("size", f"{total / 1e9:.3g} GB"),
            ("from", files.location),
            ("written to", store),
        ],
    )


def _require_place(store: Path) -> None:
    """Raise ConfigRefused for a folder that is no store, nor what an interrupted pull left, but holds other things."""
    if (store / "store.json").exists() or not store.is_dir():
        return
    names = sorted(entry.name for entry in store.iterdir())
    if other := [name for name in names if name not in STORE_PARTS and not name.startswith(".")]:
        raise ConfigRefused(f"{store} holds {other[0]}, which is no part of a store; choose a new or empty folder")


def _small_files(files: ObjectFiles, store: Path) -> None:
    make_dir(store / "blocks")
    for name in ("zarr.json", "blocks/zarr.json", "plan.json", "store.json"):
        data = files.read_bytes(name)
        if not (store / name).exists() or (store / name).read_bytes() != data:
            write_bytes(store / name, data)
    if (store / "target" / LIST).exists() or not files.exists(f"target/{LIST}"):
        return
    with aside(store / "target") as temporary:
        copy_listed(files, "target", temporary)
        publish_dir(temporary, store / "target")


def _blocks(files: ObjectFiles, store: Path, blocks: dict[int, dict[str, Any]], threads: int, bar: Bar) -> int:
    todo = {block: record for block, record in blocks.items() if not _is_here(store, block, str(record["seal"]))}
    bar.advance(sum(int(record["bytes"]) for block, record in blocks.items() if block not in todo))
    with ThreadPoolExecutor(threads, thread_name_prefix="pull") as pool:
        running = [pool.submit(_block, files, store, block, str(record["seal"]), bar) for block, record in todo.items()]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(todo)


def _block(files: ObjectFiles, store: Path, block: int, seal: str, bar: Bar) -> None:
    final = store / block_name(block)
    with aside(final) as temporary:
        for name, data in block_files(files, block, seal):
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.data)
            bar.advance(len(data))
        if final.exists():  # its large arrays were removed, or it is of another build
            shutil.rmtree(final)
        publish_dir(temporary, final)


def _is_here(store: Path, block: int, seal: str) -> bool:
    """Whether the block's folder is this one with all its files; each was checked before the folder appeared."""
    folder = store / block_name(block)
    try:
        if digest((folder / "zarr.json").read_bytes()) != seal:
            return False
        sizes = file_sizes(LocalFiles(store), block, seal)
        return all((folder / name).stat().st_size == size for name, size in sizes.items() if size is not None)
    except (FileNotFoundError, StoreDamaged):
        return False


def _records(files: ObjectFiles, store: Path) -> None:
    """The records as they were published, those that say "done" last."""
    make_dir(store / "manifest")
    for name in sorted(files.list("manifest"), key=lambda name: name.startswith(_SHARDS)):
        kind, _, ending = name.partition(".")
        if ending.endswith(".jsonl") and kind in KINDS:
            known = set(local_lines(store, kind))  # of a store that was pushed from here, or pulled before
            lines = files.read_bytes(f"manifest/{name}").split(b"\n")[:-1]
            if data := b"".join(line + b"\n" for line in lines if line not in known):
                write_bytes(store / "manifest" / name, data)
    snapshot = snapshot_of({block: str(record["seal"]) for block, record in recorded_blocks(files.location).items()})
    if read_index(files, snapshot) is not None:
        make_dir(store / "index")
        with disk_faults(store / "index"):
            write_bytes(store / index_name(snapshot), files.read_bytes(index_name(snapshot)))


def _moved_back(store: Path, blocks: dict[int, dict[str, Any]]) -> None:
    """A block whose arrays had been removed here is whole again, and a newer record must say so."""
    names = {field.name for field in dataclasses.fields(ShardRecord)}
    back = [block for block, record in recorded_blocks(store).items() if record["detail"].get(MOVED)]
    Ledger(store, "pull").append(
        *(
            ShardRecord(**{name: value for name, value in blocks[block].items() if name in names})
            for block in back
            if block in blocks
        )
    )
