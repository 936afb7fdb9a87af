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
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import DflashError, DiskFull, PathNotWritable, RunBusy

PARTIAL = ".partial"
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
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def publish_dir(temporary: Path, final: Path) -> None:
    """Fsync everything below `temporary`, rename it to `final`, fsync the parent.

    Raises FileExistsError when a non-empty `final` exists: what is published never changes.
    """
    with disk_faults(final):
        for folder, _, names in os.walk(temporary, topdown=False):
            for name in names:
                descriptor = os.open(Path(folder) / name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            fsync_dir(Path(folder))
        if final.exists() and any(final.iterdir()):
            raise FileExistsError(errno.EEXIST, "already published", str(final))
        temporary.rename(final)
        fsync_dir(final.parent)


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
    probe = existing / f".{uuid.uuid4().hex}{PARTIAL}"
    with disk_faults(path):
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the kernel lets go whenever the process ends, however it ends.

    Raises RunBusy naming the living owner.
    """
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".owner", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise RunBusy(f"{folder} is in use by {owner}; wait for it, stop it, or choose another folder") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
