"""`dflash status` and `dflash query`: read-only views of what is on disk."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import click

from shared.progress import tell

ROOTS = click.argument("roots", nargs=-1, type=click.Path(path_type=Path))


@click.command()
@ROOTS
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def status(roots: tuple[Path, ...], as_json: bool) -> None:
    """Show every store and run at or below ROOTS (default: runs).

    \b
    dflash status
    dflash status runs/x.zarr --json
    """
    from manifests.query import require_folders
    from manifests.status import statuses

    require_folders(roots)
    folders = roots or (Path("runs"),)
    rows = statuses(folders)
    if as_json:
        tell(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    if not rows:
        tell(f"nothing has run in {', '.join(map(str, folders))} yet")
    for row in rows:
        tell(f"{row.folder}  [{row.kind}]  {row.command} {row.state}{': ' + row.message if row.message else ''}")
        for name, value in row.holds.items():
            tell(f"    {name}: {_plain(value)}")


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--in",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder holding runs and stores; may be repeated.  [default: runs]",
)
@click.option("--json", "form", flag_value="json", help="JSON array of objects.")
@click.option("--csv", "form", flag_value="csv", help="Comma-separated values with a header.")
def query(sql: str | None, roots: tuple[Path, ...], form: str | None) -> None:
    """Run one read-only SQL statement over the manifests; without SQL, list the tables and named queries.

    \b
    dflash query "SELECT * FROM acceptance"
    dflash query "SELECT reason, count(*) FROM skips GROUP BY 1" --json
    """
    from manifests.query import named_queries, require_folders, run_sql
    from manifests.records import KINDS, columns_of

    if not sql:
        for kind in KINDS:
            tell(f"{kind}({', '.join(columns_of(kind))})")
        for name, text in named_queries().items():
            tell(f"{name}: {text.splitlines()[0].removeprefix('-- ')}")
        return
    folders = roots or (Path("runs"),)
    require_folders(folders)
    if sql.strip() in {*KINDS, *named_queries()}:
        sql = f"SELECT * FROM {sql.strip()}"
    names, rows = run_sql(folders, sql)
    tell(render(names, rows, form).removesuffix("\n"))


def render(names: list[str], rows: list[tuple[Any, ...]], form: str | None) -> str:
    """Rows as an aligned table, JSON objects or CSV."""
    if form == "json":
        return json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2, default=str) + "\n"
    if form == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([names, *rows])
        return buffer.getvalue()
    cells = [names, *[[_plain(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, f"({len(rows)} row{'' if len(rows) == 1 else 's'})", ""])


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"
