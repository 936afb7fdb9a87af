"""`dflash demo`: the whole path on the bundled target, each step a command that it prints first.

It only runs commands, as a person would, and reads their records: what it shows is what they do. Rerun it
to see that finished steps say so.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from manifests.commit import read
from shared.config import knob, options_of
from shared.errors import ConfigRefused, WorkerFailed
from shared.progress import duration, summary


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How large the demo is; the defaults end in minutes on two CPU cores."""

    out: Path = knob(Path("runs/demo"), help="Folder for everything the demo writes.")
    prompts: int = knob(520, help="Training prompts, of those bundled.")
    heldout: int = knob(24, help="Held-out prompts to decode.")
    steps: int = knob(250, help="Training steps.")
    max_new_tokens: int = knob(256, help="Tokens an answer may have.")


@click.command()
@options_of(DemoConfig)
def demo(config: DemoConfig) -> None:
    """Run prepare, extract, train, eval and export on the bundled target.

    \b
    dflash demo
    dflash demo --out /tmp/try --steps 50
    """
    if not (bundled() / "target" / "config.json").is_file():
        raise ConfigRefused(f"the bundled target is not at {bundled()}; reinstall dflash-offline")
    started = time.monotonic()
    steps = commands(config)
    for number, (title, arguments) in enumerate(steps, 1):
        click.echo(f"\n[{number}/{len(steps)}] {title}\n$ {shlex.join(['dflash', *arguments])}")
        _run(arguments)
    _finish(config, time.monotonic() - started)


def bundled() -> Path:
    """The folder with the bundled target and its prompts."""
    return Path(str(resources.files("shared") / "bundled"))


def commands(config: DemoConfig) -> list[tuple[str, list[str]]]:
    """The demo as data: what each step is for, and its command line."""
    out = config.out
    rows, store, run, export = out / "rows", out / "store.zarr", out / "train", out / "drafter"
    target, heldout = str(bundled() / "target"), str(bundled() / "prompts_heldout.jsonl")
    evaluation = ["--data", heldout, "--max-new-tokens", str(config.max_new_tokens), "--limit"]
    few = str(min(config.heldout, 8))  # an untrained drafter gains nothing on any prompt: eight show it
    return [
        ("the target writes the answers that the drafter will learn to foresee", [
            "prepare", str(bundled() / "prompts_train.jsonl"), "--target", target, "--regenerate", "--out", str(rows),
            "--max-rows", str(config.prompts), "--max-new-tokens", str(config.max_new_tokens),
            "--batch-size", "128", "--on-bad-row", "skip",
        ]),
        ("stage 1: run the target once over the rows and keep its features", [
            "extract", "--target", target, "--data", str(rows), "--out", str(store), "--shards", "2", "--num-taps", "5",
            "--topk", "16",
        ]),
        ("stage 2: train the drafter from the store; the target is not needed", [
            "train", "--store", str(store), "--run", str(run), "--steps", str(config.steps), "--num-layers", "3",
            "--batch-rows", "8", "--max-length", "320", "--anchors", "24", "--optimizer", "muon",
            "--learning-rate", "1e-2", "--eval-every", "50", "--save-every", "50",
            "--loss", "ce", "--weighting", "decay",  # what the figures below were measured with
        ]),
        ("before training: the same drafter at its first weights, decoding for real", [
            "eval", "--run", str(run), "--untrained", "--timed-prompts", "0", *evaluation, few,
        ]),
        ("after training: acceptance length, and proof that the text is the target's own", [
            "eval", "--run", str(run), *evaluation, str(config.heldout),
        ]),
        ("the folder that serving engines read", ["export", "--run", str(run), "--out", str(export)]),
        ("what there is now", ["status", str(out)]),
        ("the same from SQL", ["query", "SELECT name, prompts, acceptance_length, low, high, speedup, mismatches, ties "
                               "FROM acceptance", "--in", str(out)]),
    ]  # fmt: skip


def _run(arguments: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-m", "shared", *arguments]) as command:
        try:
            code = command.wait()
        except BaseException:  # asked to stop: a training that its command has left would go on
            command.terminate()
            command.wait()
            raise
    if code != 0:
        raise WorkerFailed(
            f"`dflash {arguments[0]}` ended with exit code {code}, its message is above; "
            "`dflash demo` goes on from here once that is mended"
        )


def _finish(config: DemoConfig, seconds: float) -> None:
    evaluations = read(config.out / "train", "evaluations")
    before = [r for r in evaluations if r["detail"].get("untrained")][-1]
    after = [r for r in evaluations if not r["detail"].get("untrained")][-1]
    click.echo()
    summary(f"demo finished in {duration(seconds)}", [
        ("acceptance length before training", f"{before['acceptance_length']:.2f} tokens per target step"),
        ("acceptance length after training", f"{after['acceptance_length']:.2f}"),
        ("greedy text equal to the target's", f"{after['prompts']} prompts, {after['mismatches']} differ"),
        ("everything is in", config.out),
    ])  # fmt: skip
