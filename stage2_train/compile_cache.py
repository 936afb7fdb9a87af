"""Compiled code from one start to the next: a private folder for each process, filled from a published one.

A process compiles in a folder of its own, so nothing that another process wrote, finished or killed, is in its way.
After a warm-up that kept the contract the folder is published: copied with checksums under a key of everything that
the code depends on, and renamed into place. What is published holds pickles and libraries, so it is loaded only when
it is this user's, nobody else can write it, and every byte is as it was. Called by compile_warm_up.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from shared.atomic import PARTIAL, aside, publish_dir
from shared.errors import DflashError

KEPT = 8
_DAY_S = 86400.0
_RECORD, _FILES = "entry.json", "files"
# Triton's lists of the files of a kernel name their folder; a copy must name its own.
_PLACE = b"@DFLASH_COMPILE_FOLDER@"
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class CompileCache:
    """The folder in which this process compiles, and the published ones of its key."""

    def __init__(self, published: Path | None, key: Mapping[str, Any]) -> None:
        """`published` None: in a folder of this user in the local temporary folder, where the private ones always are.

        From here on torch compiles into the private folder, until `close`.
        """
        self.notes: list[str] = []
        """What was refused, and why."""
        self.entry: Path | None = None
        """The published folder that this process was filled from."""
        self._key = json.loads(json.dumps(key))
        self._digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:24]
        self._environment = {name: os.environ.get(name) for name in _VARIABLES}
        self._lock = -1
        home = self._trusted(Path(tempfile.gettempdir()) / f"dflash-compile-{os.getuid()}")
        if published is None and home is not None:
            published = home / "published"
        self._published = None if published is None else self._trusted(published)
        self._private = None if home is None else self._trusted(home / "private")
        if self._private is not None:
            _sweep(self._private)
        self._fresh()

    def seed(self) -> bool:
        """Fill the private folder from the newest published one of this key that is whole; False: there is none."""
        found = [] if self._published is None else sorted(self._published.glob(f"{self._digest}-*"), reverse=True)
        for entry in found:
            reason = self._tried(entry) or self._fetch(entry)
            if reason is None:
                self.entry = entry
                with suppress(OSError):
                    self._marker(entry).write_text(json.dumps([socket.gethostname(), str(self.folder)]))
                    os.utime(entry)
                return True
            self._set_aside(entry, reason)
            self._fresh()
        return False

    def refuse(self, reason: str) -> None:
        """What this process was filled from does not work: set it aside and start with an empty folder."""
        if self.entry is not None:
            self._set_aside(self.entry, reason)
            self._marker(self.entry).unlink(missing_ok=True)
        self.entry = None
        self._fresh()

    def proven(self) -> None:
        """The process did not crash in its warm-up with what it was filled from."""
        if self.entry is not None:
            with suppress(OSError):
                self._marker(self.entry).unlink(missing_ok=True)

    def publish(self) -> Path | None:
        """Copy the private folder for others; None, and a note, when that cannot be done. Old entries are deleted."""
        if self._published is None:
            return None
        entry = self._published / f"{self._digest}-{time.time_ns():020d}"
        try:
            with aside(entry) as folder:
                folder.chmod(0o700)
                files = {name: self._put(source, folder / _FILES / name) for name, source in self._compiled()}
                record = {"key": self._key, "host": socket.gethostname(), "files": files}
                (folder / _RECORD).write_text(json.dumps(record, indent=1))
                publish_dir(folder, entry)
        except (DflashError, OSError) as error:
            self.notes.append(f"compiled code was not published in {self._published}: {error}")
            return None
        _prune(self._published)
        return entry

    def close(self) -> None:
        """Delete the private folder and give torch back its own."""
        self.proven()
        self._leave()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _trusted(self, folder: Path) -> Path | None:
        """The folder, made if it is not there; None, and a note, when it must not be used."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = distrust(folder)
        except OSError as error:
            reason = str(error)
        if reason is not None:
            self.notes.append(f"{folder} is not used for compiled code: {reason}")
        return folder if reason is None else None

    def _fresh(self) -> None:
        """A new empty private folder, locked while this process lives."""
        self._leave()
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self._private))
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = folder.rename(folder.with_name(f"dflash-{os.getpid()}-{uuid.uuid4().hex[:8]}"))
        for name, part in _VARIABLES.items():
            os.environ[name] = str(self.folder / part)

    def _leave(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _compiled(self) -> Iterator[tuple[str, Path]]:
        for part in _VARIABLES.values():
            for where, _, names in os.walk(self.folder / part):
                for name in names:
                    path = Path(where) / name
                    if path.is_file() and not path.is_symlink() and not name.endswith(".lock"):
                        yield path.relative_to(self.folder).as_posix(), path

    def _put(self, source: Path, copy: Path) -> list[Any]:
        data = source.read_bytes()
        if source.name.startswith("__grp__"):
            data = data.replace(os.fsencode(self.folder), _PLACE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
        return [len(data), hashlib.sha256(data).hexdigest()]

    def _fetch(self, entry: Path) -> str | None:
        """Copy an entry into the private folder; returns why it cannot be used."""
        try:
            if reason := distrust(entry):
                return reason
            record = json.loads((entry / _RECORD).read_bytes())
            if record["key"] != self._key:
                return "it was made under another key"
            for name, (size, digest) in record["files"].items():
                if ".." in PurePosixPath(name).parts or PurePosixPath(name).parts[0] not in _VARIABLES.values():
                    return f"it names a file outside its folder, {name}"
                data = (entry / _FILES / name).read_bytes()
                if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                    return f"{name} is not as it was written ({len(data)} of {size} bytes)"
                if PurePosixPath(name).name.startswith("__grp__"):
                    data = data.replace(_PLACE, os.fsencode(self.folder))
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(data)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return f"it cannot be read: {type(error).__name__}: {error}"
        return None

    def _marker(self, entry: Path) -> Path:
        return entry.with_name(f".trying-{entry.name}.{self.folder.name}")

    def _tried(self, entry: Path) -> str | None:
        """Whether a process of this machine died in its warm-up with this entry: a crash must not repeat for ever."""
        for marker in entry.parent.glob(f".trying-{entry.name}.*"):
            with suppress(OSError, ValueError):
                host, folder = json.loads(marker.read_text())
                if host == socket.gethostname() and not _alive(Path(folder)):
                    marker.unlink(missing_ok=True)
                    return "a process that was filled from it died in its warm-up"
        return None

    def _set_aside(self, entry: Path, reason: str) -> None:
        self.notes.append(f"{entry} was set aside: {reason}")
        with suppress(OSError):
            entry.rename(entry.with_name(f".refused-{entry.name}"))


def distrust(folder: Path) -> str | None:
    """Why code that lies in `folder` must not be loaded by this process, if there is a reason."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, this process to {os.getuid()}"
    if found.st_mode & 0o022:
        return f"others may write it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it"
    return None


def _alive(folder: Path) -> bool:
    """Whether the process that made a private folder still lives."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _sweep(private: Path) -> None:
    """Delete the private folders of processes that were killed."""
    for folder in private.glob("dflash-*"):
        if not _alive(folder):
            shutil.rmtree(folder, ignore_errors=True)
    _delete_old([*private.glob(".new-*")], time.time() - _DAY_S)


def _prune(published: Path) -> None:
    """Keep the entries used last, one that was set aside (to look at), and nothing that a killed process began."""
    for pattern, kept in (("[!.]*-*", KEPT), (".refused-*", 1)):
        found = sorted(published.glob(pattern), key=_changed, reverse=True)
        for entry in found[kept:]:
            gone = entry.with_name(f".gone-{uuid.uuid4().hex}{PARTIAL}")
            with suppress(OSError):  # another process prunes too
                entry.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
    _delete_old([*published.glob(".trying-*"), *published.glob(f".*{PARTIAL}")], time.time() - _DAY_S)


def _delete_old(paths: list[Path], before: float) -> None:
    for path in paths:
        if _changed(path) < before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
