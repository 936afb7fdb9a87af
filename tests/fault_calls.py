"""Sees every call by which this process changes files below one folder, makes the real call, and may die at one.

Installed by tests/fault_server.py in the processes of a trial. Python's own calls (os.*, open) are seen whoever makes
them; a library that writes natively is seen when its file is fsynced, which is what the disk promises anything about.
"""

# The wrappers sit below pathlib.
# ruff: noqa: PTH100, PTH115, PTH118

from __future__ import annotations

import builtins
import functools
import io
import os
import pickle
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

WRITES = ("write", "writev", "pwrite", "pwritev")
FILLER = "filler"
Whom = Literal["caller", "everyone", "command", "nobody"]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Die at the `occurrence`-th call with this label (see `label_of`), whichever process of the run makes it first."""

    label: str
    occurrence: int = 1
    when: str = "after"
    """before | middle (half of the bytes are written) | after"""
    whom: Whom = "caller"
    """Who gets the SIGKILL: the calling process, the whole process group of the trial, or the command that started the
    caller, which then sleeps until a file `wake` lies beside the log. With "nobody" the disk is filled instead."""


class Event(NamedTuple):
    """One line of a trial's log. `state` is what an fsync made durable, bytes or {name: inode}, or what was written."""

    role: str
    kind: str
    path: str
    inode: int
    state: Any

    @property
    def label(self) -> str:
        """Kind and path without what differs from run to run."""
        return label_of(self.kind, self.path)


def label_of(kind: str, path: str) -> str:
    """ "fsync blocks/000001/zarr.json": random names and process numbers become a star."""
    return f"{kind} {re.sub(r'[0-9a-f]{12,}|(?<=[.])[0-9]+(?=[.]partial)', '*', path)}"


def read_log(path: Path) -> Iterator[Event]:
    """All events whose writer lived long enough to write them whole, in order."""
    data = io.BytesIO(path.read_bytes())
    while True:
        try:
            yield Event(*pickle.load(data))
        except (EOFError, pickle.UnpicklingError):
            return


class Calls:
    """The wrappers. `contents`: the log keeps what every fsync made durable."""

    def __init__(self, root: Path, log: Path, kill: Kill | None, *, contents: bool) -> None:
        self.root, self.log, self.kill, self.contents = f"{root}/", log, kill, contents
        self.role = "command"
        self._met = 0
        self._lock = threading.Lock()
        # The real calls, whatever is installed over them later.
        self._os = {name: getattr(os, name) for name in (*WRITES, *_BY_PATH, "open", "fsync", "fdatasync", "ftruncate")}
        self._open = io.open
        self.descriptor = -1  # the log's; a forked worker must keep it

    def install(self) -> None:
        """Replace the calls in this process and, by fork, in its children."""
        self.descriptor = self._os["open"](self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        for name in WRITES:
            setattr(os, name, functools.partial(self._write, name))
        for name in ("fsync", "fdatasync", "ftruncate"):
            setattr(os, name, functools.partial(self._on_descriptor, name))
        for name in _BY_PATH:
            setattr(os, name, functools.partial(self._on_path, name))
        os.open = self._os_open
        builtins.open = io.open = self._io_open  # type: ignore[assignment]

    def _around(self, kind: str, path: str, real: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Make the real call of something below the root; log it, and die before, in or after it if planned."""
        path = self._relative(path)
        due = False
        if self.kill is not None and label_of(kind, path) == self.kill.label:
            with self._lock:
                self._met += 1
                due = self._met == self.kill.occurrence and self._is_first()
        if due and self.kill is not None and self.kill.when != "after":
            if self.kill.when == "middle" and half is not None:
                half()
            self._die(kind, path)
            due = False
        try:
            return real()
        finally:  # a call that fails (a folder that is there already) is one to die after, too
            if due:
                self._die(kind, path)

    def _is_first(self) -> bool:
        """Whether no process of this run met the call before: a worker that is started again lives."""
        try:
            os.close(self._os["open"](f"{self.log}.met", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _die(self, kind: str, path: str) -> None:
        assert self.kill is not None
        self._write_event("killed " + kind, path, 0, None)
        if self.kill.whom == "nobody":
            self._fill()
            return
        if self.kill.whom == "everyone":
            os.killpg(0, signal.SIGKILL)
        if self.kill.whom == "command":
            os.kill(os.getppid(), signal.SIGKILL)
            # Also when the test has failed and its folder is gone: nobody would wake it.
            while self.log.parent.exists() and not self.log.with_name("wake").exists():
                time.sleep(0.01)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _fill(self) -> None:
        """Write a file `filler` until the disk takes no more page."""
        descriptor = self._os["open"](self.root + FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while self._os["write"](descriptor, bytes(size)) == size:
                        pass
        finally:
            os.close(descriptor)

    def _write_event(self, kind: str, path: str, inode: int, state: Any) -> None:
        event = (self.role, kind, self._relative(path), inode, state)
        self._os["write"](self.descriptor, pickle.dumps(event))

    def _relative(self, path: str) -> str:
        return "." if path == self.root[:-1] else path.removeprefix(self.root)

    def _inside(self, path: str) -> bool:
        # A file without a name leaves nothing behind, whenever it dies.
        return (path.startswith(self.root) or path == self.root[:-1]) and not path.endswith(" (deleted)")

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real = functools.partial(self._os["open"], path, flags, mode, dir_fd=dir_fd)
        where = _absolute(path, dir_fd)
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not self._inside(where):
            return int(real())
        new = not os.path.lexists(where)

        def opened() -> int:
            descriptor = int(real())
            self._write_event("create" if new else "open", where, os.fstat(descriptor).st_ino, None)
            return descriptor

        return int(self._around("open", where, opened))

    def _io_open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        writing = any(letter in mode for letter in "wax+")
        if not writing or isinstance(file, int) or not self._inside(_absolute(file, None)):
            return self._open(file, mode, buffering, *rest, **named)
        raw = _File(self, os.fspath(file), mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *rest, **named)

    def _write(self, name: str, descriptor: int, data: Any, *rest: Any) -> int:
        real = functools.partial(self._os[name], descriptor, data, *rest)
        where = _path_of(descriptor)
        if not self._inside(where):
            return int(real())
        half = functools.partial(self._os[name], descriptor, _first_half(data), *rest)
        return int(self._logged(name, where, descriptor, real, half, data))

    def _logged(
        self,
        kind: str,
        where: str,
        descriptor: int,
        real: Callable[[], Any],
        half: Callable[[], Any] | None = None,
        data: Any = None,
    ) -> Any:
        def done() -> Any:
            result = real()
            state = bytes(data) if self.contents and kind == "write" else None
            self._write_event(kind, where, os.fstat(descriptor).st_ino, state)
            return result

        return self._around(kind, where, done, half)

    def _on_descriptor(self, name: str, descriptor: Any, *rest: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        real = functools.partial(self._os[name], number, *rest)
        where = _path_of(number)
        if not self._inside(where):
            real()
        elif name == "ftruncate":
            self._logged(name, where, number, real)
        else:

            def synced() -> None:
                # Taken first: what others write while the call runs may or may not be covered by it.
                state = self._state(number) if self.contents else None
                real()
                self._write_event("fsync", where, os.fstat(number).st_ino, state)

            self._around("fsync", where, synced)

    def _state(self, descriptor: int) -> Any:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(f"/proc/self/fd/{descriptor}") as entries:
                return {entry.name: entry.inode() for entry in entries}
        with self._open(f"/proc/self/fd/{descriptor}", "rb") as file:
            return file.read()

    def _on_path(self, name: str, path: Any, *rest: Any, **named: Any) -> Any:
        real = functools.partial(self._os[name], path, *rest, **named)
        where = _absolute(path, named.get("dir_fd", named.get("src_dir_fd")))
        if not self._inside(where):
            return real()
        kind = "rename" if name == "replace" else name
        target = _absolute(rest[0], named.get("dst_dir_fd")) if kind == "rename" else where
        replaced = _inode(target) if kind != "mkdir" else 0

        def done() -> Any:
            result = real()
            if replaced:
                self._write_event("gone", target, replaced, None)
            self._write_event(kind, target, _inode(target), None)
            return result

        return self._around(kind, target, done)


_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "truncate")


class _File(io.FileIO):
    """A file opened by Python's own `open`, whose writes are seen one by one."""

    def __init__(self, calls: Calls, path: Any, mode: str) -> None:
        self._calls = calls
        new = not os.path.lexists(path)

        def opened() -> None:
            io.FileIO.__init__(self, path, mode)
            calls._write_event("create" if new else "open", os.path.abspath(path), os.fstat(self.fileno()).st_ino, None)

        calls._around("open", os.path.abspath(path), opened)

    def write(self, data: Any, /) -> int:
        real = functools.partial(super().write, data)
        half = functools.partial(super().write, _first_half(data))
        return int(self._calls._logged("write", _path_of(self.fileno()), self.fileno(), real, half, data))


def _first_half(data: Any) -> Any:
    if not isinstance(data, list):
        return memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
    views = [memoryview(part).cast("B") for part in data]
    left, kept = sum(view.nbytes for view in views) // 2, []
    for view in views:
        kept.append(view[: min(left, view.nbytes)])
        left -= kept[-1].nbytes
    return kept


def _absolute(path: Any, folder: int | None) -> str:
    text = os.fsdecode(path)
    return os.path.abspath(text if folder is None else os.path.join(_path_of(folder), text))


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _inode(path: str) -> int:
    with suppress(OSError):
        return os.lstat(path).st_ino
    return 0
