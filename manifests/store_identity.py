"""What a store is, from two files that vouch for each other: store.json, and its copy in the store's own zarr.json.

Both are written once, when the store is created (shared/store_write.py), and each carries its checksum: one that is
damaged is made again from the other. Called by store_verification.py and store_repair.py.
"""

from __future__ import annotations

import json
from typing import Any

from manifests.store_findings import Finding
from shared.errors import StoreDamaged, StoreMismatch, StoreMissing
from shared.json_file import parse_object, require_sealed
from shared.store import read_identity
from shared.store_files import StoreFiles
from shared.store_write import BLOCKS_METADATA, IDENTITY_ATTRIBUTE, root_metadata

Identity = dict[str, Any]


def json_bytes(value: Any) -> bytes:
    """What shared.atomic.write_json puts into a file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def files_of(identity: Identity) -> dict[str, bytes]:
    """The bytes of the three files that a store with this identity has beside its plan."""
    return {
        "store.json": json_bytes(identity),
        "zarr.json": json_bytes(root_metadata(identity)),
        "blocks/zarr.json": json_bytes(BLOCKS_METADATA),
    }


def true_identity(files: StoreFiles) -> Identity | None:
    """The identity that both files hold, or the one that is whole; None when neither is, or they are of two stores."""
    own, copied = _own(files)[0], _copied(files)
    return own or copied if own is None or copied is None or own == copied else None


def check_identity(files: StoreFiles) -> list[Finding]:
    """What is wrong with the three files; store.json is "identity", the groups of plain zarr are "groups".

    Raises StoreMissing when there is no trace of a store, StoreMismatch for one of another format.
    """
    own, reason = _own(files)
    if own is None and reason == "is missing" and _copied(files) is None and not files.list("manifest"):
        read_identity(files.location)
    identity, copied = true_identity(files), _copied(files)
    if own is not None and copied is not None and identity is None:
        reason = f"is of store {own['store_uuid']}, zarr.json is of {copied['store_uuid']}: one came from elsewhere"
    found = []
    for name, expected in files_of(identity or {}).items():
        try:
            data = files.read_bytes(name)
            fault = "" if data == expected else "is not the one that this store was made with"
        except FileNotFoundError:
            fault = "is missing"
        if name == "store.json" and fault and reason:
            fault = reason
        if fault:
            part = "identity" if name == "store.json" else "groups"
            found.append(Finding(kind="damage", part=part, file=name, reason=fault))  # type: ignore[arg-type]
    return found


def _own(files: StoreFiles) -> tuple[Identity | None, str]:
    try:
        return read_identity(files.location), ""
    except StoreMissing:
        return None, "is missing"
    except StoreDamaged as error:
        return None, str(error)
    except StoreMismatch as error:  # of another format, unless the copy says that it is of this one
        if _copied(files) is None:
            raise
        return None, str(error)


def _copied(files: StoreFiles) -> Identity | None:
    try:
        identity = dict(_attributes(files, "zarr.json")[IDENTITY_ATTRIBUTE])
        require_sealed(identity, "zarr.json", "")
    except (OSError, StoreDamaged, KeyError, TypeError, ValueError):
        return None
    return identity


def _attributes(files: StoreFiles, name: str) -> dict[str, Any]:
    return dict(parse_object(files.read_bytes(name), name, "")["attributes"])
