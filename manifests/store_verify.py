"""`dflash store verify`: is every byte of a store the one that was recorded, and is everything there.

The command and its report; what is checked is in store_verification.py, what `--repair` does in store_repair.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from manifests.store_findings import Checked, Finding, VerifyOptions, joined
from shared.errors import ConfigRefused, StoreDamaged, StoreIncomplete
from shared.progress import duration, summary, tell

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@click.command()
@click.argument("store")
@click.option("--sample", type=click.IntRange(min=1), help="Check this many documents drawn at random, not all blocks.")
@click.option("--since", help="Only blocks recorded since: 36h, 7d, or 2026-11-03T08:00 (local time).")
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks checked at a time.")
@click.option("--repair", is_flag=True, help="Set what is damaged aside and say which command makes it again.")
@click.option(
    "--engine",
    type=click.Choice(["direct", "zarr"]),
    default="direct",
    show_default=True,
    help="zarr: also read everything through zarr-python and compare (slow).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def verify(store: str, sample: int | None, since: str | None, repair: bool, as_json: bool, **options: Any) -> None:
    """Check every byte of STORE (a folder, or s3://bucket/prefix) against its records.

    Each damage is one line: block, array, rows, documents, file, reason. Exit code 0: whole; 32: damaged; 33: only
    incomplete, also after --repair. Damaged blocks that --repair sets aside go to STORE/quarantine; nothing is deleted.

    \b
    dflash store verify runs/x.zarr
    dflash store verify runs/x.zarr --since 24h --threads 8
    dflash store verify runs/x.zarr --repair
    """
    if sample is not None and since is not None:
        raise ConfigRefused(f"--sample {sample} and --since {since} exclude each other; give one of them")
    if repair and (sample is not None or options["engine"] == "zarr"):
        raise ConfigRefused("--repair checks every byte itself; leave out --sample and --engine zarr")
    chosen = VerifyOptions(sample=sample, since=None if since is None else parse_since(since), **options)
    if repair:
        from manifests.store_repair import repair_store

        repair_store(store, chosen, as_json=as_json)
        return
    from manifests.store_verification import check_store

    checked = check_store(store, chosen)
    report(store, checked, as_json=as_json)
    conclude(store, checked.findings)


def parse_since(text: str) -> float:
    """Seconds since 1970 of "36h", "7d", an ISO date and time, or such a number itself. Raises ConfigRefused."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return time.time() - float(found[1]) * _SECONDS[found[2]]
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigRefused(
            f"--since {text!r} is neither a duration (36h, 7d) nor a time (2026-11-03T08:00)"
        ) from error


def report(
    location: str, checked: Checked, *, as_json: bool, actions: Sequence[str] = (), command: str | None = None
) -> None:
    """Print every finding, what a repair did about them, the closing block, and the command that goes on."""
    counts = {kind: sum(f.kind == kind for f in checked.findings) for kind in ("damage", "missing", "note")}
    if as_json:
        facts = {
            "store": location, **counts, "blocks": checked.blocks, "documents": checked.documents,
            "bytes": checked.bytes, "seconds": checked.seconds,
            "findings": [finding.as_dict() for finding in checked.findings],
            "actions": list(actions), "command": command,
        }  # fmt: skip
        tell(json.dumps(facts, indent=2))
        return
    for finding in joined(checked.findings):
        tell(finding.text())
    for action in actions:
        tell(f"repair: {action}")
    pairs: list[tuple[str, Any]] = [
        ("checked", f"{checked.blocks:,} blocks, {checked.documents:,} documents, {checked.bytes / 1e9:.3g} GB"),
        ("time", f"{duration(checked.seconds)}, {checked.bytes / 1e9 / max(checked.seconds, 1e-9):.3g} GB/s"),
        ("damages", counts["damage"]),
        ("still to make", counts["missing"]),
    ]
    heading = "damaged" if counts["damage"] else "incomplete" if counts["missing"] else "verified"
    summary(heading, [*pairs, ("store", location), *([("go on with", command)] if command else [])])


def conclude(location: str, findings: list[Finding]) -> None:
    """Raise StoreDamaged when something is damaged, StoreIncomplete when something is only not there yet."""
    from shared.store_files import is_remote

    damaged = [finding for finding in findings if finding.kind == "damage"]
    missing = [finding for finding in findings if finding.kind == "missing"]
    if damaged:
        advice = f"`dflash store verify {location} --repair` sets them aside and says which command makes them again"
        if is_remote(location):
            advice = "verify the folder that it was pushed from and push that again, or extract again"
        what = "1 damage" if len(damaged) == 1 else f"{len(damaged):,} damages, the first"
        raise StoreDamaged(f"{location} has {what}: {damaged[0].text().removeprefix('damage: ')}; {advice}")
    if missing:
        raise StoreIncomplete(
            f"{location} lacks {len(missing):,} part{'' if len(missing) == 1 else 's'}, the first is "
            f"{missing[0].file}; run the command that made the store again, it goes on"
        )
