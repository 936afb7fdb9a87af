"""Room on the disk while extraction runs: looked at before every block, and again when the disk fills inside one.

Called by stage1_extract/worker.py and block_writer.py; what extract.py asks before the start is in disk_room.py. Sizes
come from disk_plan.py. What is short stops the worker, or (--on-disk-full wait) holds it until somebody made room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shared.atomic import PARTIAL
from shared.errors import DiskFull, Interrupted
from shared.store_layout import block_name
from shared.worker import stop_requested
from stage1_extract.disk_plan import Blocks, Counts, Size, StoreShape, store_size
from stage1_extract.disk_room import Room, readable_bytes, reserve_of
from stage1_extract.plan import Plan

LOOK_EVERY_S = 1.0
# Of each worker: the block that the target is at, and the one before it, which is being written.
_BLOCKS_AT_WORK = 2


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """One worker's view of the disk."""

    store: Path
    shape: StoreShape
    lengths: Counts
    """Tokens of each document: int64 [D]."""
    plan: Plan
    remaining: Sequence[int]
    """Blocks that all workers of this run are to make."""
    workers: int
    reserve_gb: float | None
    wait: bool
    report: Callable[[str, str], None]
    """Shown while waiting: (free, needed)."""
    over: Callable[[], None] = lambda: None
    """Called when a wait has ended."""

    def require(self, block: int) -> None:
        """Return once the disk holds this block and what the other workers are at.

        Raises DiskFull with the numbers, or when waiting, Interrupted on a request to stop.
        """
        if self._wait_for_room(f"block {block}"):
            self.over()

    def patiently(self, what: str, action: Callable[[], None]) -> None:
        """Do `action`, which can be done again after it failed; when the disk fills inside it and we wait, wait.

        Raises as the action and `require`.
        """
        while True:
            try:
                action()
                return
            except DiskFull as error:
                if not self.wait:
                    raise
                refused = str(error)
            # Once at least, whatever the numbers say: the disk has just refused, and quotas are not among them.
            look = self._look()
            self._wait_or_stop(what, look, look.short or refused)
            self._wait_for_room(what)
            self.over()

    def _wait_for_room(self, what: str) -> bool:
        """Whether anything had to be waited for."""
        waited = False
        while (look := self._look()).short is not None:
            self._wait_or_stop(what, look, look.short)
            waited = True
        return waited

    def needed(self) -> Size:
        """Blocks that the workers are at, less what of them is on the disk already, and the reserve."""
        left = _unpublished(self.store, self.remaining)[: _BLOCKS_AT_WORK * self.workers]
        planned = store_size(self.shape, Blocks.of_plan(self.lengths, self.plan, left), with_target=False).total
        written = _in_work(self.store / "blocks")
        rest = Size(0, max(planned.allocated - written.allocated, 0), max(planned.inodes - written.inodes, 0), 0)
        return rest + reserve_of(self.store, self.reserve_gb)

    def _look(self) -> _Look:
        room, needed = Room.at(self.store), self.needed()
        short = room.lacks(needed)
        if short is not None and needed.allocated <= room.bytes:
            return _Look(f"{room.inodes:,} files", f"{needed.inodes:,} files", short, needed.allocated)
        return _Look(readable_bytes(room.bytes), readable_bytes(needed.allocated), short, needed.allocated)

    def _wait_or_stop(self, what: str, look: _Look, short: str) -> None:
        if not self.wait:
            reserve = readable_bytes(reserve_of(self.store, self.reserve_gb).allocated)
            error = DiskFull(
                f"{self.store}: no room for {what}: {short} (for the blocks that {self.workers} processes are at, with "
                f"{reserve} in reserve); make room, then run the same command again: finished blocks are kept. "
                "--on-disk-full wait waits for room, --disk-reserve-gb sets the reserve"
            )
            error.needed_bytes = look.needed_bytes
            raise error
        self.report(look.free, look.needed)
        deadline = time.monotonic() + LOOK_EVERY_S
        while time.monotonic() < deadline:
            if stop_requested():
                raise Interrupted(
                    f"extract stopped while waiting for room for {what}: {short}; run the same command again to go on"
                )
            time.sleep(0.05)


class _Look(NamedTuple):
    """Free and needed as shown, and what is short, if anything."""

    free: str
    needed: str
    short: str | None
    needed_bytes: int


def _unpublished(store: Path, blocks: Sequence[int]) -> list[int]:
    """Those of the blocks that are not there yet."""
    there = set(os.listdir(store / "blocks"))  # noqa: PTH208 - a hundred thousand names, no Path for each
    return [block for block in blocks if block_name(block).rpartition("/")[2] not in there]


def _in_work(folder: Path) -> Size:
    """What lies in the folders that are being filled now."""
    size = Size()
    for aside in folder.glob(f".*{PARTIAL}"):
        for parent, folders, names in os.walk(aside):
            size += Size(0, 0, 0, len(folders))
            for name in names:
                with suppress(FileNotFoundError):  # published meanwhile
                    size += Size(0, (Path(parent) / name).stat().st_blocks * 512, 1, 0)
    return size
