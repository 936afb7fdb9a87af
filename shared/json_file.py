"""Read a JSON object that this project or a model's maker wrote: whole, or refused in one line.

Called wherever a folder's own description is read; writing is shared/atomic.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from shared.errors import StoreDamaged


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The object in a file; `advice` ends the message. Raises StoreDamaged for a missing file or anything else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    return parse_object(data, str(path), advice)


def parse_object(data: bytes, where: str, advice: str) -> dict[str, Any]:
    """The object in a file's bytes; `where` begins and `advice` ends the message. Raises StoreDamaged."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{where} is not JSON ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise StoreDamaged(f"{where} holds a {type(value).__name__}, not an object; {advice}")
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a checksum of its other fields in `crc32c`, so that a flipped bit in it is seen."""
    return {**value, "crc32c": _checksum(value)}


def require_sealed(value: Mapping[str, Any], where: str, advice: str) -> None:
    """Raise StoreDamaged when an object made by `sealed` has changed since."""
    if value.get("crc32c") != (actual := _checksum(value)):
        raise StoreDamaged(f"{where} fails its checksum: {actual}, it says {value.get('crc32c')}; {advice}")


def _checksum(value: Mapping[str, Any]) -> str:
    kept = {key: item for key, item in value.items() if key != "crc32c"}
    return f"{google_crc32c.value(json.dumps(kept, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_if_whole(path: Path) -> dict[str, Any] | None:
    """The object in a file that the living replace at will (progress, endings); None while there is none to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def require_keys(value: dict[str, Any], names: tuple[str, ...], path: Path | str, advice: str) -> None:
    """Raise StoreDamaged when a description lacks what every one of its kind has."""
    if missing := [name for name in names if name not in value]:
        raise StoreDamaged(f"{path} lacks {', '.join(missing)}; {advice}")
