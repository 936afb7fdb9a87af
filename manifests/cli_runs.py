"""Commands about one run, from any shell: `dflash why`, `logs`, `stop` and `resume`.

Imports nothing heavy: they must answer while the disk is full and the run is dead. Next: status.py, log_command.py,
stop_command.py, resume.py, postmortem.py.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shared.config import FilePath
from shared.progress import say, tell
from shared.stop import StopRequest

LEFT_BY_CTRL_C = 130
"""Exit code of a viewer that somebody left, as of every command that Ctrl-C ends; the run goes on."""


def _run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("run", type=FilePath(path_type=Path, readable=False))(command)


@click.command()
@_run_argument
@click.option("--json", "as_json", is_flag=True, help="The verdict and all of its evidence as one JSON object.")
def why(run: Path, as_json: bool) -> None:
    """Tell why RUN ended, or what it is doing: cause, evidence, what was excluded, what to do next.

    It is worked out anew from what lies in the folder and what the kernel says, also when nobody survived.

    \b
    dflash why runs/x-train
    dflash why runs/x.zarr --json
    """
    from manifests.folders import require_folders
    from manifests.why import answer, page_of

    require_folders([run])
    tell(json.dumps(answer(run), indent=2, default=str) if as_json else page_of(run))


@click.command()
@_run_argument
@click.option("--rank", metavar="N", help="Only this rank's log, or `supervisor`, or `summary`.  [default: all ranks]")
@click.option("-f", "--follow", "following", is_flag=True, help="Show what is added, until the run ends.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=20, show_default=True, help="Last lines of each log."
)
@click.option("--stacks", is_flag=True, help="Instead: the stacks that crashes and hangs left, whole.")
def logs(run: Path, rank: str | None, following: bool, lines: int, stacks: bool) -> None:
    """Show what the workers of RUN printed. Leaving does nothing to the run.

    \b
    dflash logs runs/x-train
    dflash logs runs/x-train --rank 3 -f
    dflash logs runs/x-train --rank supervisor -n 100
    """
    from manifests import log_command
    from manifests.folders import require_folders
    from manifests.log_view import logs_of

    require_folders([run])
    try:
        if following and not stacks:
            log_command.follow(run, rank, lines)
        else:
            log_command.show(run, logs_of(run, rank, stacks=stacks), log_command.WHOLE if stacks else lines)
    except log_command.ReaderLeft:
        log_command.leave_quietly()
    except (KeyboardInterrupt, StopRequest):
        sys.exit(LEFT_BY_CTRL_C)


@click.command()
@_run_argument
@click.option("--now", is_flag=True, help="Kill the workers: what they have not saved is lost.")
@click.option("--no-wait", is_flag=True, help="Leave the request and return at once.")
def stop(run: Path, now: bool, no_wait: bool) -> None:
    """Ask RUN to save and stop, and wait until it has; from any shell, also of another host that shares the disk.

    Exit code 0: it stopped (with --no-wait: it was asked). 45: nothing runs there.

    \b
    dflash stop runs/x-train
    dflash stop runs/x-train --now
    """
    from manifests.folders import require_folders
    from manifests.stop_command import ask, wait

    require_folders([run])
    request = ask(run, now=now)
    if no_wait:
        return
    try:
        wait(run, request)
    except (KeyboardInterrupt, StopRequest):
        say(f"no longer waiting; the request stays, `dflash status {run}` tells when it has stopped")
        sys.exit(LEFT_BY_CTRL_C)


@click.command()
@_run_argument
@click.option("--detach", is_flag=True, help="Return as soon as it runs.")
def resume(run: Path, detach: bool) -> None:
    """Go on with RUN after a reboot, a kill or a stop: runs the very same command again, in the same folder.

    It continues from the newest complete checkpoint or block, exactly. A finished run is left as it is (exit code 0).

    \b
    dflash resume runs/x-train
    dflash resume runs/x.zarr --detach
    """
    from manifests.folders import require_folders
    from manifests.resume import continuation_of, newest_run
    from shared.cli import cli

    require_folders([run])
    last = newest_run(run)
    if last is not None and last["state"] == "finished":
        tell(f"{run} is finished: `dflash {last['command']}` has nothing left to do")
        return
    command = continuation_of(run, detach=detach)
    say(f"in {command.cwd}: dflash {shlex.join(command.arguments)}")
    os.chdir(command.cwd)
    sys.argv[1:] = command.arguments  # what the run's records will say it was started with
    cli.main(command.arguments, prog_name="dflash", standalone_mode=False)
