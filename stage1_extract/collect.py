"""From data files to the conversations that will be used: faults counted, duplicates dropped, rows drawn, split.

Called by stage1_extract/prepare.py. Everything here is decided by ids and contents, never by position, so that the
order of files or rows changes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.conversations import Conversation, RowFault, scan_conversations
from shared.errors import DataError, NothingLeft


@dataclass(frozen=True, slots=True)
class Named:
    """A conversation with its identity: the given id, or its content hash."""

    doc_id: str
    conversation: Conversation


@dataclass(slots=True)
class Collected:
    """What the files held."""

    used: list[Named] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)
    duplicates: list[Named] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def collect(paths: Sequence[Path], max_rows: int | None, seed: int) -> Collected:
    """Read all files; drop repeats of the same id and content; keep `max_rows` drawn over all files.

    The same id with other content is kept under `id@<hash>`. Raises DataMissing, DataEmpty.
    """
    found = Collected()
    contents: dict[str, set[str]] = {}
    for item in scan_conversations(paths, found.counts):
        if isinstance(item, RowFault):
            found.faults.append(item)
            continue
        digest = item.content_hash
        doc_id = item.id if item.id is not None else digest[:16]
        seen = contents.setdefault(doc_id, set())
        if digest in seen:
            found.duplicates.append(Named(doc_id, item))
            continue
        if seen:
            found.counts["same_id_other_content"] += 1
            doc_id = f"{doc_id}@{digest[:8]}"
        seen.add(digest)
        found.used.append(Named(doc_id, item))
    found.counts["duplicates"] = len(found.duplicates)
    if max_rows is not None and len(found.used) > max_rows:
        drawn = set(lowest_hashes([named.doc_id for named in found.used], max_rows, f"rows-{seed}"))
        found.counts["not_drawn"] = len(found.used) - len(drawn)
        found.used = [named for named in found.used if named.doc_id in drawn]
    return found


def lowest_hashes(doc_ids: Sequence[str], count: int, salt: str) -> list[str]:
    """The `count` ids with the lowest sha256 of (salt, id): a draw that no order of rows can change."""
    return sorted(set(doc_ids), key=lambda doc_id: hashlib.sha256(f"{salt}\0{doc_id}".encode()).digest())[:count]


def heldout_ids(doc_ids: Sequence[str], fraction: float, rows: int | None, seed: int) -> set[str]:
    """Which conversations are held out: `rows` of them, or the fraction, at least one of two or more.

    One count decides both sides, so train and held-out are disjoint and complete by construction; one conversation
    always stays for training.
    """
    distinct = len(set(doc_ids))
    count = rows if rows is not None else max(1, round(fraction * distinct)) if fraction > 0 else 0
    return set(lowest_hashes(doc_ids, max(0, min(count, distinct - 1)), f"heldout-{seed}"))


def refuse(faults: Sequence[RowFault], rows: int) -> None:
    """One line for all faults: counts per reason, the first place, what to do. Raises the first fault's class."""
    if not faults:
        return
    first = faults[0]
    counted = ", ".join(
        f"{count} {reason}" for reason, count in Counter(fault.reason for fault in faults).most_common()
    )
    raise first.error(
        f"{len(faults)} of {rows} rows cannot be used ({counted}); the first is {first.where}: {first.detail}. "
        "Nothing was written; mend the data or pass --on-bad-row skip"
    )


def nothing_left(faults: Sequence[RowFault], rows: int) -> DataError:
    """The fault of a run in which every row was skipped."""
    counted = ", ".join(
        f"{count} {reason}" for reason, count in Counter(fault.reason for fault in faults).most_common()
    )
    first = f"; the first is {faults[0].where}: {faults[0].detail}" if faults else ""
    return NothingLeft(f"none of {rows} rows can be used ({counted}){first}. Nothing was written")
