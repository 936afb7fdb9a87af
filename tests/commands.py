"""The `dflash` command in this process, and the one fault that it may end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from manifests.launch import LaunchSpec
from manifests.runs import Recording
from shared.cli import cli
from shared.errors import DflashError
from stage1_extract.finish import finish


def run(*arguments: object) -> Result:
    """`dflash ARGUMENTS`."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def plan(*arguments: object) -> Result:
    """`dflash plan ARGUMENTS`."""
    return run("plan", *arguments)


def report(*arguments: object) -> dict[str, Any]:
    """What `dflash plan --json` says."""
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.output)
    return found


def verify(store: Path, *more: object) -> Result:
    """`dflash store verify STORE`."""
    return run("store", "verify", store, *more)


def found(store: Path, *more: object) -> dict[str, Any]:
    """What `dflash store verify --json` says."""
    return dict(json.loads(verify(store, "--json", *more).stdout))


def fault(result: Result) -> DflashError:
    """The user's fault that a command ended with: one line."""
    assert isinstance(result.exception, DflashError), result.output + repr(result.exception)
    assert "\n" not in str(result.exception)
    return result.exception


def workers_in_process(patch: pytest.MonkeyPatch, module: Any, worker: Any) -> None:
    """Have `dflash extract` or `prepare --regenerate` run its real worker function rank by rank in this process."""

    def run_workers(spec: LaunchSpec) -> None:
        for rank in range(spec.num_workers):
            worker.main(spec.run_dir, rank, spec.num_workers)

    def start_supervisor(_command: Recording, spec: LaunchSpec) -> None:
        run_workers(spec)
        finish(spec.run_dir)

    if hasattr(module, "start_supervisor"):
        patch.setattr(module, "start_supervisor", start_supervisor)
    else:
        patch.setattr(module, "run_workers", run_workers)


def flip(path: Path, position: int = -20) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
