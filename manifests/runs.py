"""A command's life on a folder, as records: started before the work, and an ending whatever happens short of a kill.

Used by prepare, extract, train, eval, export, store merge and store subset around their work; extract and train hand
their run over to a supervisor (manifests/launch.py), which writes the ending. A folder whose newest record says
"started" while nobody holds it was lost: `dflash status` says so.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.commit import Ledger, read, settle
from manifests.records import RunRecord
from manifests.run_order import AFTER, newest_place
from shared import provenance
from shared.atomic import owned
from shared.errors import (
    CheckpointMismatch,
    ConfigRefused,
    DflashError,
    DiskFull,
    Interrupted,
    PathNotWritable,
    StoreMismatch,
)
from shared.stop import StopRequest, shielded

# Commands that have a folder for themselves.
_MAKERS = frozenset({"prepare", "extract", "train", "store merge", "store subset"})


@dataclass
class Recording:
    """A command at work on a folder. With `handed_over` another process (its supervisor) writes the ending."""

    folder: Path
    command: str
    run_id: str
    handed_over: bool = False


@contextmanager
def recorded(folder: Path, command: str, config: dict[str, Any]) -> Iterator[str]:
    """Own `folder`, record that `command` started with this config and these versions, and how it ended.

    An evaluation owns only the folder's `evaluations`, so that it runs beside the training it measures. Yields the run
    id. Raises RunBusy when another living process owns the same, ConfigRefused when the folder was made by a command
    of another kind; re-raises everything.
    """
    with recording(folder, command, config) as run:
        yield run.run_id


@contextmanager
def recording(folder: Path, command: str, config: dict[str, Any]) -> Iterator[Recording]:
    """As `recorded`, for a command that may hand its run over to a supervisor, who then owns the folder and the record.

    The lock is that of the inherited descriptor; ours is closed at the end of the block.
    """
    require_kind(folder, command)
    with owned(owned_part(folder, command)):
        run = Recording(folder, command, uuid.uuid4().hex[:12])
        settle(folder)
        ledger = ledger_of(folder, command, run.run_id)
        detail = {"config": config, "provenance": provenance.collect(), **_after_others(folder)}
        try:
            ledger.append(RunRecord(run_id=run.run_id, command=command, state="started", detail=detail))
            yield run
        except BaseException as error:
            if run.handed_over:
                raise
            # At once: a second request to stop must not come between the first and its record.
            # A disk that is full takes no record either; the fault itself is what the user must read.
            with shielded(), suppress(DiskFull, PathNotWritable):
                code = (
                    error.exit_code
                    if isinstance(error, DflashError)
                    else Interrupted.exit_code
                    if isinstance(error, KeyboardInterrupt | StopRequest)
                    else 1
                )
                state = state_of(error, code)
                message = str(error) if state == "interrupted" else f"{type(error).__name__}: {error}"
                ledger.append(
                    RunRecord(run_id=run.run_id, command=command, state=state, exit_code=code, message=message)
                )
            raise
        if not run.handed_over:
            with shielded():
                ledger.append(RunRecord(run_id=run.run_id, command=command, state="finished", exit_code=0))


def _after_others(folder: Path) -> dict[str, float]:
    """What a run's first record says besides when the folder has records from the future: the clock went back."""
    newest = newest_place(read(folder, "runs"))
    return {AFTER: newest} if newest is not None and newest >= time.time() else {}


def ledger_of(folder: Path, command: str, run_id: str) -> Ledger:
    """Where the records of one command's life go."""
    return Ledger(folder, f"{command.replace(' ', '-')}-{run_id}")


def state_of(error: BaseException, exit_code: int) -> str:
    """How a command that ended by `error` is remembered.

    "refused" is a command that did not fit what is there and touched nothing: a finished folder stays finished.
    """
    if exit_code == Interrupted.exit_code:
        return "interrupted"
    return "refused" if isinstance(error, ConfigRefused | CheckpointMismatch | StoreMismatch) else "failed"


def without_refused(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run records less those of refused commands, unless nothing else ever ran."""
    refused = {record["run_id"] for record in runs if record["state"] == "refused"}
    return [record for record in runs if record["run_id"] not in refused] or runs


def launcher_processes(started: Mapping[str, Any]) -> int | None:
    """How many processes torchrun or Slurm started for the run of this first record; None for our own launcher."""
    found: Any = started
    for name in ("detail", "provenance", "world_size"):  # another version may have written something else
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None


def owned_part(folder: Path, command: str) -> Path:
    """The part of a folder that a command must have for itself."""
    return folder / "evaluations" if command == "eval" else folder


def require_kind(folder: Path, command: str) -> None:
    """Raise ConfigRefused when `folder` is the work of another kind of command: their files would mix.

    Rows, stores and runs have a folder each; eval and export write into the folder of their run or one of their own.
    """
    theirs = _MAKERS - ({"train"} if command in ("eval", "export") else {command})
    for record in read(folder, "runs"):
        if record["command"] in theirs:
            raise ConfigRefused(
                f"{folder} was made by `dflash {record['command']}`, so `dflash {command}` must not write there; "
                "choose another folder"
            )


def owner_of(folder: Path) -> str:
    """Who holds the folder, or held it last: "process 4711 on host"; empty when nobody signed."""
    try:
        return (folder / ".owner").read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""


def is_owned(folder: Path) -> bool:
    """Whether a living process on this host holds the folder."""
    path = folder / ".owner"
    if not path.exists():
        return False
    # Read-only is enough for flock and works in a folder that is not ours to write.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
