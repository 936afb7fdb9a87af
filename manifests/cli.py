"""`dflash status` and `dflash query`: read-only views of what is on disk."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.plain_text import plain
from shared.errors import ConfigRefused
from shared.progress import tell

if TYPE_CHECKING:
    from manifests.query import Answer

ROOTS = click.argument("roots", nargs=-1, type=click.Path(path_type=Path))


@click.command()
@ROOTS
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout; README.md lists its keys.")
def status(roots: tuple[Path, ...], as_json: bool) -> None:
    """Show every store and run at or below ROOTS (default: runs): what it does, or how it ended.

    Exit code 0 says that it could look, not that all is well. A run that nobody ended and no process works on is
    "lost", with its cause; `dflash why RUN` tells the rest.

    \b
    dflash status
    dflash status runs/x-train
    dflash status runs/x.zarr --json
    """
    from manifests.folders import require_folders
    from manifests.status import statuses
    from manifests.status_text import lines_of

    require_folders(roots)
    folders = roots or (Path("runs"),)
    rows = statuses(folders)
    if as_json:
        tell(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    if not rows:
        tell(f"nothing has run in {', '.join(map(str, folders))} yet")
    for row in rows:
        tell("\n".join(lines_of(row)))


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--in",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder holding runs and stores; may be repeated.  [default: runs]",
)
@click.option("--json", "as_json", is_flag=True, help="JSON array of objects.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values with a header.")
def query(sql: str | None, roots: tuple[Path, ...], as_json: bool, as_csv: bool) -> None:
    """Run one read-only SQL statement over the manifests, or a table or named query by its name; alone, list both.

    \b
    dflash query acceptance
    dflash query "SELECT * FROM acceptance WHERE name = 'gsm8k'"
    dflash query "SELECT reason, count(*) FROM skips GROUP BY 1" --json
    """
    from manifests.folders import require_folders
    from manifests.query import ask, named_queries
    from manifests.records import KINDS, columns_of
    from manifests.tables import FOLDERS

    if not sql:
        for kind in KINDS:
            tell(f"{kind}({', '.join(columns_of(kind))})")
        tell(f"folders({', '.join(FOLDERS)})")
        for name, text in named_queries().items():
            tell(f"{name}: {text.splitlines()[0].removeprefix('-- ')}")
        return
    if as_json and as_csv:
        raise ConfigRefused("--json and --csv exclude each other; give one of them")
    form = "json" if as_json else "csv" if as_csv else None
    folders = roots or (Path("runs"),)
    require_folders(folders)
    if sql.strip() in {*KINDS, "folders", *named_queries()}:
        sql = f"SELECT * FROM {sql.strip()}"
    elif sql.strip().isidentifier():
        raise ConfigRefused(
            f"the query was refused: no table or named query is {sql.strip()}; `dflash query` lists them"
        )
    tell(render(ask(folders, sql), form).removesuffix("\n"))


def render(answer: Answer, form: str | None) -> str:
    """An answer as an aligned table, JSON objects or CSV."""
    names, rows = answer.names, answer.rows
    if form == "json":
        readers = [_from_json if kind == "JSON" else _for_json for kind in answer.types]
        objects = [{name: read(value) for name, read, value in zip(names, readers, row, strict=True)} for row in rows]
        return json.dumps(objects, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if form == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([names, *rows])
        return buffer.getvalue()
    cells = [[plain(value) for value in row] for row in (names, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, f"({len(rows)} row{'' if len(rows) == 1 else 's'})", ""])


def _from_json(value: Any) -> Any:
    return None if value is None else json.loads(value)


def _for_json(value: Any) -> Any:
    """A DuckDB value as JSON knows it: dates and decimals as text, NaN and infinity as null."""
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
