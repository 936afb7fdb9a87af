"""Objects below one prefix of a bucket ("s3://bucket/prefix", "gs://bucket/prefix"): plain reads, writes and lists.

Retries are the library's (shared/bucket_client.py); what remains after them is one line with an exit code. Used by
shared/object_files.py and the store commands that push and pull.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.bucket_client import ENDPOINTS, HINTS, clients, obstore, short
from shared.errors import ConfigRefused, DflashError, StorageRefused, StoreMissing
from shared.shard_file import Array
from shared.store_files import ShortFile

# One request of this size is near the fastest; longer ranges are fetched as several at once.
PART_BYTES = 8 << 20
# What a shard file's index takes: its size and its index come with one request.
TAIL_BYTES = 16 << 10
_UPLOAD_PART_BYTES = 16 << 20
_UPLOADS = 4
_CHECKSUM = "dflash-checksum"


class Changed(Exception):
    """An object is not (or no longer) what a conditional write expected."""


class _Unconditional(Exception):
    """Storage that does not take conditions on writes."""


class Bucket:
    """One prefix of a bucket; keys are relative to it. Safe to share between threads, not across a fork.

    A missing object raises FileNotFoundError, a range beyond its end ShortFile, a missing bucket StoreMissing, and
    everything else that storage refuses or fails at StorageRefused.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ENDPOINTS:
            raise ConfigRefused(f"{url}: storage of kind {parts.scheme}:// is not supported; use s3:// or gs://")
        if not parts.netloc or parts.query or parts.fragment:
            raise ConfigRefused(f"{url} is not a place in a bucket; write {parts.scheme}://BUCKET/PREFIX")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.scheme, self.name, self.prefix = parts.scheme, parts.netloc, parts.path.strip("/")
        environment = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "GOOGLE_"))}
        self.endpoint = next((environment[key] for key in ENDPOINTS[self.scheme] if environment.get(key)), "")
        self._first, self._patient = clients(
            self.scheme, self.name, self.prefix, self.endpoint, tuple(sorted(environment.items()))
        )
        self._answered = False

    def show(self, key: str) -> str:
        """The object's full name, for people."""
        return f"{self.url}/{key}"

    def read(self, key: str) -> bytes:
        """The whole object."""
        return bytes(self._call(key, lambda store: obstore().get(store, key).bytes()))

    def read_with_version(self, key: str) -> tuple[bytes, Any]:
        """The whole object, and what `replace` wants to know it by."""

        def get(store: Any) -> tuple[bytes, Any]:
            result = obstore().get(store, key)
            known = {name: result.meta[name] for name in ("e_tag", "version")}
            return bytes(result.bytes()), {name: value for name, value in known.items() if value is not None}

        found: tuple[bytes, Any] = self._call(key, get)
        return found

    def read_tail(self, key: str) -> tuple[int, bytes]:
        """Bytes in the object, and its last TAIL_BYTES (or all) of them, in one request."""

        def get(store: Any) -> tuple[int, bytes]:
            result = obstore().get(store, key, options={"range": {"suffix": TAIL_BYTES}})
            return int(result.meta["size"]), bytes(result.bytes())

        try:
            found: tuple[int, bytes] = self._call(key, get)
        except ShortFile:  # an empty object has no last bytes, and some servers know no suffixes
            data = self.read(key) if (size := self.size(key)) <= TAIL_BYTES else b""
            return size, data
        return found

    def read_range(self, key: str, offset: int, length: int) -> list[Any]:
        """`length` bytes from `offset` on, as buffers in order."""
        starts = list(range(offset, offset + length, PART_BYTES))
        ends = [min(start + PART_BYTES, offset + length) for start in starts]

        def get(store: Any) -> list[Any]:
            if len(starts) == 1:
                return [obstore().get_range(store, key, start=starts[0], end=ends[0])]
            return list(obstore().get_ranges(store, key, starts=starts, ends=ends, coalesce=0))

        parts: list[Any] = self._call(key, get) if length else []
        got = sum(len(part) for part in parts)
        if got < length:
            raise ShortFile(f"ends at byte {offset + got:,}, {offset + length:,} expected")
        return parts

    def size(self, key: str) -> int:
        """Bytes in the object."""
        return int(self._call(key, lambda store: obstore().head(store, key)["size"]))

    def checksum(self, key: str) -> str | None:
        """What `write` was told about the object's content, if anything."""
        found = self._call(key, lambda store: obstore().get(store, key, options={"head": True}).attributes)
        return next((str(value) for name, value in found.items() if name.lower() == _CHECKSUM), None)

    def sizes(self, folder: str) -> dict[str, int]:
        """Every object below a folder: {key: bytes}."""

        def listed(store: Any) -> dict[str, int]:
            pages = obstore().list(store, prefix=folder or None, chunk_size=1000)
            return {str(item["path"]): int(item["size"]) for page in pages for item in page}

        found: dict[str, int] = self._call(folder, listed)
        return found

    def names(self, folder: str) -> list[str]:
        """Names of the objects directly in a folder, sorted."""

        def listed(store: Any) -> list[str]:
            found = obstore().list_with_delimiter(store, folder or None)["objects"]
            return sorted(str(item["path"]).rpartition("/")[2] for item in found)

        names: list[str] = self._call(folder, listed)
        return names

    def write(self, key: str, data: bytes | Array | Path, checksum: str = "") -> None:
        """Put an object, replacing what is there; all of it appears at once or nothing does."""
        options: dict[str, Any] = {"attributes": {_CHECKSUM: checksum}} if checksum else {}
        options |= {"chunk_size": _UPLOAD_PART_BYTES, "max_concurrency": _UPLOADS}
        self._call(key, lambda store: obstore().put(store, key, data, **options))

    def create(self, key: str, data: bytes) -> None:
        """Put an object that must not be there yet. Raises Changed when it is."""
        try:
            self._call(key, lambda store: obstore().put(store, key, data, mode="create"))
        except _Unconditional:
            if key.rpartition("/")[2] in self.names(key.rpartition("/")[0]):
                raise Changed(self.show(key)) from None
            self.write(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        """Put an object in the place of the version that was read. Raises Changed when another one is there by now.

        Where storage knows no conditional writes, the last writer wins: push from one place at a time there.
        """
        try:
            self._call(key, lambda store: obstore().put(store, key, data, mode=version))
        except _Unconditional:
            self.write(key, data)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""
        for key in keys:
            try:
                self._call(key, functools.partial(obstore().delete, paths=key))
            except FileNotFoundError:
                continue

    def _call(self, key: str, action: Callable[[Any], Any]) -> Any:
        try:
            result = action(self._patient if self._answered else self._first)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._no_bucket() from error
            raise FileNotFoundError(self.show(key)) from error
        except NotImplementedError as error:
            raise _Unconditional(self.show(key)) from error
        except (ValueError, obstore().exceptions.BaseError) as error:
            raise self._fault(error, key) from error
        self._answered = True
        return result

    def _no_bucket(self) -> StoreMissing:
        return StoreMissing(
            f"bucket {self.name} does not exist at {self.endpoint or self.scheme}; make it first or name another one"
        )

    def _fault(self, error: Exception, key: str) -> Exception:
        kind, text = type(error).__name__, str(error).split("\n\nDebug source", maxsplit=1)[0]
        if kind in ("PreconditionError", "AlreadyExistsError"):
            return Changed(self.show(key))
        if kind == "NotSupportedError" or "501 Not Implemented" in text:
            return _Unconditional(text)
        if "NoSuchBucket" in text:
            return self._no_bucket()
        if "416 " in text or "InvalidRange" in text or "non-partial" in text:
            return ShortFile("ends before the bytes that are asked for")
        return self._refusal(kind, text, key)

    def _refusal(self, kind: str, text: str, key: str) -> DflashError:
        where, hint = self.show(key), HINTS[self.scheme]
        if "169.254.169.254" in text or "metadata.google" in text:
            return StorageRefused(
                f"no credentials for {where}: none are set and this machine offers none; {hint} ({short(text)})"
            )
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return StorageRefused(
                f"{where} was refused: {short(text)}; check the rights of these credentials, or {hint}"
            )
        if "error sending request" in text or "timed out" in text or "connect" in text.lower():
            at = f"at {self.endpoint}" if self.endpoint else f"of {self.scheme}:// (no endpoint is set)"
            return StorageRefused(
                f"{where} cannot be reached: the server {at} does not answer; check the network and "
                f"{ENDPOINTS[self.scheme][-1]} ({short(text)})"
            )
        return StorageRefused(f"{where}: storage answered with an error: {short(text)}")
