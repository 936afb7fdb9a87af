"""Which command made a run, and that command once more: what `dflash resume` needs after a reboot or a kill.

Read from RUN/supervision/spec.json, which the supervisor's starter wrote, or from the run's own record. Called by
cli_runs.py. Nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.commit import read
from manifests.evidence import JUDGED
from manifests.runs import owner_of, without_refused
from manifests.status import LIVING, status_of
from shared.errors import ConfigRefused, DataMissing, RunBusy
from shared.json_file import read_if_whole


@dataclass(frozen=True)
class Continuation:
    """A command to run again: its arguments without the program, and the folder that its paths are relative to."""

    arguments: list[str]
    cwd: Path


def newest_run(run_dir: Path) -> dict[str, Any] | None:
    """The newest record of training or extraction in a folder, less those of refused commands."""
    runs = [record for record in without_refused(read(run_dir, "runs")) if record["command"] in JUDGED]
    return runs[-1] if runs else None


def continuation_of(run_dir: Path, *, detach: bool = False) -> Continuation:
    """The command that goes on with a run.

    Raises DataMissing for a folder without a run, RunBusy while it runs, ConfigRefused when its command cannot be
    repeated from here: unknown, started by another launcher, or its folder is gone.
    """
    last = newest_run(run_dir)
    if last is None:
        raise DataMissing(
            f"{run_dir} holds no training and no extraction; pass the folder that `dflash status` shows for it"
        )
    _require_at_rest(run_dir)
    arguments, cwd, folder = _command_of(run_dir, str(last["run_id"]))
    if not cwd.is_dir():
        raise ConfigRefused(
            f"{run_dir} was started in {cwd}, which is gone; its paths are relative to it: make it again, or run the "
            f"command yourself: dflash {' '.join(arguments)}"
        )
    if folder and (cwd / folder).resolve() != run_dir.resolve():
        raise ConfigRefused(
            f"{run_dir} was made as {cwd / folder}, where its command would write again; move it back, or run the "
            f"command with this folder yourself: dflash {' '.join(arguments)}"
        )
    return Continuation(continued(arguments, detach=detach), cwd)


def _require_at_rest(run_dir: Path) -> None:
    """Raise RunBusy while the run lives; workers whose supervisor is gone are leaving, its successor waits for them."""
    status = status_of(run_dir, holdings=False)
    orphaned = status.run is not None and status.run.verdict is not None
    if status.command not in JUDGED or status.state not in LIVING or orphaned:
        return
    owner = owner_of(run_dir)
    raise RunBusy(
        f"{run_dir} is {status.state}{f' ({owner})' if owner else ''}: there is nothing to resume; "
        f"`dflash logs {run_dir} -f` follows it"
    )


def _command_of(run_dir: Path, run_id: str) -> tuple[list[str], Path, str]:
    """(arguments, working folder, the run's own folder, "" if not on record) of a run. Raises ConfigRefused."""
    spec = read_if_whole(run_dir / "supervision" / "spec.json") or {}
    if spec.get("run_id") == run_id and isinstance(spec.get("argv"), list) and spec.get("cwd"):
        arguments, cwd, program = list(map(str, spec["argv"])), str(spec["cwd"]), "dflash"
        folder = str(spec.get("run_dir") or "")
    else:
        detail = _first_detail(run_dir, run_id)
        provenance, config = detail.get("provenance") or {}, detail.get("config") or {}
        program, *arguments = map(str, provenance.get("argv") or [""])
        cwd, folder = str(provenance.get("cwd") or ""), str(config.get("run") or config.get("out") or "")
        if provenance.get("world_size"):
            raise ConfigRefused(
                f"{run_dir} was started by torchrun or Slurm with {provenance['world_size']} processes, and only they "
                "can do that again; run the same launch command, it goes on from the newest complete checkpoint"
            )
    if not arguments or arguments[0] not in JUDGED or not cwd:
        shown = " ".join([Path(program).name, *arguments]).strip() or "nothing on record"
        raise ConfigRefused(
            f"{run_dir} was not started by `dflash train` or `dflash extract` but by: {shown[:200]}; run that again"
        )
    return arguments, Path(cwd), folder


def _first_detail(run_dir: Path, run_id: str) -> dict[str, Any]:
    """What the run's first record says: its settings, and how it was started."""
    started = (r for r in read(run_dir, "runs") if r["run_id"] == run_id and r["state"] == "started")
    record: dict[str, Any] = next(started, {})
    found: dict[str, Any] = record.get("detail") or {}
    return found


def continued(arguments: list[str], *, detach: bool) -> list[str]:
    """The command line that goes on where this one stopped: never --no-resume, also not from a --config file."""
    kept = [argument for argument in arguments if argument not in ("--no-resume", "--resume")]
    if kept[0] == "train":
        kept.append("--resume")
    if detach and "--detach" not in kept:
        kept.append("--detach")
    return kept
