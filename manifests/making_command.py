"""The command line that made a store, put together from its run records: what makes missing parts again.

Called by manifests/store_repair.py.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests.commit import read
from manifests.runs import without_refused
from shared.config import knob_fields
from shared.json_file import read_if_whole

# Commands that make stores, and where their config says which knobs are positional; extraction's are all options.
_CONFIGS = {
    "extract": None,
    "store merge": ("manifests.store_merge", "MergeConfig"),
    "store subset": ("manifests.store_subset", "SubsetConfig"),
}
_PLACES = ("target", "data", "store", "stores")


def making_command(store: Path) -> str | None:
    """The newest command that made the store or went on with it, for the place where the store is now.

    Relative paths are completed by the folder in which it was started. None when no record of it is whole.
    """
    for record in reversed(without_refused(read(store, "runs"))):
        detail = record["detail"] or {}
        if record["command"] in _CONFIGS and detail.get("config"):
            return _line(record["command"], store, detail["config"], detail.get("provenance", {}).get("cwd", ""))
    work = read_if_whole(store / "work.json") or {}  # written for the workers before they start
    return _line("extract", store, work["config"], "") if isinstance(work.get("config"), dict) else None


def _line(command: str, store: Path, config: dict[str, Any], cwd: str) -> str:
    positional = _positional(command)
    options: list[str] = []
    values: dict[str, list[str]] = {name: [] for name in positional}
    for name, value in {**config, "out": str(store)}.items():
        words = list(_words(name, value, cwd))
        if name in positional:
            values[name] = words
            continue
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(option if value else f"--no-{option[2:]}")
        elif words:
            options += [option, ",".join(words)]
    return shlex.join(["dflash", *command.split(), *(word for name in positional for word in values[name]), *options])


def _words(name: str, value: Any, cwd: str) -> Iterator[str]:
    for part in value if isinstance(value, list) else [value]:
        if part is None:
            continue
        text = str(part)
        # A Hub id is no path: only what lies there is completed.
        if name in _PLACES and cwd and Path(cwd) != Path.cwd() and (Path(cwd) / text).exists():
            text = str(Path(cwd) / text)
        yield text


def _positional(command: str) -> list[str]:
    place = _CONFIGS[command]
    if place is None:
        return []
    config_class = getattr(importlib.import_module(place[0]), place[1])
    return [field.name for field, _ in knob_fields(config_class) if field.metadata.get("argument")]
