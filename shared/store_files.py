"""The files of a store, wherever they lie: a local folder here, a bucket in shared/object_files.py.

Everything that reads a store goes through this; writing a block is local (shared/store_write.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

# Linux takes at most this many buffers in one call (IOV_MAX).
_MAX_BUFFERS = 1024
# Asked for at once when it must come from the disk: with the usual 128 KB of read-ahead, smaller calls are slower.
_COLD_BYTES = 2 << 20


class ShortFile(Exception):
    """A file ends before the bytes that were asked for."""


class StoreFiles(Protocol):
    """Read access to files by name relative to the store ("blocks/000000/zarr.json").

    A file that is not there raises FileNotFoundError, one that ends too early ShortFile.
    """

    location: str

    def read_bytes(self, name: str) -> bytes:
        """The whole file."""
        ...

    def size(self, name: str) -> int:
        """Bytes in the file."""
        ...

    def read_into(self, name: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill writable buffers of bytes, one after another, from `offset` on."""
        ...

    def read_pieces(self, name: str, offset: int, pieces: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Like `read_into` for the buffers of all pieces, yielding after each piece: the caller checks it meanwhile."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`, sorted; empty when there is none."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        ...

    def show(self, name: str) -> str:
        """The file's full name, for people."""
        ...


class LocalFiles:
    """A store in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = str(root)

    def read_bytes(self, name: str) -> bytes:
        """The whole file."""
        try:
            return (self.root / name).read_bytes()
        except IsADirectoryError as error:  # the file is not there, whatever lies in its place
            raise FileNotFoundError(error.errno, "is a folder, not a file", error.filename) from error

    def size(self, name: str) -> int:
        """Bytes in the file."""
        return (self.root / name).stat().st_size

    def read_into(self, name: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill the buffers with as few preadv calls as the system allows."""
        descriptor = os.open(f"{self.location}/{name}", os.O_RDONLY)
        try:
            _fill(descriptor, offset, buffers, 0)
        finally:
            os.close(descriptor)

    def read_pieces(self, name: str, offset: int, pieces: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Fill the buffers: one preadv call a piece of what is in memory, one for many pieces of what is not."""
        descriptor = os.open(f"{self.location}/{name}", os.O_RDONLY)
        try:
            got, step = 0, 1
            if len(pieces) > 1 and (got := _at_hand(descriptor, offset, pieces[0])) < (size := _size(pieces[0])):
                step = max(1, _COLD_BYTES // size)
            for first in range(0, len(pieces), step):
                together = pieces[first : first + step]
                buffers = together[0] if step == 1 else [buffer for piece in together for buffer in piece]
                offset = _fill(descriptor, offset, buffers, got)
                got = 0
                yield from (None for _ in together)
        finally:
            os.close(descriptor)

    def list(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root / folder) if entry.is_file())
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.root / name).is_file()

    def show(self, name: str) -> str:
        """The file's path."""
        return str(self.root / name)


def _size(buffers: Sequence[Any]) -> int:
    return sum(map(len, buffers))


def _at_hand(descriptor: int, offset: int, buffers: Sequence[Any]) -> int:
    """Fill the buffers with what is in memory already, and return how many bytes that was."""
    try:
        return os.preadv(descriptor, buffers[:_MAX_BUFFERS], offset, os.RWF_NOWAIT)
    except OSError:  # nothing of it is, or the file system cannot say
        return 0


def _fill(descriptor: int, offset: int, buffers: Sequence[Any], got: int) -> int:
    """Read into the buffers, whose first `got` bytes are there, and return where they end in the file."""
    end = offset + _size(buffers)
    if got == 0:
        got = os.preadv(descriptor, buffers[:_MAX_BUFFERS], offset)
    if offset + got == end:
        return end
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while got:
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if not views:
            return end
        views[0] = views[0][got:]
        got = os.preadv(descriptor, views[:_MAX_BUFFERS], offset)
    raise ShortFile(f"ends at byte {offset:,}, {end:,} expected")


def is_remote(location: Path | str) -> bool:
    """Whether a location names a bucket ("s3://bucket/prefix") and not a folder."""
    return "://" in str(location)


def beside(location: Path | str, ending: str) -> Path:
    """A folder for what is made from a store, named after it: next to a folder, in `runs` here for a bucket."""
    if is_remote(location):
        return Path("runs") / f"{PurePosixPath(str(location).rstrip('/')).stem}{ending}"
    path = Path(location)
    path = path if path.name else path.resolve()  # "." has no name
    return path.with_name(f"{path.stem}{ending}")


def open_files(location: Path | str) -> StoreFiles:
    """The files at a location. Raises ConfigRefused for a kind of bucket that is not supported."""
    if not is_remote(location):
        return LocalFiles(Path(location))
    from shared.object_files import ObjectFiles

    return ObjectFiles(str(location))
