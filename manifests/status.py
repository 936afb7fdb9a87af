"""What each run folder is doing, from its records and files alone: no torch, no locks taken, living or dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manifests.blocks import MOVED, recorded_blocks
from manifests.commit import damaged_lines, latest, read
from manifests.folders import kind_of_folder, planned_or_none, run_folders
from manifests.runs import is_owned, owned_part, without_refused
from shared.json_file import read_if_whole
from shared.progress import combine, line


@dataclass(frozen=True)
class FolderStatus:
    """One folder: what it is, the state of its last command, and what it holds."""

    folder: str
    kind: str
    command: str
    state: str
    message: str
    holds: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def statuses(roots: Sequence[Path]) -> list[FolderStatus]:
    """The status of every folder with a manifest at or below the roots."""
    return [_status_or_fault(folder) for folder in run_folders(roots)]


def _status_or_fault(folder: Path) -> FolderStatus:
    """One folder that cannot be read must not hide the others."""
    try:
        return status_of(folder)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        return FolderStatus(str(folder), "folder", "", "unreadable", message)


def status_of(folder: Path) -> FolderStatus:
    """The status of one folder."""
    runs = without_refused(read(folder, "runs"))
    last = runs[-1] if runs else {"command": "", "state": "empty", "message": ""}
    state, message = verdict(last, is_owned(owned_part(folder, str(last["command"]))))
    if state == "running":
        message = _progress_line(folder, str(last["command"])) or message
    return FolderStatus(str(folder), kind_of_folder(folder), last["command"], state, message, _holds(folder))


def verdict(last: dict[str, Any], owned: bool) -> tuple[str, str]:
    """(state, message) from the newest run record and whether a living process holds the folder."""
    if last["state"] != "started":
        return last["state"], last.get("message", "")
    if owned:
        return "running", ""
    return (
        "lost",
        "started, never recorded an ending, and no process holds the folder; run the same command again to go on",
    )


def _progress_line(folder: Path, command: str) -> str:
    paths = sorted((folder / "progress").glob(f"{command}-*.json"))
    states = [state for path in paths if (state := read_if_whole(path)) is not None]
    shot = combine(states, summed=command == "extract")
    return line(command, shot) if shot else ""


def _holds(folder: Path) -> dict[str, Any]:
    holds: dict[str, Any] = {}
    planned, blocks = planned_or_none(folder), recorded_blocks(folder)
    if planned or blocks:
        holds["blocks"] = f"{len(blocks)}/{planned}" if planned else len(blocks)
        for name in ("documents", "tokens", "bytes"):
            holds[name] = sum(record[name] for record in blocks.values())
    if withdrawn := {record["block"] for record in read(folder, "shards") if record["state"] != "done"} - set(blocks):
        holds["withdrawn_blocks"] = f"{len(withdrawn)}, set aside by `store verify --repair`"
    if moved := {record["detail"][MOVED] for record in blocks.values() if record["detail"].get(MOVED)}:
        holds["large_arrays_only_at"] = ", ".join(sorted(moved))
    if skips := read(folder, "skips"):
        holds["skipped"] = len({(r["source"], r["line"], r["doc_id"], r["reason"]) for r in skips})
    if checkpoints := read(folder, "checkpoints"):
        holds["checkpoint"] = checkpoints[-1]["global_step"]
    if evaluations := latest(read(folder, "evaluations"), "name"):
        holds["acceptance_length"] = {name: round(r["acceptance_length"], 3) for name, r in evaluations.items()}
    if damaged := [line for kind in _SHOWN_KINDS for line in damaged_lines(folder, kind)]:
        first = damaged[0]
        holds["damaged_record_lines"] = f"{len(damaged)}, first line {first.line_number} of {first.path}"
    return holds


# The kinds that are read here; documents may be millions of lines.
_SHOWN_KINDS = ("runs", "shards", "skips", "checkpoints", "evaluations")
