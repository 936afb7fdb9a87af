"""The training step at full size: how near it is to the chip's limit, and where the rest goes.

    python -m stage2_train.benchmarks.step --shape 27b --steps 200 --store /fast/disk/bench.zarr

Makes a store if there is none, trains from it on a cold page cache by the real launcher, loop, reader and step with
fresh anchors each step, then a second process with a warm compile cache, a plain version of the same step, and
attention against a dense mask. Each part is a process of its own, one after the other. Read timed_run.py next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused
from shared.progress import say, tell
from stage2_train.benchmarks import step_report

if TYPE_CHECKING:
    from stage2_train.benchmarks.made_store import Shape
    from stage2_train.benchmarks.timed_run import Timing

PARTS = ("ours", "warm", "plain", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Settings of the benchmark."""

    store: Path = knob(help="Store to read; made when it is not there.")
    shape: str = knob("27b", help="27b, 8b or toy.")
    steps: int = knob(200, help="Measured steps.")
    parts: tuple[str, ...] = knob(PARTS, help="ours, warm, plain, attention.")
    rows: int = knob(8, help="Rows of the store; an epoch has as many steps.")
    document: int | None = knob(None, help="Tokens of a document; default: the whole row, where attention is dearest.")
    precision: str = knob("bfloat16", help="Of the store: bfloat16 or int8.")
    anchors: int | None = knob(None, help="Instead of the shape's.")
    max_length: int | None = knob(None, help="Instead of the shape's.")
    cold: bool = knob(True, help="Keep the store out of the page cache, so that every row comes from the disk.")
    profiled: int = knob(2, help="Steps under the profiler, after the measured ones.")
    plain_steps: int = knob(10, help="Measured steps of the plain version.")
    train: str | None = knob(None, help="Further options as NAME=VALUE of TrainConfig, separated by spaces.")
    run: Path | None = knob(None, help="Folder for the runs, kept; default: a temporary one.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.parts) - set(PARTS)):
            raise ConfigRefused(f"--parts {','.join(unknown)} is unknown; there are {', '.join(PARTS)}")
        if self.steps < 2:
            raise ConfigRefused(f"--steps is {self.steps}; it must be at least 2")


@click.command()
@options_of(StepConfig)
def main(config: StepConfig) -> None:
    """Train from a made-up store at the shape of a real drafter and say how fast every part is."""
    from shared.atomic import write_json
    from shared.provenance import collect
    from stage2_train.benchmarks.made_store import fitting, make_store

    started = time.monotonic()
    shape = fitting(config.shape, config.anchors, config.max_length)
    make_store(config.store, shape, config.rows, config.document or shape.max_length, config.precision)
    found: dict[str, Any] = {}
    with _folder(config.run) as folder:
        for part in (part for part in PARTS if part in config.parts):
            found[part] = _measure(config, shape, part, folder)
            _show(part, found)
            if config.json is not None:
                write_json(config.json, {"config": to_dict(config), "provenance": collect(), **found})
    tell(f"\nall of it took {time.monotonic() - started:.0f} s")


def _measure(config: StepConfig, shape: Shape, part: str, folder: Path) -> dict[str, Any]:
    from stage2_train.benchmarks.timed_run import Timing

    say(part)
    if part == "plain":
        return _beside("plain_step", config, folder / "plain-cache", "--steps", config.plain_steps)
    if part == "attention":
        return _beside("attention_cost", config, folder / "attention-cache", "--rounds", 5)
    if part == "warm":
        return _ours(config, shape, folder, part, Timing(steps=2))
    timing = Timing(steps=config.steps, ceiling=True, profiled=config.profiled, cold_store=config.cold)
    return _ours(config, shape, folder, part, timing)


def _show(part: str, found: dict[str, Any]) -> None:
    if part == "ours":
        step_report.show_ours(found[part])
    elif part == "warm":
        step_report.show_compile("compile, a second process with the cache of the first", found[part])
    elif part == "plain":
        step_report.show_plain(found[part], found.get("ours"))
    else:
        step_report.show_attention(found[part])


def _ours(config: StepConfig, shape: Shape, folder: Path, name: str, timing: Timing) -> dict[str, Any]:
    """One process of the real training; the same command but for its --run, so that it compiles the same."""
    from stage2_train.benchmarks.made_store import train_options
    from stage2_train.benchmarks.timed_run import run_timed

    more = {"steps": config.steps + config.profiled + 1, "compile_cache": folder / "compile-cache"}
    train = shape.train_config(config.store, folder / name, **{**more, **train_options(config.train or "")})
    return run_timed(train, timing)[0]


def _beside(module: str, config: StepConfig, cache: Path, option: str, value: int) -> dict[str, Any]:
    """What another module of this package prints, from a process with an empty compile cache."""
    command = [sys.executable, "-m", f"stage2_train.benchmarks.{module}", "--shape", config.shape, option, str(value)]
    for name, given in (("--anchors", config.anchors), ("--max-length", config.max_length)):
        command += [name, str(given)] if given is not None else []
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **caches}, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
