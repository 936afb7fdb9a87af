"""The order in which commands ran on a folder, also where the clock went back between two of them.

Times alone put a run that goes on before one that was stopped an hour "later", before NTP had set the clock: it was
shown as ended and could not be stopped. So the lines of one file keep their order, and a command that finds records
from the future says after which of them it began. Pure; used by manifests/commit.py, evidence_files.py and runs.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

AFTER = "after"
"""In the detail of a run's first record: it came after all with this time or place."""


def oldest_first(kind: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of one kind, as they stand in their files, in the order in which they came about."""
    return in_order(records) if kind == "runs" else sorted(records, key=lambda record: record["time"])


def in_order(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run records, oldest first; given as they stand in their files, one file after the other."""
    return [record for _, record in sorted(_placed(records), key=lambda placed: placed[0])]


def newest_place(records: Sequence[dict[str, Any]]) -> float | None:
    """What a command that begins now comes after, on the scale of record times; None in an empty folder."""
    return max((place for place, _ in _placed(records)), default=None)


def _placed(records: Sequence[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """(time, or more where something on record came before, record)."""
    reached: dict[str, float] = {}
    found = []
    for record in records:
        run_id = str(record.get("run_id"))
        place = max(float(record["time"]), _after(record), reached.get(run_id, -math.inf))
        reached[run_id] = place
        found.append((place, record))
    return found


def _after(record: dict[str, Any]) -> float:
    detail = record.get("detail")
    after = detail.get(AFTER) if isinstance(detail, dict) else None
    return math.nextafter(after, math.inf) if isinstance(after, float) else -math.inf
