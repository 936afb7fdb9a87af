"""`dflash store gc`: what lies in a store that nobody needs any more, and with --apply gone.

What is listed is never part of the store: a reader meets none of it. Called by manifests/store_cli.py.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from shared.errors import ConfigRefused, RunBusy, StoreDamaged
from shared.progress import summary, tell

_DAY_S = 86400.0
# Where killed processes leave what they had not yet published.
_PARTIAL_PLACES = ("", "blocks", "index", "progress", "workers", "supervision", "quarantine")
# A trainer that opens the store may be writing its cache right now, and owns nothing.
_INDEX_SETTLED_S = 3600.0


@dataclass(frozen=True)
class Leftover:
    """Something to remove: where it lies, why nobody needs it, and the bytes that come back."""

    path: Path
    reason: str
    bytes: int


@click.command()
@click.argument("store")
@click.option("--apply", is_flag=True, help="Remove what is listed; without it nothing is changed.")
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0),
    help="Also remove what was set aside in quarantine longer ago than this many days (default: keep all of it).",
)
def gc(store: str, apply: bool, keep_days: float | None) -> None:
    """List, and with --apply remove, what nobody needs: partial folders of dead processes, blocks without a record,
    caches of earlier states, old quarantine. Refused while an extraction owns the store.

    \b
    dflash store gc runs/x.zarr
    dflash store gc runs/x.zarr --apply --keep-days 30
    """
    from manifests.runs import is_owned
    from shared.atomic import owned
    from shared.store import read_identity
    from shared.store_files import is_remote

    if is_remote(store):
        raise ConfigRefused(f"gc cleans local stores, {store} is in a bucket; use the bucket's own lifecycle rules")
    folder = Path(store)
    read_identity(folder)
    if not apply:
        if is_owned(folder):
            raise RunBusy(f"{store} is being extracted to: what looks left over may be in the making; wait for it")
        report(store, list(leftovers(folder, keep_days)), removed=False)
        return
    with owned(folder):
        found = list(leftovers(folder, keep_days))
        for leftover in found:
            remove(leftover.path)
    report(store, found, removed=True)


def leftovers(store: Path, keep_days: float | None) -> Iterator[Leftover]:
    """Everything that can go. Raises StoreDamaged when a record is damaged: its block may only look unrecorded."""
    from manifests.blocks import recorded_blocks
    from manifests.commit import damaged_lines
    from shared.documents import index_name
    from shared.store import snapshot_of

    if damaged := damaged_lines(store, "shards"):
        path, number, reason = damaged[0]
        raise StoreDamaged(
            f"line {number} of {path} is damaged ({reason}), so a block without a record may be a good one; run "
            f"`dflash store verify {store} --repair` first"
        )
    now = time.time()
    for place in _PARTIAL_PLACES:
        for path in sorted((store / place).glob(".*.partial")):
            if place != "index" or now - path.lstat().st_mtime > _INDEX_SETTLED_S:
                yield Leftover(path, "left by a process that was killed", size_of(path))
    blocks = recorded_blocks(store)
    present_blocks = [p for p in sorted((store / "blocks").glob("[0-9]*")) if p.name.isdecimal() and p.is_dir()]
    unrecorded = [path for path in present_blocks if int(path.name) not in blocks]
    require_only_unfinished(store, unrecorded, bool(blocks))
    for path in unrecorded:
        yield Leftover(path, "a block without a record", size_of(path))
    present = store / index_name(snapshot_of({block: str(record["seal"]) for block, record in blocks.items()}))
    for path in sorted((store / "index").glob("documents-*.bin")):
        if path != present:
            yield Leftover(path, "the cache of an earlier state", size_of(path))
    for path in sorted((store / "quarantine").glob("[!.]*")) if keep_days is not None else ():
        days = (now - path.lstat().st_ctime) / _DAY_S  # when it was moved here
        if days > (keep_days or 0.0):
            yield Leftover(path, f"set aside {days:.0f} days ago", size_of(path))


def require_only_unfinished(store: Path, unrecorded: Sequence[Path], any_recorded: bool) -> None:
    """Raise StoreDamaged when blocks lack their records because records were lost, not because a writer was killed.

    A killed writer leaves one block whose documents it had recorded already; more than one of a writer, or a store full
    of blocks without any record, are files of `manifest/` gone astray.
    """
    from manifests.commit import read
    from shared.seal import digest

    if not unrecorded:
        return
    lost = "nothing is removed: restore the manifest folder, or make the blocks again with the same `dflash extract`"
    if not any_recorded and not read(store, "shards"):
        raise StoreDamaged(
            f"{store} has {len(unrecorded)} blocks and not one shard record: its records are lost; {lost}"
        )
    writers = {str(record["seal"]): str(record["writer"]) for record in read(store, "documents")}
    files = [path / "zarr.json" for path in unrecorded]
    of_whom = Counter(writers.get(digest(file.read_bytes())) for file in files if file.is_file())
    del of_whom[None]
    for writer, count in of_whom.most_common(1):
        if count > 1:
            raise StoreDamaged(
                f"{count} blocks of writer {writer} in {store} have document records and no shard record, where a kill "
                f"leaves one: shard records are lost; {lost}"
            )


def size_of(path: Path) -> int:
    """Bytes that removing it gives back: files that have another name elsewhere (merged stores) give none."""
    if not path.is_dir() or path.is_symlink():
        stat = path.lstat()
        return stat.st_size if stat.st_nlink == 1 else 0
    return sum(size_of(Path(entry.path)) for entry in os.scandir(path))


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it. Raises PathNotWritable."""
    from shared.atomic import disk_faults

    with disk_faults(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def report(store: str, found: list[Leftover], *, removed: bool) -> None:
    """One line for each, and the sum."""
    for leftover in found:
        tell(f"{'removed' if removed else 'would remove'} {leftover.path}: {leftover.reason}, {leftover.bytes:,} bytes")
    total = sum(leftover.bytes for leftover in found)
    pairs = [("removed" if removed else "to remove", len(found)), ("given back" if removed else "bytes", f"{total:,}")]
    if found and not removed:
        pairs.append(("to do it", f"dflash store gc {store} --apply"))
    summary(f"gc {store}", pairs)
