"""The list of what lies in a store's `target/`, so that a flipped bit in the head or the tokenizer is seen.

Written by stage1_extract/target_export.py before the folder appears; checked by shared/store.py when the head is
loaded, and by `dflash store verify`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

from shared.atomic import write_bytes
from shared.errors import StoreDamaged
from shared.json_file import parse_object, require_sealed, sealed
from shared.store_files import LocalFiles, ShortFile, StoreFiles

LIST = "files.json"
_PIECE_BYTES = 8 << 20


def write_list(folder: Path) -> None:
    """Write files.json: bytes, CRC-32C and BLAKE2b of every other file below the folder, sealed."""
    files = LocalFiles(folder)
    entries: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != LIST:
            size = path.stat().st_size
            entries[name] = {"bytes": size, **_sums(files, name, size, strict=True)}
    write_bytes(folder / LIST, list_bytes(entries))


def list_bytes(entries: dict[str, dict[str, int | str]]) -> bytes:
    """The bytes of files.json: the same for the same files."""
    return (json.dumps(sealed({"files": entries}), indent=1, sort_keys=True) + "\n").encode()


def damaged(files: StoreFiles, folder: str, *, strict: bool) -> Iterator[tuple[str, str]]:
    """(file, what is wrong) for files of a target folder that are not as listed; `strict` compares BLAKE2b too.

    CRC-32C alone runs at memory speed, which is what a start of training can afford for gigabytes of head.
    """
    prefix = f"{folder}/" if folder else ""
    try:
        data = files.read_bytes(prefix + LIST)
        listed = parse_object(data, LIST, "export the target again")
        require_sealed(listed, LIST, "export the target again")
        entries = listed["files"]
        if data != list_bytes(entries):
            raise StoreDamaged(f"{LIST} has other bytes than were written")
    except FileNotFoundError:
        yield prefix + LIST, "is missing"
        return
    except (StoreDamaged, KeyError, TypeError, AttributeError) as error:
        yield prefix + LIST, str(error)
        return
    for name, entry in sorted(entries.items()):
        if reason := _fault(files, prefix + name, entry, strict):
            yield prefix + name, reason


def _fault(files: StoreFiles, name: str, entry: dict[str, int | str], strict: bool) -> str:
    try:
        size = files.size(name)
        if size != entry["bytes"]:
            return f"has {size:,} bytes, {entry['bytes']:,} were exported"
        for kind, found in _sums(files, name, size, strict).items():
            if found != entry[kind]:
                return f"fails its checksum: {kind} {found}, {entry[kind]} was exported"
    except FileNotFoundError:
        return "is missing"
    except ShortFile as error:
        return str(error)
    return ""


def _sums(files: StoreFiles, name: str, size: int, strict: bool) -> dict[str, str]:
    crc, blake = 0, hashlib.blake2b(digest_size=16)
    buffer = np.empty(min(size, _PIECE_BYTES), np.uint8)
    for start in range(0, size, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, size - start)]
        files.read_into(name, start, [piece])
        crc = int(google_crc32c.extend(crc, piece))
        if strict:
            blake.update(piece.data)
    sums = {"crc32c": f"{crc:08x}"}
    return {**sums, "blake2b": blake.hexdigest()} if strict else sums
