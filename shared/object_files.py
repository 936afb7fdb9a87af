"""The files of a store in a bucket: what the newest published state consists of, read by ranged requests.

The counterpart of LocalFiles (shared/store_files.py); requests are made in shared/bucket.py, what is published is in
shared/object_head.py. Small ranges are kept, because training asks for the same ones in every epoch.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from shared.atomic import aside, make_dir, publish_dir
from shared.bucket import Bucket
from shared.errors import StoreDamaged, StoreMissing
from shared.json_file import parse_object
from shared.object_head import HEAD, Head, hash_of, require_whole
from shared.store_files import LocalFiles, ShortFile, StoreFiles
from shared.target_files import LIST, damaged

_KEPT_BYTES = 64 << 20
_KEPT_RANGE_BYTES = 256 << 10
_COPY_PIECE_BYTES = 64 << 20
_COPIES = 4

Key = TypeVar("Key")


class _Kept(Generic[Key]):
    """Bytes that were asked for lately, up to a total."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._items: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> bytes | None:
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def put(self, key: Key, data: bytes) -> None:
        with self._lock:
            self._held += len(data) - len(self._items.pop(key, b""))
            self._items[key] = data
            while self._held > self._most:
                self._held -= len(self._items.popitem(last=False)[1])


class ObjectFiles:
    """A store below a prefix of a bucket, as its head says; without one (copied by other tools) as it lies there."""

    def __init__(self, location: str) -> None:
        self.bucket = Bucket(location)
        self.location = self.bucket.url
        self._head: Head | None = None
        self._head_read = False
        self._lock = threading.Lock()
        self._ranges: _Kept[tuple[str, int, int]] = _Kept(_KEPT_BYTES)
        self._tails: _Kept[str] = _Kept(_KEPT_BYTES // 4)
        self._sizes: dict[str, int] = {}

    def head(self) -> Head | None:
        """The published state that this object reads, from its first use on; None where nothing was published."""
        with self._lock:
            if not self._head_read:
                with suppress(FileNotFoundError):
                    self._head = Head.from_bytes(self.bucket.read(HEAD), self.show(HEAD))
                self._head_read = True
            return self._head

    def read_bytes(self, name: str) -> bytes:
        """The whole file; one of records is the one that the head names."""
        key = self._key(name)
        try:
            data = self.bucket.read(key)
        except FileNotFoundError as error:
            if name == "store.json":
                raise StoreMissing(
                    f"no teacher store at {self.location} (no store.json); `dflash store push STORE {self.location}` "
                    "puts one there"
                ) from error
            if self._listed(name):
                raise StoreDamaged(
                    f"{self.show(name)} is missing but {HEAD} names it; run the same command again, and if it stays so "
                    "`dflash store push`"
                ) from error
            raise
        if entry := self._listed(name):
            require_whole(entry, data, self.show(name))
        return data

    def _listed(self, name: str) -> Any:
        folder, _, file = name.partition("/")
        head = self.head() if folder == "manifest" and name != HEAD else None
        return head.manifest.get(file) if head else None

    def size(self, name: str) -> int:
        """Bytes in the file; its end is kept, because a shard's index is read next, and small files are all end."""
        key = self._key(name)
        size, tail = self.bucket.read_tail(key)
        self._sizes[key] = size
        self._tails.put(key, tail)
        return size

    def read_into(self, name: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill the buffers from one range of the file: one request, or a few at once when it is long."""
        views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        key, length = self._key(name), sum(len(view) for view in views)
        for part in self._parts(key, offset, length):
            piece = np.frombuffer(part, np.uint8)
            while len(piece):
                if len(views[0]) == 0:
                    views.pop(0)
                    continue
                count = min(len(piece), len(views[0]))
                views[0][:count] = piece[:count]
                piece, views[0] = piece[count:], views[0][count:]

    def read_pieces(self, name: str, offset: int, pieces: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Fill the buffers of all pieces from one range, then yield once for each piece."""
        self.read_into(name, offset, [buffer for piece in pieces for buffer in piece])
        yield from (None for _ in pieces)

    def _parts(self, key: str, offset: int, length: int) -> list[Any]:
        if (tail := self._tails.get(key)) is not None:
            size = self._sizes[key]
            if size - len(tail) <= offset and offset + length <= size:
                return [tail[offset - size + len(tail) :][:length]]
        if length > _KEPT_RANGE_BYTES:
            return self.bucket.read_range(key, offset, length)
        data = self._ranges.get((key, offset, length))
        if data is None:
            data = b"".join(self.bucket.read_range(key, offset, length))
            self._ranges.put((key, offset, length), data)
        return [data]

    def list(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`; of manifest/, those that the head names."""
        head = self.head() if folder == "manifest" else None
        if head is not None:
            return sorted(head.manifest)
        return self.bucket.names(self._key(folder))

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        try:
            self.bucket.size(self._key(name))
        except FileNotFoundError:
            return False
        return True

    def show(self, name: str) -> str:
        """The object's full name."""
        return self.bucket.show(self._key(name) if name != HEAD else name)

    def _key(self, name: str) -> str:
        """Where a file lies: a block that was made again has another folder than its number says."""
        parts = name.split("/")
        if parts[0] != "blocks" or len(parts) < 2 or not parts[1].isdigit():
            return name
        head = self.head()
        return "/".join([head.place_of(int(parts[1])), *parts[2:]]) if head else name


def cache_dir() -> Path:
    """Where copies of what lies in buckets are kept: DFLASH_CACHE, or dflash in XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("DFLASH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"


def local_copy(files: StoreFiles, folder: str) -> Path:
    """A folder here with the files that `folder`/files.json lists, each compared with its hash there.

    It is made aside and appears in one rename, named by the store and by that list, so that a copy of another store or
    another export is never taken. Raises StoreDamaged when what lies in the bucket is not what the list says.
    """
    try:
        listed = files.read_bytes(f"{folder}/{LIST}")
    except FileNotFoundError as error:
        raise StoreDamaged(
            f"{files.show(f'{folder}/{LIST}')} is missing; `dflash store push` puts it there once the extraction has "
            "exported the target"
        ) from error
    identity = parse_object(files.read_bytes("store.json"), files.show("store.json"), "push the store again")
    final = cache_dir() / "stores" / str(identity.get("store_uuid")) / f"{folder}-{hash_of(listed)}"
    if final.exists():
        if not list(damaged(LocalFiles(final), "", strict=False)):
            return final
        shutil.rmtree(final)
    make_dir(final.parent)
    with aside(final) as temporary:
        copy_listed(files, folder, temporary)
        with suppress(FileExistsError):  # another process was faster
            publish_dir(temporary, final)
    return final


def copy_listed(files: StoreFiles, folder: str, into: Path) -> None:
    """The files that `folder`/files.json lists, and that list, into an empty folder. Raises StoreDamaged."""
    advice = "`dflash store push` the store again"
    listed = files.read_bytes(f"{folder}/{LIST}")
    (into / LIST).write_bytes(listed)
    for name in parse_object(listed, files.show(f"{folder}/{LIST}"), advice).get("files", {}):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise StoreDamaged(f"{files.show(f'{folder}/{LIST}')} names {name!r}, which lies outside; do not trust it")
        _copy(files, f"{folder}/{name}", into / name)
    for name, reason in damaged(LocalFiles(into), "", strict=True):
        raise StoreDamaged(f"{files.show(f'{folder}/{name}')} {reason}; {advice}")


def _copy(files: StoreFiles, name: str, path: Path) -> None:
    """A whole file, in pieces that are fetched side by side."""
    try:
        size = files.size(name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show(name)} is missing; `dflash store push` the store again") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file, ThreadPoolExecutor(_COPIES, thread_name_prefix="copy") as pool:
        file.truncate(size)

        def copy(start: int) -> None:
            data = np.empty(min(_COPY_PIECE_BYTES, size - start), np.uint8)
            files.read_into(name, start, [data])
            os.pwrite(file.fileno(), data.data, start)

        try:
            list(pool.map(copy, range(0, size, _COPY_PIECE_BYTES)))
        except ShortFile as error:
            raise StoreDamaged(f"{files.show(name)} {error}; `dflash store push` the store again") from error
