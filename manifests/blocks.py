"""Which blocks of a store are done, and the store opened with just these: what its records vouch for, nothing else.

Called by both stages and by the store commands. Locations are folders or buckets. What a seal covers is in
shared/seal.py, reading in shared/store.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.commit import latest
from manifests.lines import records_in
from manifests.records import MOVED as MOVED
from shared.documents import index_name, write_index
from shared.errors import DiskFull, PathNotWritable, StoreDamaged, StoreIncomplete
from shared.json_file import parse_object, require_sealed
from shared.store import TeacherStore, maker_of, read_identity
from shared.store_files import is_remote, open_files

# Below this many, the blocks' own arrays are read in an instant.
_CACHED_FROM_BLOCKS = 32
_SHOWN_DAMAGE = 3


def recorded_blocks(location: Path | str) -> dict[int, dict[str, Any]]:
    """The newest shard record of every block that is done and not withdrawn since: {block: record}."""
    return _recorded(location)[0]


def planned_blocks(location: Path | str) -> int:
    """How many blocks the store is to have. Raises StoreDamaged when the plan is missing or has changed."""
    files = open_files(location)
    advice = "run the same `dflash extract` command: it is made again"
    try:
        data = files.read_bytes("plan.json")
    except FileNotFoundError as error:
        raise StoreDamaged(f"{files.show('plan.json')} is missing; {advice}") from error
    plan = parse_object(data, files.show("plan.json"), advice)
    require_sealed(plan, files.show("plan.json"), advice)
    return len(plan["blocks"])


def open_store(location: Path | str, *, partial: bool = False, cache: bool = True) -> TeacherStore:
    """A store with all its planned blocks, or (`partial`) with those that are done so far.

    With `cache` a large store may get a file of its documents (see cache_documents). Raises StoreMissing,
    StoreMismatch, StoreDamaged, or StoreIncomplete naming the first missing block and the damaged record lines.
    """
    identity = read_identity(location)
    planned = planned_blocks(location)
    blocks, damaged = _recorded(location)
    if moved := {block: record["detail"][MOVED] for block, record in blocks.items() if record["detail"].get(MOVED)}:
        first, place = next(iter(moved.items()))
        raise StoreIncomplete(
            f"{location}: the large arrays of {len(moved)} of its {len(blocks)} blocks, the first is {first}, are only "
            f"at {place}; use --store {place}, or `dflash store pull {place} {location}`"
        )
    missing = next((block for block in range(planned) if block not in blocks), None)
    if not blocks or (missing is not None and not partial):
        raise StoreIncomplete(
            f"{location} holds {len(blocks)} of {planned} planned blocks, the first missing is {missing or 0}"
            f"{_told(damaged)}; finish it with the same {maker_of(identity)} command"
            + ("" if partial else " (`dflash train --partial` takes what is there)")
        )
    if beyond := [block for block in blocks if block >= planned]:
        raise StoreDamaged(
            f"{location} records block {beyond[0]}, its plan has {planned} blocks; plan.json belongs to another store: "
            "restore it"
        )
    store = TeacherStore(location, {block: str(record["seal"]) for block, record in blocks.items()})
    if cache and missing is None:
        cache_documents(store)
    return store


def cache_documents(store: TeacherStore) -> None:
    """Keep the documents of a large local store in one file, so that the next opening need not visit every block.

    A folder that takes no file is left as it is: the cache only saves time.
    """
    if is_remote(store.location) or len(store.blocks) < _CACHED_FROM_BLOCKS:
        return
    path = Path(store.location) / index_name(store.snapshot)
    if not path.exists():
        with suppress(DiskFull, PathNotWritable, OSError):
            write_index(Path(store.location), store.snapshot, store.documents)


def _recorded(location: Path | str) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Records as above, and where the damaged lines are."""
    files = open_files(location)
    records: list[dict[str, Any]] = []
    damaged: list[str] = []
    for name in files.list("manifest"):
        if name.startswith("shards.") and name.endswith(".jsonl"):
            found, bad = records_in(files.read_bytes(f"manifest/{name}"))
            records += found
            damaged += [f"line {number} of {files.show(f'manifest/{name}')} ({reason})" for number, reason in bad]
    newest = latest(sorted(records, key=lambda record: record["time"]), "block")
    return {block: newest[block] for block in sorted(newest) if newest[block]["state"] == "done"}, damaged


def _told(damaged: Sequence[str]) -> str:
    shown = ", ".join(damaged[:_SHOWN_DAMAGE])
    return f"; {len(damaged)} damaged record lines count for nothing: {shown}" if damaged else ""
