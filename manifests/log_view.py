"""The logs of a run as lines a terminal can take: tails of files of any size, and what is appended while one looks.

Logs hold whatever workers printed: progress bars, colours, bytes that are no text, lines of megabytes. Used by `dflash
logs` (cli_runs.py) and `dflash status` (status.py). Nothing is written, nothing locked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manifests.commit import read
from manifests.evidence import JUDGED
from manifests.plain_text import plain_log_line
from manifests.runs import launcher_processes, without_refused
from shared.errors import ConfigRefused, DataMissing

# The tail of a file is looked for in its last bytes only.
TAIL_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
_NAME = re.compile(r"(?P<role>.+)-(?P<rank>\d+|supervisor|summary)\.(?:log|txt|fault)")
_STACKS = re.compile(r"attempt-(?P<attempt>\d+)-rank-(?P<rank>\d+)\.txt")


@dataclass(frozen=True)
class LogFile:
    """One file that a run wrote: `rank` is a number as text, "supervisor" or "summary"."""

    path: Path
    rank: str


def logs_of(run_dir: Path, rank: str | None = None, *, stacks: bool = False) -> list[LogFile]:
    """The logs of all ranks in their order, or those of one; with `stacks` the saved stacks instead.

    Raises DataMissing for a folder without logs, ConfigRefused for a rank that has none.
    """
    found = _stack_files(run_dir) if stacks else _log_files(run_dir)
    if not found:
        raise DataMissing(f"{run_dir} holds {_why_none(run_dir, stacks)}")
    if rank is None:
        return [log for log in found if log.rank.isdigit()] or found
    if chosen := [log for log in found if log.rank == rank]:
        return chosen
    names = sorted({log.rank for log in found}, key=_in_order)
    raise ConfigRefused(f"{run_dir} has no {'stacks' if stacks else 'log'} of rank {rank}; it has {', '.join(names)}")


def _why_none(run_dir: Path, stacks: bool) -> str:
    says = f"`dflash status {run_dir}` says what it is"
    if stacks:
        return f"no stacks: no worker hung or crashed; {says}"
    ours = without_refused([record for record in read(run_dir, "runs") if record["command"] in JUDGED])
    started = [record for record in ours if record["state"] == "started"]
    if started and (processes := launcher_processes(started[-1])) is not None:
        return (
            f"no logs: torchrun or Slurm started its {processes} processes and kept what they printed; look at the "
            f"terminal, in its --log-dir or slurm-*.out; `dflash why {run_dir}` says how the run ended"
        )
    return f"no logs: nothing was started there by `dflash train` or `dflash extract`; {says}"


def _log_files(run_dir: Path) -> list[LogFile]:
    named = [(path, _NAME.fullmatch(path.name)) for path in (run_dir / "logs").glob("*") if path.suffix != ".fault"]
    logs = [LogFile(path, found["rank"]) for path, found in named if found]
    return sorted(logs, key=lambda log: (_in_order(log.rank), log.path.name))


def _stack_files(run_dir: Path) -> list[LogFile]:
    """What a crash left in the fault files, and what was saved before a hung rank was killed; oldest first."""
    faults = [(path, _NAME.fullmatch(path.name)) for path in (run_dir / "logs").glob("*.fault") if _size(path)]
    saved = [(path, _STACKS.fullmatch(path.name)) for path in (run_dir / "supervision" / "stacks").glob("*.txt")]
    logs = [LogFile(path, found["rank"]) for path, found in [*faults, *saved] if found]
    return sorted(logs, key=lambda log: (_in_order(log.rank), _modified(log.path)))


def _in_order(rank: str) -> tuple[int, str]:
    return (int(rank), "") if rank.isdigit() else (1 << 30, rank)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, at most those within its last 4 MiB; raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return readable(_last_bytes(file.fileno(), file.seek(0, os.SEEK_END), lines))[-lines:] if lines > 0 else []


def _last_bytes(descriptor: int, end: int, lines: int) -> bytes:
    """Bytes up to `end` that hold the last lines, read in growing steps: most tails lie in the last 16 KiB."""
    step = 1 << 14
    while True:
        begin = max(0, end - step)
        data = os.pread(descriptor, end - begin, begin)
        if begin == 0 or step >= TAIL_BYTES or data.count(b"\n") > lines:
            return data
        step *= 4


def readable(data: bytes) -> list[str]:
    """The lines of a log's bytes as text that cannot drive a terminal: of a redrawn line the last state, no colours."""
    return (
        [plain_log_line(line) for line in data.decode(errors="replace").removesuffix("\n").split("\n")] if data else []
    )


class Follower:
    """What is appended to some files since the last look; also when a file is cut to nothing or replaced."""

    def __init__(self) -> None:
        self._places: dict[Path, _Place] = {}

    @property
    def paths(self) -> list[Path]:
        """The files that are followed."""
        return list(self._places)

    def begin(self, path: Path, lines: int) -> list[str]:
        """Follow a file from now on; returns its last whole lines. Raises OSError when it cannot be read."""
        self._places[path] = _Place()
        return self._places[path].last_lines(path, lines)

    def add(self, paths: Sequence[Path]) -> None:
        """Follow these too, from their beginning: a rank that was started meanwhile."""
        for path in paths:
            self._places.setdefault(path, _Place())

    def new_lines(self, *, ended: bool = False) -> list[tuple[Path, list[str]]]:
        """(file, whole lines) of every file that gained some; with `ended` also a last line without a newline."""
        gained = [(path, place.read(path, ended=ended)) for path, place in self._places.items()]
        return [(path, lines) for path, lines in gained if lines]


@dataclass
class _Place:
    """How far one file was read, and the beginning of a line whose end is not there yet."""

    offset: int = 0
    inode: int | None = None
    rest: bytes = b""

    def last_lines(self, path: Path, lines: int) -> list[str]:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            data = _last_bytes(file.fileno(), stat.st_size, lines)
        self.offset, self.inode = stat.st_size, stat.st_ino
        whole, newline, self.rest = data.rpartition(b"\n")
        return readable(whole + newline)[-lines:] if lines > 0 else []

    def read(self, path: Path, *, ended: bool) -> list[str]:
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size < self.offset or self.inode not in (None, stat.st_ino):
                    self.offset, self.rest = 0, b""
                self.inode = stat.st_ino
                data = self.rest
                while piece := os.pread(file.fileno(), PIECE_BYTES, self.offset):
                    self.offset += len(piece)
                    data += piece
                    if not ended and len(data) > TAIL_BYTES:  # the others must have their turn
                        break
        except FileNotFoundError:  # whatever has this name next is another file, its inode may be the same
            self.offset, self.rest = 0, b""
            return []
        except OSError:  # a shared disk that does not answer: the next look tells
            return []
        whole, newline, self.rest = data.rpartition(b"\n")
        if ended or len(self.rest) > PIECE_BYTES:
            whole, newline, self.rest = data, b"", b""
        return readable(whole + newline)
