"""Folders with a manifest below some roots, and what each is, from names and descriptions alone.

Used by `dflash status` and `dflash query`; nothing is locked and whatever cannot be read is passed over and said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.errors import DataMissing
from shared.json_file import read_if_whole
from shared.progress import say


def require_folders(roots: Sequence[Path]) -> None:
    """Say so when a given root does not exist at all, instead of showing an empty table."""
    missing = [str(root) for root in roots if not root.exists()]
    if missing:
        raise DataMissing(f"no such folder: {', '.join(missing)}; pass the folder that holds your runs and stores")


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
    skip = {"blocks", "manifest", "checkpoints", "logs", "target", "index", "progress"}
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


def kind_of_folder(folder: Path) -> str:
    """By the description that its command writes."""
    for name, kind in (("store.json", "store"), ("prepare.json", "rows"), ("run.json", "run")):
        if os.path.exists(folder / name):  # noqa: PTH110 - False, not an error, where we may not look
            return kind
    return "folder"


def planned_or_none(folder: Path) -> int | None:
    """How many blocks a store's plan has, None while there is no whole plan: a view for the living, not evidence."""
    blocks = (read_if_whole(folder / "plan.json") or {}).get("blocks")
    return len(blocks) if isinstance(blocks, list) else None
