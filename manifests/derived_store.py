"""A store made from documents of other stores: what `dflash store merge` and `subset` have in common.

The commands say which documents of which blocks are kept; here they become a finished store with a plan, records and
an identity of its own. Nothing of an input is changed. One block is made by manifests/derived_block.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manifests import blocks
from manifests.commit import Ledger, read
from manifests.derived_block import BlockCopy, copy_files, make_block, require_whole
from manifests.derived_source import Source
from manifests.records import ShardRecord, SkipRecord
from manifests.runs import recorded, require_kind
from shared.atomic import aside, free_bytes, publish_dir, remove_partials, require_writable, write_json
from shared.errors import ConfigRefused, DiskFull, StoreDamaged
from shared.json_file import parse_object, sealed
from shared.progress import progress, say
from shared.provenance import distribution_version
from shared.store import TeacherStore, comparable, read_identity, require_same
from shared.store_files import LocalFiles, is_remote
from shared.store_write import create
from shared.target_files import LIST, damaged

# Blocks in the making at a time: one waits for its fsyncs while another is read and checked.
_BLOCKS_AT_ONCE = 2
# What a store may hold that no extraction made; `push` keeps its lock in a folder of its own.
STORE_PARTS = {"blocks", "index", "manifest", "plan.json", "push", "quarantine", "store.json", "target", "zarr.json"}


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """A store to be made: `command` and its `config`, the inputs, their blocks in the new order.

    `num_rows`: how far document numbers go; `selection`: how the documents were chosen, kept in the identity.
    """

    command: str
    config: Mapping[str, Any]
    out: Path
    sources: Sequence[Source]
    copies: Sequence[BlockCopy]
    num_rows: int
    mask_token_id: int
    selection: Mapping[str, Any]
    link: bool
    verify: bool

    def identity(self) -> dict[str, Any]:
        """What every input has, and what is the new store's own: `parts` says what it was made from."""
        first = self.sources[0].store.identity
        dropped = ("format", "store_uuid", "crc32c")
        return {key: value for key, value in first.items() if key not in dropped} | {
            "made_by": self.command,
            "selection": dict(self.selection),
            "parts": [
                {
                    "store_uuid": source.store.identity["store_uuid"],
                    "rows_sha256": source.store.identity["rows_sha256"],
                    "documents": len(source.documents),
                    "snapshot": source.store.snapshot,
                }
                for source in self.sources
            ],
            "version": distribution_version(),
            "mask_token_id": self.mask_token_id,
            "block_tokens": max(int(s.store.identity.get("block_tokens", 0)) for s in self.sources),
            "rows_sha256": self._rows_sha256(),
            "documents": self.num_rows,
            "tokens": sum(copy.tokens for copy in self.copies),
        }

    def _rows_sha256(self) -> str:
        """One hash over which documents of which rows there are, under which numbers and splits."""
        digest = hashlib.sha256()
        for copy in self.copies:
            digest.update(f"{self.sources[copy.source].store.identity['rows_sha256']} {copy.block}\n".encode())
            for array in (copy.documents.index[copy.kept], copy.index, copy.heldout):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def plan(self) -> dict[str, Any]:
        """The new plan.json: the range of document numbers of each block."""
        ranges = [[int(copy.index[0]), int(copy.index[-1]) + 1] for copy in self.copies]
        ranges[-1][1] = self.num_rows
        return sealed({"blocks": ranges})


def derive(work: Derivation) -> dict[str, Any]:
    """Make the store, or go on with it, and return {"blocks", "documents", "tokens", "bytes", "linked_bytes", "made"}.

    Raises StoreMismatch when `out` was begun from something else, ConfigRefused when it is no place for a store,
    StoreDamaged for a damaged input, DiskFull or PathNotWritable. A kill at any point leaves an `out` that is not
    complete, and the same command goes on.
    """
    require_writable(work.out)
    require_kind(work.out, work.command)
    _require_place(work)
    identity = work.identity()
    if (work.out / "store.json").exists():
        require_same(_by_part(read_identity(work.out)), _by_part(identity), work.out)
    with recorded(work.out, work.command, dict(work.config)) as run_id:
        for part in ("", "blocks"):
            remove_partials(work.out / part)
        create(work.out, identity)
        write_json(work.out / "plan.json", work.plan())
        _take_target(work)
        ledger = Ledger(work.out, f"{work.command.replace(' ', '-')}-{run_id}")
        _record_skips(work, ledger)
        made = _make_blocks(work, ledger)
        store = blocks.open_store(work.out)
    records = blocks.recorded_blocks(work.out).values()
    sums = {name: sum(int(record[name]) for record in records) for name in ("documents", "tokens", "bytes")}
    linked = sum(int(record["detail"]["linked_bytes"]) for record in records)
    return {"blocks": len(store.blocks), **sums, "linked_bytes": linked, "made": made}


def require_extracted(store: Path) -> None:
    """Raise ConfigRefused for a store that no extraction made: it has no rows of its own to go on with."""
    if not (store / "store.json").exists():
        return
    if parts := read_identity(store).get("parts"):
        raise ConfigRefused(
            f"{store} was made by `dflash store merge` or `subset` from {len(parts)} other "
            f"store{'s' if len(parts) > 1 else ''} and has no rows of its own; extract to another --out, then merge "
            "the two"
        )


def _require_place(work: Derivation) -> None:
    """Raise ConfigRefused when `out` is an input, lies in one or around one, or holds something else."""
    out = work.out.resolve()
    for source in work.sources:
        if is_remote(source.store.location):
            continue
        place = Path(source.store.location).resolve()
        if out.is_relative_to(place) or place.is_relative_to(out):
            raise ConfigRefused(
                f"the new store {work.out} and the input {source.store.location} lie in each other; inputs are never "
                "changed, choose another place"
            )
    entries = sorted(entry.name for entry in work.out.iterdir()) if work.out.is_dir() else []
    other = [name for name in entries if name not in STORE_PARTS and not name.startswith(".")]
    if other or (entries and not {"store.json", "manifest", ".owner"} & set(entries)):
        raise ConfigRefused(
            f"{work.out} holds {(other or entries)[0]}, which is no part of a store; choose a new or empty folder"
        )


def _by_part(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity to compare: what was asked for comes first, and a difference in one of many parts names that part."""
    parts = {str(number): part for number, part in enumerate(identity.get("parts", ()))}
    asked = {"selection": identity.get("selection"), "number of parts": len(parts), "parts": parts}
    return asked | {key: value for key, value in comparable(identity).items() if key not in asked}


def _take_target(work: Derivation) -> None:
    """The target's folder, from the first input: the same weights lie in all of them."""
    final = work.out / "target"
    if (final / LIST).is_file():
        return
    store = work.sources[0].store
    for name, reason in damaged(store.files, "target", strict=work.verify):
        raise StoreDamaged(
            f"{store.files.show(name)} {reason}; `dflash store verify {store.location} --repair` sets it aside, the "
            "command that made the store makes it again"
        )
    listed = parse_object(store.files.read_bytes(f"target/{LIST}"), store.files.show(f"target/{LIST}"), "")
    with aside(final) as temporary:
        copy_files(store.files, "target", [LIST, *listed["files"]], temporary, link=work.link)
        publish_dir(temporary, final)


def _record_skips(work: Derivation, ledger: Ledger) -> None:
    """Once each, however often the command runs."""
    fields = [item.name for item in dataclasses.fields(SkipRecord)]
    known = {SkipRecord(**{name: record[name] for name in fields}) for record in read(work.out, "skips")}
    skips = dict.fromkeys(skip for source in work.sources for skip in source.skips)
    ledger.append(*(skip for skip in skips if skip not in known))


def _make_blocks(work: Derivation, ledger: Ledger) -> int:
    """Make and record every block that is not done; returns how many were made."""
    done = blocks.recorded_blocks(work.out)
    todo = [number for number in range(len(work.copies)) if number not in done]
    _require_room(work, todo)
    if done:
        say(f"{work.out}: {len(done)} of {len(work.copies)} blocks are there already")

    def make(number: int) -> tuple[int, float, dict[str, Any]]:
        copy, started = work.copies[number], time.time()
        store = work.sources[copy.source].store
        if work.verify and copy.is_whole:  # what is written anew is checked as it is read
            require_whole(store, copy.block)
        written = make_block(store, copy, work.out, number, link=work.link)
        return number, time.time() - started, written

    with _pool() as pool, progress(work.command.removeprefix("store "), len(todo), "blocks", "store") as bar:
        for number, seconds, written in pool.map(make, todo):
            _record_block(work, ledger, number, seconds, written)
            bar.advance(1)
    return len(todo)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that stop after the block in hand when something goes wrong, or the user asks."""
    pool = ThreadPoolExecutor(_BLOCKS_AT_ONCE, thread_name_prefix="derive")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _record_block(work: Derivation, ledger: Ledger, number: int, seconds: float, written: Mapping[str, Any]) -> None:
    """The documents' records, then the block's: the only proof that it is done."""
    copy = work.copies[number]
    source = work.sources[copy.source]
    first = int(np.searchsorted(source.documents.block, copy.block))
    lines = [
        dataclasses.replace(
            source.lines[first + position],
            document_index=index,
            split="heldout" if heldout else "train",
            block=number,
            seal=str(written["seal"]),
        )
        for position, index, heldout in zip(copy.kept.tolist(), copy.index.tolist(), copy.heldout.tolist(), strict=True)
    ]
    ledger.append(*lines)
    record = source.records[copy.block]
    masses = [(line.topk_mass, line.n_tokens) for line in lines if line.topk_mass is not None]
    tokens = sum(n for _, n in masses)
    detail = {
        **record["detail"],
        "skipped": record["detail"].get("skipped", 0) if copy.is_whole else 0,
        "files": written["files"],
        "linked_bytes": written["linked_bytes"],
        "made_from": {"store_uuid": source.store.identity["store_uuid"], "block": copy.block, "seal": record["seal"]},
    }
    if not copy.is_whole and tokens:
        detail["topk_mass"] = sum(float(mass) * n for mass, n in masses) / tokens
    ledger.append(
        ShardRecord(
            block=number,
            rank=0,
            documents=len(lines),
            tokens=copy.tokens,
            bytes=int(written["bytes"]),
            seconds=seconds,
            seal=str(written["seal"]),
            detail=detail,
        )
    )


def _require_room(work: Derivation, todo: Sequence[int]) -> None:
    """Raise DiskFull when what cannot be linked does not fit."""
    needed = 0
    for number in todo:
        copy = work.copies[number]
        source = work.sources[copy.source]
        whole = int(source.records[copy.block]["bytes"])
        if not copy.is_whole:
            needed += whole * copy.tokens // max(int(copy.documents.length.sum()), 1)
        elif not (work.link and _same_file_system(source.store, work.out)):
            needed += whole
    if needed > (free := free_bytes(work.out)):
        raise DiskFull(
            f"{work.out} needs about {needed / 1e9:.3g} GB for what cannot be linked, {free / 1e9:.3g} GB are free; "
            "make room, or make it on the file system of its inputs"
        )


def _same_file_system(store: TeacherStore, out: Path) -> bool:
    return isinstance(store.files, LocalFiles) and store.files.root.stat().st_dev == out.stat().st_dev
