"""One read-only DuckDB connection over the manifests of all run folders below some roots.

Records are loaded into memory, then the connection is locked: user SQL can neither write, nor load extensions,
nor read files. A convenience barrier for careful people, as DuckDB's own security page says, not a tenant wall.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from manifests.commit import files_of
from manifests.records import KINDS, columns_of
from shared.errors import ConfigRefused, DataMissing
from shared.progress import say


def run_folders(roots: Iterable[Path]) -> list[Path]:
    """Every folder at or below the roots that has a manifest; stores and runs alike. Missing roots give nothing."""
    found: set[Path] = set()
    for root in roots:
        if os.path.isdir(root):  # noqa: PTH112 - False, not an error, where we may not look
            found.update(_walk(root, depth=4))
    return sorted(found)


def _walk(folder: Path, depth: int) -> list[Path]:
    if os.path.isdir(folder / "manifest"):  # noqa: PTH112 - as above
        nested = [] if folder.suffix == ".zarr" else _below(folder, depth)
        return [folder, *nested]
    return _below(folder, depth)


def _below(folder: Path, depth: int) -> list[Path]:
    # `blocks` holds arrays only and may have millions of entries: never walked.
    skip = {"blocks", "manifest", "checkpoints", "logs", "target"}
    if depth == 0:
        return []
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        say(f"passed over {folder}: {error.strerror}")
        return []
    children = [entry for entry in entries if entry.name not in skip and not entry.name.startswith(".")]
    folders = [Path(entry.path) for entry in children if entry.is_dir(follow_symlinks=False)]
    return [found for child in folders for found in _walk(child, depth - 1)]


def connect(roots: Sequence[Path]) -> Any:
    """An in-memory connection with one table per kind (see manifests/records.py), filled and locked."""
    import duckdb

    connection = duckdb.connect(
        ":memory:", config={"autoload_known_extensions": False, "autoinstall_known_extensions": False}
    )
    folders = run_folders(roots)
    for kind in KINDS:
        _load(connection, kind, folders)
    for name, statement in named_queries().items():
        connection.execute(f'CREATE VIEW "{name}" AS {statement}')
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _load(connection: Any, kind: str, folders: Sequence[Path]) -> None:
    columns = columns_of(kind)
    definition = ", ".join(f'"{name}" {sql}' for name, sql in columns.items())
    connection.execute(f"CREATE TABLE {kind} ({definition})")
    fields = ", ".join(_field(name, sql) for name, sql in columns.items() if name != "folder")
    for folder in folders:
        for path in files_of(folder, kind):
            if not os.access(path, os.R_OK):
                say(f"passed over {path}: no permission to read it")
                continue
            # Lines first, JSON second: a torn last line must cost that line, not the query.
            connection.execute(
                f"INSERT INTO {kind} SELECT ?, {fields} FROM read_csv(?, {_LINES}) "
                "WHERE json_valid(line) AND json_type(line) = 'OBJECT'",
                [str(folder), _literal(path)],
            )


# Each line is one text: \x01 never occurs in JSON, so nothing is split, quoted or guessed.
_LINES = (
    "columns = {'line': 'VARCHAR'}, header = false, delim = '\x01', quote = '', escape = '', auto_detect = false, "
    "new_line = '\\n', max_line_size = 16777216"
)


def _literal(path: Path) -> str:
    # A path with glob characters is read literally: `[` opens a set in DuckDB's globs, as in fnmatch.
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path))


def _field(name: str, sql: str) -> str:
    if sql == "JSON":
        return f"line -> '$.{name}'"
    return f"CAST(line ->> '$.{name}' AS {sql})"


def named_queries() -> dict[str, str]:
    """The documented queries of manifests/queries, by name; each is also a view of that name."""
    folder = resources.files("manifests") / "queries"
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".sql")), key=lambda item: item.name)
    return {item.name.removesuffix(".sql"): item.read_text(encoding="utf-8").strip().rstrip(";") for item in found}


def run_sql(roots: Sequence[Path], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one statement. Raises ConfigRefused with DuckDB's own sentence for bad or barred SQL."""
    import duckdb

    connection = connect(roots)
    try:
        _require_reading(connection, sql)
        cursor = connection.execute(sql)
        return [item[0] for item in cursor.description or []], cursor.fetchall()
    except duckdb.Error as error:
        raise ConfigRefused(f"the query was refused: {str(error).splitlines()[0]}") from error
    finally:
        connection.close()


def _require_reading(connection: Any, sql: str) -> None:
    kinds = [str(statement.type).rpartition(".")[2] for statement in connection.extract_statements(sql)]
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
        raise ConfigRefused(
            f"the query was refused: one SELECT is allowed, not {kinds or 'nothing'}; manifests are read-only"
        )


def require_folders(roots: Sequence[Path]) -> None:
    """Say so when a given root does not exist at all, instead of showing an empty table."""
    missing = [str(root) for root in roots if not root.exists()]
    if missing:
        raise DataMissing(f"no such folder: {', '.join(missing)}; pass the folder that holds your runs and stores")
