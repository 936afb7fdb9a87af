"""The plan as tables and lines for people: both precisions side by side, the disk, the verdict.

Called by stage1_extract/plan_report.py with the same dict that --json prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.store_layout import ARRAYS
from stage1_extract.disk_room import readable_bytes

Figures = dict[str, Any]


def render(report: dict[str, Any]) -> str:
    """All of the report as text, fitted to the terminal, or 120 columns wide elsewhere."""
    from rich.console import Console

    console = Console() if Console().is_terminal else Console(width=120)
    precisions: dict[str, Figures] = report["precisions"]
    with console.capture() as captured:
        console.print(_size_table(precisions, report["precision"]))
        console.print(_work_table(precisions, report))
    return "\n".join([captured.get().rstrip("\n"), *_lines(report)])


def _size_table(precisions: dict[str, Figures], asked: str) -> Any:
    from rich.table import Column, Table

    titles = [
        Column(f"{precision}{' (asked)' if precision == asked else ''}\n{what}", justify="right")
        for precision in precisions
        for what in ("bytes a token", "total")
    ]
    table = Table("array", *titles)
    for name in [name for name in ARRAYS if any(name in figures["arrays"] for figures in precisions.values())]:
        cells: list[str] = []
        for figures in precisions.values():
            part = figures["arrays"].get(name)
            cells += ["", ""] if part is None else [_per_token(part["bytes_per_token"]), readable_bytes(part["bytes"])]
        table.add_row(name, *cells)
    table.add_section()
    for title, key in (
        ("Zarr metadata, seals", "metadata_bytes"),
        ("target/ (head, tokenizer)", "target_bytes"),
        ("records, index (about)", "records_bytes"),
    ):
        table.add_row(title, *(cell for figures in precisions.values() for cell in ("", readable_bytes(figures[key]))))
    table.add_section()
    table.add_row(
        "[bold]store",
        *(
            f"[bold]{cell}"
            for figures in precisions.values()
            for cell in (_per_token(figures["bytes_per_token"]), readable_bytes(figures["bytes"]))
        ),
    )
    return table


def _work_table(precisions: dict[str, Figures], report: dict[str, Any]) -> Any:
    from rich.table import Column, Table

    epochs = report["epochs"]
    table = Table("", *(Column(precision, justify="right") for precision in precisions))

    def row(title: str, value: Callable[[Figures], str]) -> None:
        table.add_row(title, *(value(figures) for figures in precisions.values()))

    row("files", lambda f: f"{f['files']:,}")
    row("inodes (files and folders)", lambda f: f"{f['inodes']:,}")
    row("disk must write", lambda f: f"{f['write_gbps_needed']:.3g} GB/s")
    row("hours to extract", _extract_hours)
    row("hours to read an epoch", lambda f: _number(f["read_hours_per_epoch"]))
    row("TB x hours held", lambda f: _number(f["terabyte_hours"]))
    passes = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    row(f"hours, {passes}: store", lambda f: _number((f["hours"] or {}).get("store")))
    row(f"hours, {passes}: recompute", lambda f: readable_number(f["recompute_hours"]))
    row("store cheaper in hours", lambda f: _since(f["hours"]))
    if any(figures["money"] for figures in precisions.values()):
        row(f"money, {passes}: store", lambda f: _number(f["money"]["store"]))
        row(f"money, {passes}: recompute", lambda f: _number(f["money"]["recompute"]))
        row("store cheaper in money", lambda f: _since(f["money"]))
    row("store pays if disk gives", lambda f: _faster(f["disk_gbps_needed_to_pay"]))
    return table


def _lines(report: dict[str, Any]) -> Sequence[str]:
    rate, disk, room = report["tokens_per_second"], report["disk_gbps"], report["room"]
    left = f", {report['blocks_left']:,} still to write" if report["blocks_left"] != report["blocks"] else ""
    speed = f"{disk['value']:.3g} GB/s" if disk["value"] is not None else ""
    pairs = [
        ("rows", f"{report['tokens']:,} tokens in {report['documents']:,} documents"),
        ("blocks", f"{report['blocks']:,}{left}"),
        ("target layers", ",".join(map(str, report["target_layer_ids"])) + f"; top-k {report['topk']}"),
        ("target", f"{rate['per_process']:,.0f} tokens/s x {_processes(report['shards'])} ({rate['source']})"),
        ("disk", f"{speed} ({disk['source']})" if speed else disk["source"]),
    ]
    if room is not None:
        inodes = "no limit of" if room["free_inodes"] is None else f"{room['free_inodes']:,} free"
        pairs.append(
            (
                report["out"],
                f"{'fits' if room['fits'] else 'does not fit'}: needs {readable_bytes(room['needed_bytes'])} and "
                f"{room['needed_inodes']:,} inodes; {readable_bytes(room['free_bytes'])} free, {inodes} inodes",
            )
        )
    width = max(len(name) for name, _ in pairs)
    return [*(f"{name.ljust(width)}  {value}" for name, value in pairs), "", report["verdict"]]


def readable_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _per_token(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else readable_number(value)


def _extract_hours(figures: Figures) -> str:
    hours = figures["extract_hours"]
    if hours is None:
        return f"{readable_number(figures['compute_hours'])} or more"
    return f"{readable_number(hours)}{' (disk-bound)' if hours > figures['compute_hours'] else ''}"


def _since(costs: dict[str, Any] | None) -> str:
    if costs is None:
        return "unknown"
    since = costs["cheaper_from_epochs"]
    return "never" if since is None else f"from {since} epoch{'' if since == 1 else 's'} on"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _faster(gbps: float | None) -> str:
    return "no rate suffices" if gbps is None else f"> {gbps:.3g} GB/s"
