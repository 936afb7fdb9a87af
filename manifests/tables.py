"""Load record kinds into DuckDB tables: only lines that fit their checksums, from all folders, in bounded memory.

Called by manifests/query.py, before it locks the connection. Python checks the lines, DuckDB parses them from an
unnamed file in memory, which works on a full disk too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manifests.commit import files_of
from manifests.folders import kind_of_folder, planned_or_none
from manifests.lines import Damage, scan
from manifests.records import columns_of
from shared.progress import say

# Lines parsed by one statement; DuckDB's own default limit for one record, below which it reads with all threads.
_STATEMENT_BYTES = 256 << 20
_RECORD_BYTES = 16 << 20
_SHOWN_DAMAGE = 3
FOLDERS = {"folder": "VARCHAR", "kind": "VARCHAR", "planned_blocks": "BIGINT"}


def create(connection: Any, table: str, columns: dict[str, str]) -> None:
    """An empty table."""
    definition = ", ".join(f'"{name}" {sql}' for name, sql in columns.items())
    connection.execute(f"CREATE TABLE {table} ({definition})")


def load_folders(connection: Any, folders: Sequence[Path]) -> None:
    """What each folder is: store, rows or run, and how many blocks a store is to have."""
    for folder in folders:
        row = [_text(folder), kind_of_folder(folder), planned_or_none(folder)]
        connection.execute("INSERT INTO folders VALUES (?, ?, ?)", row)


def load(connection: Any, kind: str, folders: Sequence[Path]) -> None:
    """Fill the table of a kind. Unreadable files and damaged lines are passed over and said on stderr."""
    with _InMemory() as file:
        for number, folder in enumerate(folders):
            for path in files_of(folder, kind):
                for lines in _good_lines(path):
                    file.add(number, lines)
                    if file.size >= _STATEMENT_BYTES:
                        _insert(connection, kind, folders, file)
        _insert(connection, kind, folders, file)


def _insert(connection: Any, kind: str, folders: Sequence[Path], file: _InMemory) -> None:
    if file.size == 0:
        return
    columns = columns_of(kind) | {"folder": "BIGINT"}
    spec = ", ".join(f"'{name}': '{sql}'" for name, sql in columns.items())
    listing = ", ".join(f'"{name}"' for name in columns if name != "folder")
    connection.execute(
        f"INSERT INTO {kind} SELECT list_extract(?::VARCHAR[], folder + 1), {listing} FROM read_json(?, "
        "format = 'newline_delimited', compression = 'uncompressed', "
        f"maximum_object_size = {max(_RECORD_BYTES, 2 * file.longest)}, columns = {{{spec}}})",
        [[_text(folder) for folder in folders], file.path],
    )
    file.clear()


class _InMemory:
    """Lines, each with the number of its folder in front, in a file that only this process sees and no disk holds."""

    def __enter__(self) -> _InMemory:
        self._descriptor = os.memfd_create("dflash-records")
        self.path = f"/proc/self/fd/{self._descriptor}"
        self.size = self.longest = 0
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, folder: int, lines: list[bytes]) -> None:
        """Append the lines of one folder."""
        head = b'{"folder":%d,' % folder
        rest = memoryview(head + (b"\n" + head).join([line[1:] for line in lines]) + b"\n")
        self.size += len(rest)
        self.longest = max(self.longest, *map(len, lines))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def clear(self) -> None:
        """Begin anew."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.size = self.longest = 0


def _good_lines(path: Path) -> Iterator[list[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        say(f"passed over {path}: {error.strerror}")
        return
    damaged: list[Damage] = []
    with file:
        for lines, bad in scan(file):
            damaged += bad
            if lines:
                yield lines
    for number, reason in damaged[:_SHOWN_DAMAGE]:
        say(f"passed over line {number} of {path}: {reason}")
    if len(damaged) > _SHOWN_DAMAGE:
        say(f"passed over {len(damaged) - _SHOWN_DAMAGE} more damaged lines of {path}")


def _text(folder: Path) -> str:
    """A folder's name as text; bytes that are no text show as "?"."""
    return str(folder).encode(errors="replace").decode()
