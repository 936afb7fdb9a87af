"""What a disk may hold after the power went: only what fsync promised, from the log of a trial's calls.

Used by tests/test_stage1_power_loss.py. POSIX promises a file's bytes after fsync of the file, and a name after fsync
of its folder; anything else may be there, be missing, or be older, each on its own.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fault_calls import Event

Mode = Literal["nothing unsynced", "names without bytes", "a mixture"]
Names = dict[str, int]


@dataclass
class Disk:
    """What is durable below one folder. Files and folders have numbers of their own: a disk uses inodes again."""

    root: Path
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, Names] = field(default_factory=dict)
    is_folder: dict[int, bool] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    @classmethod
    def at_rest(cls, root: Path) -> Disk:
        """Everything that is there now, durable."""
        disk = cls(root)
        disk._rest(root)
        return disk

    def _rest(self, path: Path) -> int:
        number = self._number(path.stat().st_ino)
        self.is_folder[number] = path.is_dir()
        if path.is_dir():
            self.folders[number] = {entry.name: self._rest(entry) for entry in path.iterdir()}
        else:
            self.files[number] = path.read_bytes()
        return number

    def _number(self, inode: int) -> int:
        if inode not in self._numbers:
            self._next += 1
            self._numbers[inode] = self._next
        return self._numbers[inode]

    def follow(self, events: Sequence[Event]) -> None:
        """Take over what the calls of a run made durable."""
        for event in events:
            if event.kind in ("create", "mkdir"):
                self._numbers.pop(event.inode, None)
                self.is_folder[self._number(event.inode)] = event.kind == "mkdir"
            elif event.kind == "gone":
                self._numbers.pop(event.inode, None)
            elif event.kind == "fsync" and isinstance(event.state, dict):
                number = self._number(event.inode)
                self.is_folder[number] = True
                self.folders[number] = {name: self._number(inode) for name, inode in event.state.items()}
            elif event.kind == "fsync":
                self.files[self._number(event.inode)] = event.state

    def lose_power(self, mode: Mode, rng: random.Random) -> None:
        """Turn what lies below the root into what may be left of it."""
        new = self.root.with_name(f"{self.root.name}-after")
        self._write(new, self._number(self.root.stat().st_ino), self.root, mode, rng)
        shutil.rmtree(self.root)
        new.rename(self.root)

    def _write(self, to: Path, number: int, now: Path | None, mode: Mode, rng: random.Random) -> None:
        """`now`: where the same file or folder lies on the running system, None when it is only on the disk."""
        if self.is_folder.get(number, now is not None and now.is_dir()):
            to.mkdir()
            durable = self.folders.get(number, {})
            living = {} if now is None else {entry.name: entry for entry in now.iterdir()}
            for name in sorted({*durable, *living}):
                kept = self._keeps_living(name, durable, living, mode, rng)
                if kept and name in living:
                    self._write(to / name, self._number(living[name].stat().st_ino), living[name], mode, rng)
                elif not kept and name in durable:
                    self._write(to / name, durable[name], self._find(durable[name], living), mode, rng)
        else:
            to.write_bytes(self._bytes(number, now, mode, rng))

    def _find(self, number: int, living: dict[str, Path]) -> Path | None:
        """Where a thing lies now that has another name on the disk: renamed within its folder."""
        for path in living.values():
            if self._numbers.get(path.stat().st_ino) == number:
                return path
        return None

    @staticmethod
    def _keeps_living(name: str, durable: Names, living: dict[str, Path], mode: Mode, rng: random.Random) -> bool:
        return mode == "names without bytes" or (mode == "a mixture" and rng.random() < 0.5)

    def _bytes(self, number: int, now: Path | None, mode: Mode, rng: random.Random) -> bytes:
        durable = self.files.get(number, b"")
        if mode != "a mixture" or now is None:
            return durable
        living = now.read_bytes()
        if not living.startswith(durable):
            return rng.choice([durable, living])
        tail = living[len(durable) :]
        # Written and not fsynced: any part of it, or the length alone.
        return durable + rng.choice([b"", tail[: len(tail) // 2], bytes(len(tail)), tail])
