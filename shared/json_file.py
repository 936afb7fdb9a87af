"""Read a JSON object that this project or a model's maker wrote: whole, or refused in one line.

Called wherever a folder's own description is read; writing is shared/atomic.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import StoreDamaged


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The object in a file; `advice` ends the message. Raises StoreDamaged for a missing file or anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} is not JSON ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise StoreDamaged(f"{path} holds a {type(value).__name__}, not an object; {advice}")
    return value


def read_if_whole(path: Path) -> dict[str, Any] | None:
    """The object in a file that the living replace at will (progress, endings); None while there is none to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def require_keys(value: dict[str, Any], names: tuple[str, ...], path: Path, advice: str) -> None:
    """Raise StoreDamaged when a description lacks what every one of its kind has."""
    if missing := [name for name in names if name not in value]:
        raise StoreDamaged(f"{path} lacks {', '.join(missing)}; {advice}")
