"""Make the records of a store in a bucket, and with them what counts as there, in one request at the end.

The records of before and those of the local store are merged into one file per kind, named by its content; then one
small object that names the files (shared/object_head.py) replaces the one of before. A reader sees either. Called by
manifests/store_push.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests.blocks import MOVED
from manifests.commit import files_of
from manifests.lines import records_in, scan
from shared.bucket import Bucket, Changed
from shared.errors import StorageRefused, StoreDamaged, StoreMismatch
from shared.json_file import parse_object, require_sealed
from shared.object_head import HEAD, Head, RecordFile, record_file, require_whole, same_state
from shared.store_layout import block_name

# What readers and owners of a store need; events stay with those who worked on it.
KINDS = ("shards", "documents", "skips", "runs")
_TRIES = 8
_PUSH = "run `dflash store push` again"


@dataclass
class Published:
    """A bucket's state as it was read: the head, what replaces it, and the shard records by block."""

    head: Head | None = None
    version: Any = None
    shards: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, bucket: Bucket) -> Published:
        """The state now. Raises StoreDamaged."""
        try:
            data, version = bucket.read_with_version(HEAD)
        except FileNotFoundError:
            return cls()
        head = Head.from_bytes(data, bucket.show(HEAD))
        state = cls(head, version)
        for line in state.lines(bucket, "shards"):
            record = json.loads(line)
            state.shards[int(record["block"])] = record
        return state

    def lines(self, bucket: Bucket, kind: str) -> list[bytes]:
        """The record lines of a kind."""
        found: list[bytes] = []
        for name, entry in (self.head.manifest if self.head else {}).items():
            if name.startswith(f"{kind}."):
                found += _lines(bucket, name, entry)
        return found

    def seal_of(self, block: int) -> str | None:
        """The seal that a block is published with, if it is."""
        return str(self.shards[block]["seal"]) if block in self.shards else None

    def place_for(self, block: int, seal: str) -> str:
        """The folder for a block to be published: its own, unless readers may be reading another build there."""
        published = self.seal_of(block)
        if published is None:
            return block_name(block)
        if published == seal and self.head is not None:
            return self.head.place_of(block)
        return f"{block_name(block)}.{seal}"


def _lines(bucket: Bucket, name: str, entry: RecordFile) -> list[bytes]:
    try:
        data = bucket.read(f"manifest/{name}")
    except FileNotFoundError as error:
        raise StoreDamaged(f"{bucket.show(f'manifest/{name}')} is missing but {HEAD} names it; {_PUSH}") from error
    require_whole(entry, data, bucket.show(f"manifest/{name}"))
    _, damaged = records_in(data)
    if damaged:
        raise StoreDamaged(f"{bucket.show(f'manifest/{name}')} line {damaged[0][0]}: {damaged[0][1]}; {_PUSH}")
    return data.split(b"\n")[:-1]


def claim(bucket: Bucket, store: Path, identity: Mapping[str, Any]) -> None:
    """Make the prefix this store's. Raises StoreMismatch with both ids when it is another's."""
    data = (store / "store.json").read_bytes()
    try:
        there = bucket.read("store.json")
    except FileNotFoundError:
        with suppress(Changed):
            bucket.create("store.json", data)
        there = bucket.read("store.json")
    if there == data:
        return
    where = bucket.show("store.json")
    value = parse_object(there, where, "choose another prefix")
    if value.get("store_uuid") != identity["store_uuid"]:
        raise StoreMismatch(
            f"{bucket.url} holds store {value.get('store_uuid')}, {store} is store {identity['store_uuid']}; push to "
            "another prefix"
        )
    require_sealed(value, where, "put the local store.json in its place")
    raise StoreMismatch(f"{where} and {store / 'store.json'} are of store {identity['store_uuid']} but differ")


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """Blocks that lie whole in the bucket: {block: (seal, folder)}, and whether that and the target is everything."""

    blocks: Mapping[int, tuple[str, str]]
    complete: bool


def publish(bucket: Bucket, store: Path, identity: Mapping[str, Any], uploaded: Uploaded) -> Head:
    """Make what was uploaded count, together with what counted before. Raises StorageRefused, StoreDamaged."""
    for _ in range(_TRIES):
        before = Published.read(bucket)
        files = _merged(bucket, store, before, uploaded)
        places = dict(before.head.places) if before.head else {}
        for block, (_, place) in uploaded.blocks.items():
            if place != block_name(block):
                places[block] = place
        entries = dict(record_file(kind, data) for kind, data in files.items())
        head = Head(
            store_uuid=str(identity["store_uuid"]),
            manifest=entries,
            previous=tuple(sorted(set(before.head.manifest) - set(entries))) if before.head else (),
            places=places,
            complete=uploaded.complete or bool(before.head and before.head.complete),
        )
        if before.head is not None and same_state(before.head, head):
            return before.head
        for kind, data in files.items():
            name, _ = record_file(kind, data)
            if before.head is None or name not in before.head.manifest:
                bucket.write(f"manifest/{name}", data)
        try:
            _replace(bucket, head, before)
        except Changed:
            continue  # another push was faster: begin again from what it made
        if before.head is not None:
            gone = set(before.head.previous) - set(entries) - set(head.previous)
            bucket.delete([f"manifest/{name}" for name in sorted(gone)])
        return head
    raise StorageRefused(
        f"{bucket.show(HEAD)} changed {_TRIES} times while it was written; push from one place at a time"
    )


def _replace(bucket: Bucket, head: Head, before: Published) -> None:
    if before.head is None:
        bucket.create(HEAD, head.to_bytes())
    else:
        bucket.replace(HEAD, head.to_bytes(), before.version)


def _merged(bucket: Bucket, store: Path, before: Published, uploaded: Uploaded) -> dict[str, bytes]:
    """The content of one file per kind, lines as their writers made them."""
    seals = {block: str(record["seal"]) for block, record in before.shards.items()}
    seals |= {block: seal for block, (seal, _) in uploaded.blocks.items()}
    shards: dict[int, tuple[float, bytes]] = {}
    for line in [*local_lines(store, "shards"), *before.lines(bucket, "shards")]:
        record = json.loads(line)
        wanted = record["state"] == "done" and record["seal"] == seals.get(record["block"])
        if wanted and not record["detail"].get(MOVED):  # that one is about the local folder
            shards[record["block"]] = (record["time"], line)
    documents = {
        line: json.loads(line) for line in [*before.lines(bucket, "documents"), *local_lines(store, "documents")]
    }
    files = {"shards": _joined(line for _, line in sorted(shards.values()))}
    files["documents"] = _joined(
        line
        for line, record in sorted(documents.items(), key=lambda item: (item[1]["time"], item[0]))
        if record["block"] in seals and record.get("seal") in ("", None, seals[record["block"]])
    )
    for kind in ("skips", "runs"):
        lines = {*before.lines(bucket, kind), *local_lines(store, kind)}
        files[kind] = _joined(sorted(lines, key=lambda line: (json.loads(line)["time"], line)))
    return {kind: data for kind, data in files.items() if data}


def local_lines(store: Path, kind: str) -> list[bytes]:
    """The whole record lines of a kind in a folder."""
    found: list[bytes] = []
    for path in files_of(store, kind):
        with path.open("rb") as file:
            for lines, _ in scan(file):
                found += lines
    return found


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
