"""Files that are either there in full or not there: the project's only renames.

A write goes to a hidden temporary name, is fsynced, renamed, and the folder is fsynced too (ext4 may
otherwise lose the name after power loss). Records (manifests.commit) come after these calls return.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from shared.early_writeback import make_durable
from shared.errors import DflashError, DiskFull, PathNotWritable, RunBusy
from shared.kernel import is_same, lock_holders, own_start_ticks

PARTIAL = ".partial"
_FSYNCS = 8
# A worker looks up between two blocks or steps whether its command still lives.
WORKERS_END_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a disk answers by itself, wherever a command touches it: never a bug of ours.
_REFUSED = (errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO, errno.EFBIG, errno.ESTALE)
# When writing also these. ENOENT too: some file systems (/proc, vanished mounts) answer a create with it.
_UNWRITABLE = (*_REFUSED, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn the operating system's disk errors into one sentence with the numbers.

    Raises DiskFull for ENOSPC and EDQUOT, PathNotWritable when the path cannot be written. Libraries that wrap the
    system's error in their own (safetensors, torch) are understood too.
    """
    try:
        yield
    except DflashError:
        raise
    except Exception as error:
        number = _system_error(error)
        if number in _FULL:
            raise _disk_full(path) from error
        if number in _UNWRITABLE:
            raise PathNotWritable(
                f"cannot write {path}: {os.strerror(number)}; choose another path or change its permissions"
            ) from error
        raise


def fault_of(error: OSError) -> DflashError | None:
    """The user's fault behind an error of the system that nobody expected, if it is one (no permission, a dying disk).

    For the outermost frame of a command or worker: what stays None is a bug of ours and keeps its traceback.
    """
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
    if error.errno in _FULL:
        return _disk_full(path)
    if error.errno in _REFUSED:
        return PathNotWritable(f"cannot use {path}: {os.strerror(error.errno)}; change its permissions or its place")
    return None


def _disk_full(path: Path) -> DiskFull:
    return DiskFull(
        f"disk full while writing {path} ({free_bytes(path):,} bytes free); make room, then run "
        "the same command again: finished work is kept"
    )


def _system_error(error: BaseException) -> int:
    """The errno behind an error: its own, Rust's "(os error 28)", or that of a failed write it was raised upon."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    behind = error.__cause__ or error.__context__
    return behind.errno or 0 if isinstance(behind, OSError) and behind.errno in (*_FULL, *_REFUSED) else 0


def free_bytes(path: Path) -> int:
    """Bytes free to this user on the file system that holds `path` or its nearest existing parent."""
    stat = os.statvfs(nearest_existing(path))
    return stat.f_bavail * stat.f_frsize


def nearest_existing(path: Path) -> Path:
    """The path itself or its first parent that exists."""
    current = path.absolute()
    while not current.exists():
        current = current.parent
    return current


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    _fsync(path, os.O_DIRECTORY)


def _fsync(path: Path, kind: int = 0, told: Callable[[int], None] = lambda size: None) -> None:
    descriptor = os.open(path, os.O_RDONLY | kind)
    try:
        make_durable(descriptor, told)
    finally:
        os.close(descriptor)


def make_dir(path: Path) -> None:
    """Make a folder and what is missing above it, each durable in its parent."""
    if path.is_dir():
        return
    make_dir(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically and durably."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    with disk_faults(path):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by JSON text, two-space indented so that people can read it."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def temporary_dir(final: Path) -> Path:
    """A fresh hidden sibling of `final` to fill before `publish_dir`."""
    final = Path(os.path.abspath(final))  # noqa: PTH100 - "." and ".." have no name, and links must stay links
    folder = final.with_name(f".{final.name}.{uuid.uuid4().hex}{PARTIAL}")
    with disk_faults(final):
        folder.mkdir(parents=True)
    return folder


@contextmanager
def aside(final: Path) -> Iterator[Path]:
    """A fresh hidden sibling of `final` to fill and publish; whatever goes wrong, its space is given back.

    Raises DiskFull and PathNotWritable for what the block meets.
    """
    folder = temporary_dir(final)
    try:
        with disk_faults(final):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_dir(temporary: Path, final: Path, told: Callable[[int], None] = lambda size: None) -> None:
    """Fsync everything below `temporary`, rename it to `final`, fsync the parent; `told` hears of bytes, from threads.

    Raises FileExistsError when a non-empty `final` exists: what is published never changes.
    """
    with disk_faults(final):
        _fsync_below(temporary, told)
        if final.exists() and any(final.iterdir()):
            raise FileExistsError(errno.EEXIST, "already published", str(final))
        temporary.rename(final)
        fsync_dir(final.parent)


def _fsync_below(folder: Path, told: Callable[[int], None]) -> None:
    """Make all files below a folder durable, then the names in all its folders.

    Side by side: the file system's journal is then committed for many of them at once (5 times faster for a block).
    """
    found = [(Path(where), names) for where, _, names in os.walk(folder, topdown=False)]
    with ThreadPoolExecutor(_FSYNCS, thread_name_prefix="fsync") as pool:
        list(pool.map(partial(_fsync, told=told), [where / name for where, names in found for name in names]))
        list(pool.map(fsync_dir, [where for where, _ in found]))


def remove_partials(folder: Path) -> int:
    """Delete what killed writers left in `folder`; returns how many. Call only while owning the folder."""
    left = [entry for entry in folder.glob(f".*{PARTIAL}")] if folder.is_dir() else []
    for entry in left:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return len(left)


def require_writable(path: Path) -> None:
    """Prove that a folder can be made at `path` and a file in it, before any expensive work.

    Leaves nothing behind that was not there, apart from `path` itself when it did not exist and could be made.
    Raises PathNotWritable or DiskFull.
    """
    existing = nearest_existing(path)
    if not existing.is_dir():
        raise PathNotWritable(f"cannot write {path}: {existing} is a file, not a folder; choose another path")
    with disk_faults(path):
        try:
            # A file without a name: a kill here leaves nothing.
            descriptor = os.open(existing, os.O_WRONLY | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            descriptor = _named_probe(existing)
        try:
            os.write(descriptor, b"probe")
        finally:
            os.close(descriptor)


def _named_probe(folder: Path) -> int:
    """For file systems without nameless files (NFS, some overlays)."""
    probe = folder / f".{uuid.uuid4().hex}{PARTIAL}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    probe.unlink()
    return descriptor


_held: list[int] = []


def held_locks() -> tuple[int, ...]:
    """Descriptors of the folders this process owns: a worker keeps them, so that no second command meets it at work."""
    return tuple(_held)


def adopt_locks(descriptors: Iterable[int]) -> None:
    """Be the owner whose locks were inherited under these descriptors, and say so in them."""
    for descriptor in descriptors:
        _held.append(descriptor)
        with suppress(OSError):  # a full disk: the lock is what counts
            _sign(descriptor)


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    text = f"process {os.getpid()} on {socket.gethostname()}\nstarted at tick {own_start_ticks()}\n"
    os.pwrite(descriptor, text.encode(), 0)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process and its workers; the kernel lets go when the last of them ends, however it ends.

    Workers that outlive a killed command are waited for. Raises RunBusy naming the owner.
    """
    with disk_faults(folder):
        make_dir(folder)
        with suppress(PermissionError):  # also when a killed command made the folder and did not come to this
            fsync_dir(folder.parent)
        descriptor = os.open(folder / ".owner", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, folder)
        with disk_faults(folder):
            _sign(descriptor)
        _held.append(descriptor)
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Take the folder's lock; when its command is dead, its workers stop at their next boundary and are waited for."""
    deadline = time.monotonic() + WORKERS_END_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            signed = os.pread(descriptor, 400, 0).decode(errors="replace").strip()
        owner = signed.partition("\n")[0] or "unknown"
        if not _is_dead(signed):
            raise RunBusy(f"{folder} is in use by {owner}; wait for it, stop it, or choose another folder")
        if time.monotonic() > deadline:
            raise RunBusy(
                f"{folder} is in use by workers of {owner}, their supervisor, which is gone: "
                f"{_left(lock_holders(descriptor))}, then run the same command again"
            )
        time.sleep(0.05)


def _left(holders: list[tuple[int, str]]) -> str:
    """Who did not end, and what to do about them."""
    if not holders:
        return f"they did not end in {WORKERS_END_S:.0f} s; wait for them or end them"
    pids = " ".join(str(pid) for pid, _ in holders)
    said = f"process {pids} did not end in {WORKERS_END_S:.0f} s"
    if stopped := " ".join(str(pid) for pid, state in holders if state in "Tt"):
        said += f"; stopped by a signal: `kill -CONT {stopped}` lets them save and leave"
    return f"{said}; wait for them or end them (`kill -KILL {pids}`)"


def _is_dead(signed: str) -> bool:
    """Whether the process named in `.owner` was one of this host and has ended; another one may have its number now."""
    found = re.fullmatch(r"process (\d+) on (.*)\nstarted at tick (\d+)", signed)
    if found is None or found[2] != socket.gethostname():
        return False
    return not is_same(int(found[1]), int(found[3]))
