"""The `dflash` command: names of commands, loaded only when called, and errors turned into exit codes.

Commands of higher layers are listed as text, so that this bottom layer imports none of them and
`dflash --help` answers without torch. Read stage1_extract/cli.py and stage2_train/cli.py next.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from shared.atomic import fault_of
from shared.errors import DflashError, Interrupted
from shared.progress import say
from shared.stop import StopRequest, ignore_stop, install_stop

# name: (module, function, one line for `dflash --help`). The line is repeated here so that help imports nothing.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "prepare": ("stage1_extract.cli", "prepare", "Conversations to tokenised rows with a loss mask."),
    "plan": ("stage1_extract.cli_plan", "plan", "Bytes, files and hours of a store before it is made."),
    "extract": ("stage1_extract.cli", "extract", "Run the target once and store its features (stage 1)."),
    "train": ("stage2_train.cli", "train", "Train the drafter from a store (stage 2)."),
    "eval": ("stage2_train.cli_eval", "evaluate", "Acceptance length by lossless speculative decoding."),
    "export": ("stage2_train.cli_eval", "export", "Write the Hugging Face folder that serving engines read."),
    "status": ("manifests.cli", "status", "What ran, what runs, what was lost, what is there."),
    "why": ("manifests.cli_runs", "why", "Why a run ended: cause, evidence, what to do next."),
    "logs": ("manifests.cli_runs", "logs", "What the workers of a run printed; -f follows."),
    "stop": ("manifests.cli_runs", "stop", "Ask a run to save and stop, from any shell."),
    "resume": ("manifests.cli_runs", "resume", "Go on with a run after a reboot, a kill or a stop."),
    "doctor": ("manifests.doctor", "doctor", "What this machine can and cannot promise, and what to do."),
    "query": ("manifests.cli", "query", "SQL over the manifests (read-only)."),
    "store": ("manifests.store_cli", "store", "Check, describe, clean and compare teacher stores."),
    "demo": ("manifests.demo", "demo", "The whole path on the bundled target, in minutes on a CPU."),
}


class LazyGroup(click.Group):
    """Looks commands up in a table like COMMANDS and imports a module only when its command is used."""

    def __init__(self, *arguments: Any, table: Mapping[str, tuple[str, str, str]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, function, _ = self.table[cmd_name]
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command), f"{module}:{function} is not a click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self.table.items()])


@click.command(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-offline", prog_name="dflash")
def cli() -> None:
    """Train a DFlash drafter for your own LLM: extract once, train from disk, measure by decoding.

    \b
    dflash prepare data.jsonl --target T --out rows        # add --regenerate: the target writes the answers
    dflash extract --target T --data rows --out runs/x.zarr --shards 8
    dflash train   --store runs/x.zarr
    dflash eval    --run runs/x-train --data heldout.jsonl
    dflash export  --run runs/x-train --out drafter
    """


def main() -> None:
    """Entry point: one line and an exit code for user faults, a traceback only for our bugs."""
    _open_standard_streams()
    install_stop()
    try:
        _run()
    except StopRequest as error:  # a second one, in the moment before the first had been answered
        ignore_stop()
        _fail(Interrupted(f"stopped on request ({error}); run the same command again to go on"))
    sys.exit(0)


def _run() -> None:
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt, StopRequest) as error:
        ignore_stop()
        _fail(Interrupted(f"stopped on request ({str(error) or 'Ctrl-C'}); run the same command again to go on"))
    except DflashError as error:
        _fail(error)
    except OSError as error:
        fault = fault_of(error)
        if fault is None:
            raise
        _fail(fault)


def _open_standard_streams() -> None:
    """A command started with `2>&-` would open its next file as descriptor 2, and messages would land in it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number, inheritable=True)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _fail(error: DflashError) -> NoReturn:
    """The one line of a user fault and its exit code; line breaks of a library's message become spaces.

    A stop that was asked for is no error and is not called one.
    """
    label = "" if isinstance(error, Interrupted) else "error: "
    say(label + " ".join(str(error).split()))
    sys.exit(error.exit_code)
