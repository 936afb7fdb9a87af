"""What each run folder is doing, from its records and files alone: no torch, no locks taken, living or dead.

Called by `dflash status` (cli.py) and by the commands about one run (cli_runs.py). A second must do for all of it, so
nothing that grows with the data is read: of documents and metrics not a line, of blocks one record each. The processes
of a training or extraction are in run_picture.py, the words in status_text.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from manifests.commit import DamagedLine, files_of, latest, read
from manifests.evidence import JUDGED, collect
from manifests.folders import kind_of_folder, planned_or_none, run_folders
from manifests.lines import parse, scan
from manifests.records import MOVED
from manifests.run_picture import LIVING as LIVING
from manifests.run_picture import RunPicture, judged_run, open_run
from manifests.runs import is_owned, launcher_processes, owned_part, without_refused
from manifests.verdict import earlier
from shared.beat import read_beat
from shared.gpus import GpuQuestion
from shared.progress import combine, line


@dataclass(frozen=True)
class FolderStatus:
    """One folder: what it is, the state of its last command, what it holds, and for train and extract the run."""

    folder: str
    kind: str
    command: str
    state: str
    message: str
    holds: dict[str, Any] = field(default_factory=dict)
    run: RunPicture | None = None
    earlier: Sequence[str] = ()
    """Of a living run: how the attempts ended after which it went on."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def statuses(roots: Sequence[Path]) -> list[FolderStatus]:
    """The status of every folder with a manifest at or below the roots, GPUs included where a run uses them."""
    rows = [_status_or_fault(folder) for folder in run_folders(roots)]
    if not any(_wants_gpus(row) for row in rows):
        return rows
    report = GpuQuestion().answer()
    gpus = [gpu.as_dict() for gpu in report.gpus]
    return [
        replace(row, run=replace(row.run, gpus=gpus, gpus_missing=report.missing))
        if row.run is not None and _wants_gpus(row)
        else row
        for row in rows
    ]


def _wants_gpus(row: FolderStatus) -> bool:
    return row.run is not None and row.run.uses_gpus and row.state in (*LIVING, "lost")


def _status_or_fault(folder: Path) -> FolderStatus:
    """One folder that cannot be read must not hide the others."""
    try:
        return status_of(folder)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        return FolderStatus(str(folder), "folder", "", "unreadable", message)


def status_of(folder: Path, *, holdings: bool = True) -> FolderStatus:
    """The status of one folder, on request without what it holds. Raises OSError when it cannot be read."""
    with suppress(FileNotFoundError):  # but a folder that is closed to us must not pass for an empty one
        os.scandir(folder / "manifest").close()
    last = _newest(without_refused(read(folder, "runs")))
    command, run = str(last["command"]), None
    before: Sequence[str] = ()
    state, message = str(last["state"]), str(last.get("message", ""))
    if state == "started" and command in JUDGED:
        evidence = collect(folder)
        state, message, run = open_run(evidence)
        before = earlier(evidence) if state in LIVING else ()
    elif state == "started":
        state, message = _unsupervised(folder, command)
    elif command in JUDGED:
        judged = _ended_under_torchrun(folder, last)
        message, run = judged or (message, _ended_run(folder, last))
    return FolderStatus(
        str(folder), kind_of_folder(folder), command, state, message, _holds(folder) if holdings else {}, run, before
    )


def _newest(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The record to show: a training that has no ending goes before an evaluation that ran beside it."""
    for command in JUDGED:
        ours = [record for record in runs if record["command"] == command]
        if ours and ours[-1]["state"] == "started":
            return ours[-1]
    return runs[-1] if runs else {"command": "", "state": "empty"}


def _unsupervised(folder: Path, command: str) -> tuple[str, str]:
    """(state, message) of a started command that has no supervisor: alive while some process holds its folder."""
    if is_owned(owned_part(folder, command)):
        paths = sorted((folder / "progress").glob("regenerate-*.beat")) if command == "prepare" else []
        shot = combine([beat for path in paths if (beat := read_beat(path)) is not None], summed=True)
        return "running", line("", shot).removeprefix(": ") if shot else ""
    return (
        "lost",
        "started, never recorded an ending, and no process holds the folder; run the same command again to go on",
    )


def _ended_under_torchrun(folder: Path, last: dict[str, Any]) -> tuple[str, RunPicture] | None:
    """(sentence, picture) of a run of torchrun or Slurm that ended badly; None for any other.

    Its record is rank 0's, which tells of the consequence when another rank died ("Connection reset by peer"), and no
    supervisor left a verdict: it is worked out as `dflash why` does.
    """
    if last["state"] not in ("failed", "interrupted") or _supervisor_events(folder, last).is_file():
        return None
    evidence = collect(folder)
    if evidence.run is None or evidence.run["run_id"] != last["run_id"] or launcher_processes(evidence.run) is None:
        return None
    return judged_run(evidence)


def _supervisor_events(folder: Path, last: dict[str, Any]) -> Path:
    return folder / "manifest" / f"events.supervisor-{last['run_id']}.jsonl"


def _ended_run(folder: Path, last: dict[str, Any]) -> RunPicture:
    """How a run ended: its exit code, and the last verdict of its supervisor."""
    path = _supervisor_events(folder, last)
    events = _read_with_damage(path)[0] if path.is_file() and last["state"] != "finished" else []
    verdicts = [event["detail"].get("verdict") for event in events if event["event"] == "verdict"]
    host = next((event["detail"].get("host") for event in events if event["event"] == "supervisor started"), "")
    return RunPicture(
        run_id=str(last["run_id"]),
        host=str(host),
        exit_code=last.get("exit_code"),
        restarts=sum(event["event"] == "restart" for event in events),
        verdict=verdicts[-1] if verdicts else None,
    )


def _holds(folder: Path) -> dict[str, Any]:
    records, damaged = _shown_records(folder)
    newest = latest(records["shards"], "block")
    blocks = [record for record in newest.values() if record["state"] == "done"]
    planned = planned_or_none(folder)
    holds: dict[str, Any] = {}
    if planned or blocks:
        holds["blocks"] = f"{len(blocks)}/{planned}" if planned else len(blocks)
        for name in ("documents", "tokens", "bytes"):
            holds[name] = sum(record[name] for record in blocks)
    if withdrawn := len(newest) - len(blocks):
        holds["withdrawn_blocks"] = f"{withdrawn}, set aside by `store verify --repair`"
    if moved := {record["detail"][MOVED] for record in blocks if record["detail"].get(MOVED)}:
        holds["large_arrays_only_at"] = ", ".join(sorted(moved))
    if skips := records["skips"]:
        holds["skipped"] = len({(r["source"], r["line"], r["doc_id"], r["reason"]) for r in skips})
    if kept := [record for record in records["checkpoints"] if (folder / record["path"]).is_dir()]:
        holds["checkpoint"] = kept[-1]["global_step"]
    if evaluations := latest(records["evaluations"], "name"):
        holds["acceptance_length"] = {name: round(r["acceptance_length"], 3) for name, r in evaluations.items()}
    if damaged:
        first = damaged[0]
        holds["damaged_record_lines"] = f"{len(damaged)}, first line {first.line_number} of {first.path}"
    return holds


# The kinds that are read here; documents may be millions of lines.
_SHOWN_KINDS = ("runs", "shards", "skips", "checkpoints", "evaluations")


def _shown_records(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[DamagedLine]]:
    """The records of each shown kind, oldest first, and the lines of these kinds that do not fit their checksums."""
    records: dict[str, list[dict[str, Any]]] = {}
    damaged: list[DamagedLine] = []
    for kind in _SHOWN_KINDS:
        records[kind] = []
        for path in files_of(folder, kind):
            found, bad = _read_with_damage(path)
            records[kind] += found
            damaged += bad
        records[kind].sort(key=lambda record: record["time"])
    return records, damaged


def _read_with_damage(path: Path) -> tuple[list[dict[str, Any]], list[DamagedLine]]:
    """Both from one pass over the file: two took a second for 30,000 blocks."""
    records: list[dict[str, Any]] = []
    damaged: list[DamagedLine] = []
    with path.open("rb") as file:
        for lines, bad in scan(file):
            records += parse(lines)
            damaged += [DamagedLine(path, number, reason) for number, reason in bad]
    return records, damaged
