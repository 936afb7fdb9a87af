"""One read-only DuckDB connection over the manifests of all run folders below some roots.

Records are loaded into memory (manifests/tables.py), then the connection is locked: user SQL can neither write, nor
load extensions, nor read files. A convenience barrier for careful people, as DuckDB's own security page says, not a
tenant wall.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from manifests import tables
from manifests.folders import run_folders
from manifests.records import KINDS, columns_of
from shared.errors import ConfigRefused


def connect(roots: Sequence[Path], sql: str) -> Any:
    """A locked in-memory connection with a table per kind, a view per named query, and the records that `sql` needs.

    All tables exist, also those that stay empty: a query of the runs must not parse a million documents. Raises
    ConfigRefused unless `sql` is one SELECT.
    """
    import duckdb

    # Without extensions a statement reaches no other machine.
    closed: dict[str, Any] = {"autoload_known_extensions": False, "autoinstall_known_extensions": False}
    connection = duckdb.connect(":memory:", config=closed)
    _require_reading(connection, sql)
    uses = {name: _tables_of(connection, text) for name, text in named_queries().items()}
    wanted = _closure(_tables_of(connection, sql), uses)
    folders = run_folders(roots)
    for kind in KINDS:
        tables.create(connection, kind, columns_of(kind))
        if kind in wanted:
            tables.load(connection, kind, folders)
    tables.create(connection, "folders", tables.FOLDERS)
    if "folders" in wanted:
        tables.load_folders(connection, folders)
    for name in _in_order(uses):
        connection.execute(f'CREATE VIEW "{name}" AS {named_queries()[name]}')
    for option, value in _LOCKS.items():
        connection.execute(f"SET {option} = {value}")
    # Writing inside a SELECT (`WITH x AS (DELETE ...)`, DuckDB 2) stops here.
    connection.execute("BEGIN TRANSACTION READ ONLY")
    return connection


_LOCKS = {
    "temp_directory": "''",  # what does not fit in memory is an error, not a file in the working folder
    "python_enable_replacements": "false",
    "enable_external_access": "false",
    "lock_configuration": "true",
}


def _require_reading(connection: Any, sql: str) -> None:
    """Raise ConfigRefused unless the text is one SELECT (FROM, VALUES, SHOW and DESCRIBE are of its kind)."""
    try:
        kinds = [str(statement.type).rpartition(".")[2] for statement in connection.extract_statements(sql)]
    except ValueError:  # a statement so new that DuckDB's Python side has no name for it
        kinds = ["another"]
    if kinds != ["SELECT"]:
        raise ConfigRefused(
            f"the query was refused: one SELECT is allowed, not {' and '.join(kinds) or 'nothing'}; "
            "manifests are read-only"
        )


def _tables_of(connection: Any, sql: str) -> set[str]:
    """Names in the places of tables, by DuckDB's own parser; every kind where names may be computed or hidden."""
    (text,) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchone()
    tree = json.loads(text)
    found = {value.lower() for key, value in _strings(tree) if key == "table_name"}
    called = {value.lower() for key, value in _strings(tree) if key == "function_name"}
    return set(KINDS) | {"folders"} if tree.get("error") or called & _BY_NAME else found


# Functions that take a table's name, or a whole query, as a value.
_BY_NAME = {"query", "query_table", "json_execute_serialized_sql"}


def _strings(tree: Any) -> Iterator[tuple[str, str]]:
    for key, value in tree.items() if isinstance(tree, dict) else (("", item) for item in tree):
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict | list):
            yield from _strings(value)


def _closure(names: set[str], uses: Mapping[str, set[str]]) -> set[str]:
    """`names` and all that they use, at any depth."""
    more = names.union(*(uses.get(name, set()) for name in names))
    return names if more == names else _closure(more, uses)


def _in_order(uses: Mapping[str, set[str]]) -> list[str]:
    """Named queries, each after those that it uses."""
    ordered: list[str] = []
    while len(ordered) < len(uses):
        ready = [name for name in uses if name not in ordered and not (uses[name] & uses.keys()) - set(ordered)]
        assert ready, f"named queries use each other in a circle: {uses}"
        ordered += ready
    return ordered


@cache
def named_queries() -> dict[str, str]:
    """The documented queries of manifests/queries, by name; each is also a view of that name."""
    folder = resources.files("manifests") / "queries"
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".sql")), key=lambda item: item.name)
    return {item.name.removesuffix(".sql"): item.read_text(encoding="utf-8").strip().rstrip(";") for item in found}


@dataclass(frozen=True)
class Answer:
    """Column names, their DuckDB types, and rows."""

    names: list[str]
    types: list[str]
    rows: list[tuple[Any, ...]]


def ask(roots: Sequence[Path], sql: str) -> Answer:
    """The answer to one SELECT. Raises ConfigRefused with DuckDB's own sentence for bad or barred SQL."""
    import duckdb

    try:
        with connect(roots, sql) as connection:
            cursor = connection.execute(sql)
            names, types = zip(*((item[0], str(item[1])) for item in cursor.description), strict=True)
            return Answer(list(names), list(types), cursor.fetchall())
    except duckdb.Error as error:
        raise ConfigRefused(f"the query was refused: {str(error).splitlines()[0]}") from error
