"""`dflash store push`: a store, finished or still growing, into a bucket, so that readers there never see a half.

Blocks are uploaded first, each file checked against the seal on its way, then the target and the plan; the records
come last (manifests/store_publish.py). Interrupted anywhere, the same command goes on. `--watch` follows an extraction
as a process of its own: it only reads the store's folder, so nothing it meets can slow or end the extraction.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests.blocks import MOVED, planned_blocks, recorded_blocks
from manifests.commit import Ledger, files_of
from manifests.records import EventRecord
from manifests.runs import is_owned
from manifests.store_free import free_blocks
from manifests.store_publish import Published, Uploaded, claim, publish
from manifests.store_upload import is_exported, upload_block, upload_index, upload_plan, upload_target
from shared.atomic import owned
from shared.bucket import Bucket
from shared.errors import DflashError, StorageRefused, StoreDamaged, StoreIncomplete
from shared.progress import Bar, progress, say, summary
from shared.store import read_identity

POLL_S = 2.0
# Between two publications of a growing store, and at most a twentieth of the time: each rewrites the records.
PUBLISH_EVERY_S = 60.0
_SHARE = 20
# How long --watch waits for an extraction that is not, or no longer, running.
PATIENCE_S = 60.0
_TRIES = 3
_LONGEST_PAUSE_S = 60.0
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What the command line asks: follow an extraction, remove here what is safe there, blocks uploaded at a time."""

    watch: bool = False
    free_local: bool = False
    threads: int = 4


def push(store: Path, url: str, options: PushOptions) -> None:
    """Bring everything that is done to the bucket. Raises the store and storage errors of shared/errors.py."""
    bucket = Bucket(url)
    if options.watch:
        deadline = time.monotonic() + PATIENCE_S
        while not (store / "store.json").is_file() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    read_identity(store)
    with owned(store / "push"), progress("push", None, "bytes", title="push") as bar:
        work = Push(store, bucket, options, bar)
        work.run()
    summary(
        "pushed",
        [
            ("blocks there", f"{len(work.published.shards)} of {work.planned} planned"),
            ("sent now", f"{work.sent / 1e9:.3g} GB in {len(work.uploaded)} blocks"),
            *([("removed here", f"{work.freed / 1e9:.3g} GB")] if options.free_local else []),
            ("store", store),
            ("is now at", bucket.url),
        ],
    )
    work.conclude()


@dataclass
class Push:
    """One run of the command."""

    store: Path
    bucket: Bucket
    options: PushOptions
    bar: Bar
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    identity: dict[str, Any] | None = None
    uploaded: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Blocks that this run knows to lie whole in the bucket: seal and folder."""
    failed: dict[str, StorageRefused] = field(default_factory=dict)
    """Parts that storage did not take; tried again."""
    damaged: dict[str, StoreDamaged] = field(default_factory=dict)
    """Parts that are not what was recorded; passed over."""
    published: Published = field(default_factory=Published)
    published_at: float = float("-inf")
    publishing_s: float = 0.0
    planned: int = 0
    sent: int = 0
    freed: int = 0

    def __post_init__(self) -> None:
        self._read_at: tuple[tuple[str, int], ...] | None = None
        self._read: dict[int, dict[str, Any]] = {}
        self.ledger = Ledger(self.store, f"push-{self.run_id}")

    def run(self) -> None:
        """Rounds of uploading, until everything is there or nothing more can be expected."""
        attempts, quiet_since = 0, time.monotonic()
        while True:
            living = self.options.watch and is_owned(self.store)
            known = len(self.uploaded)
            self._round(publish_now=not living)
            if self._is_complete() and not self.failed and not (self.options.watch and self._unfreed()):
                return
            if living or len(self.uploaded) > known:
                quiet_since = time.monotonic()
            attempts = attempts + 1 if self.failed else 0
            if self.failed and attempts >= _TRIES and not living:
                return
            if not self.failed and not self.options.watch:
                return
            if not living and time.monotonic() - quiet_since > PATIENCE_S:
                return
            time.sleep(min(POLL_S * 2 ** max(attempts - 1, 0), _LONGEST_PAUSE_S))

    def conclude(self) -> None:
        """Raise for what did not get there."""
        if self.damaged:
            first = next(iter(self.damaged.values()))
            raise StoreDamaged(
                f"{_named(self.damaged)} of {self.store} were not pushed: {first}; `dflash store verify {self.store} "
                "--repair` sets damaged blocks aside, extract and push again"
            )
        if self.failed:
            first_refusal = next(iter(self.failed.values()))
            raise StorageRefused(
                f"{_named(self.failed)} of {self.store} were not pushed after {_TRIES} rounds: {first_refusal}; run "
                "the same command again to go on"
            )
        records = self._recorded()
        moved = {block: records[block]["detail"].get(MOVED) for block in self._missing()}
        if moved := {block: place for block, place in moved.items() if place}:
            block, place = next(iter(moved.items()))
            raise StoreIncomplete(
                f"{len(moved)} blocks of {self.store} were not pushed, the first is {block}: their large arrays are "
                f"only at {place}; `dflash store pull {place} {self.store}` first, then push again"
            )
        if not self.published.shards or (self.options.watch and not self._is_complete()):
            raise StoreIncomplete(
                f"{self.bucket.url} has {len(self.published.shards)} of {self.planned} planned blocks and no "
                f"extraction runs on {self.store}; finish it with the same `dflash extract` command and push again"
            )
        if not self._is_complete():
            say(f"{self.store} is not finished: push again later, or with --watch while it is extracted")

    def _is_complete(self) -> bool:
        return bool(self.published.head and self.published.head.complete) and not self._missing()

    def _missing(self) -> dict[int, str]:
        """Blocks that are done here and not published with the same content: {block: seal}."""
        if self.identity is None:
            return {}
        return {block: seal for block, seal in self._seals().items() if self.published.seal_of(block) != seal}

    def _unfreed(self) -> list[int]:
        """Blocks whose large arrays may be removed here and are still there."""
        if not self.options.free_local:
            return []
        return [
            block
            for block, record in self._recorded().items()
            if self.published.seal_of(block) == record["seal"] and not record["detail"].get(MOVED)
        ]

    def _seals(self) -> dict[int, str]:
        return {block: str(record["seal"]) for block, record in self._recorded().items()}

    def _recorded(self) -> dict[int, dict[str, Any]]:
        """The done blocks here; read again only when a record was added."""
        sizes = tuple((path.name, path.stat().st_size) for path in files_of(self.store, "shards"))
        if sizes != self._read_at:
            self._read_at, self._read = sizes, recorded_blocks(self.store)
        return self._read

    def _round(self, *, publish_now: bool) -> None:
        recorded = self._recorded()
        if not recorded:  # before its first block a store may still become another
            return
        if self.identity is None:
            self.identity = read_identity(self.store)
            claim(self.bucket, self.store, self.identity)
            self.published = Published.read(self.bucket)
        self.planned = planned_blocks(self.store)
        self.failed.clear()
        self._upload_blocks(recorded)
        self._attempt("the plan", lambda: upload_plan(self.bucket, self.store))
        exported = is_exported(self.store)
        if exported:
            self._attempt("the target", lambda: upload_target(self.bucket, self.store, self._advance))
        everything = {*self.published.shards, *self.uploaded} >= set(range(self.planned))
        complete = everything and exported and not self.failed and not self.damaged
        due = time.monotonic() - self.published_at > max(PUBLISH_EVERY_S, _SHARE * self.publishing_s)
        if complete or due or publish_now:
            self._attempt("the records", lambda: self._publish(complete=complete))
        if self.options.free_local and self.published.shards:
            self._attempt("the copies", self._free)

    def _upload_blocks(self, recorded: dict[int, dict[str, Any]]) -> None:
        todo = {
            block: seal
            for block, seal in self._missing().items()
            if self.uploaded.get(block, ("",))[0] != seal
            and f"block {block}" not in self.damaged
            and not recorded[block]["detail"].get(MOVED)
        }
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="push") as pool:
            running: dict[Future[int], tuple[int, str, str]] = {}
            for block, seal in sorted(todo.items()):
                place = self.published.place_for(block, seal)
                future = pool.submit(upload_block, self.bucket, self.store, block, seal, place, self._advance)
                running[future] = (block, seal, place)
            try:
                for future in as_completed(running):
                    block, seal, place = running[future]
                    self._attempt(f"block {block}", functools.partial(self._add, future))
                    if f"block {block}" not in {*self.failed, *self.damaged}:
                        self.uploaded[block] = (seal, place)
                    if len(self.failed) > self.options.threads:  # storage as a whole is gone: not every block must wait
                        pool.shutdown(cancel_futures=True)
                        return
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _attempt(self, part: str, action: Callable[[], None]) -> None:
        """Do it; what storage or the disk will not give is kept by name, recorded, and does not stop the rest."""
        try:
            action()
        except (StorageRefused, StoreDamaged) as error:
            kept: dict[str, Any] = self.failed if isinstance(error, StorageRefused) else self.damaged
            kept[part] = error
            self._event(f"{part} not pushed", error)

    def _event(self, message: str, error: DflashError) -> None:
        detail = {"url": self.bucket.url, "error": type(error).__name__, "message": str(error)}
        self.ledger.append(EventRecord(run_id=self.run_id, event="push failed", message=message, detail=detail))

    def _add(self, upload: Future[int]) -> None:
        self.sent += upload.result()

    def _advance(self, count: int) -> None:
        self.bar.advance(count, blocks=len(self.uploaded))

    def _publish(self, *, complete: bool) -> None:
        assert self.identity is not None
        started = time.monotonic()
        if complete and not self._is_complete() and set(self._seals()) >= set(range(self.planned)):
            upload_index(self.bucket, self.store, self._seals())
        if self.uploaded or complete:
            publish(self.bucket, self.store, self.identity, Uploaded(blocks=dict(self.uploaded), complete=complete))
            self.published = Published.read(self.bucket)
        self.published_at = time.monotonic()
        self.publishing_s = self.published_at - started

    def _free(self) -> None:
        same = [block for block, seal in self._seals().items() if self.published.seal_of(block) == seal]
        self.freed += free_blocks(self.store, self.bucket.url, same, self.ledger)


def _named(parts: dict[str, Any]) -> str:
    shown = ", ".join(list(parts)[:_SHOWN])
    return f"{shown}{f' and {len(parts) - _SHOWN} more' if len(parts) > _SHOWN else ''}"
