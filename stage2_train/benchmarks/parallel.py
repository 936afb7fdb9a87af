"""Several processes against one: speed on the same rows per GPU, losses of the same batch, memory of sharded state.

    python -m stage2_train.benchmarks.parallel --shape 27b --nproc 2 --store /fast/disk/bench.zarr

Runs, one after the other, by the real launcher and loop: "one" process with one row; "many" with one row each; "same",
one process with as many rows, a micro-batch each; "fsdp", the processes of "many" with sharded state; and "fits", fsdp
at other row sizes. The store stays in the page cache: how fast a disk is shows step.py. Read timed_run.py next.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shared.benchmarks.measure import cached_share, table
from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused
from shared.progress import say, summary, tell
from stage2_train.benchmarks.step_report import GIB

if TYPE_CHECKING:
    from stage2_train.benchmarks.made_store import Shape

RUNS = ("one", "many", "same", "fsdp", "fits")
# fp32 weight, gradient and AdamW's two moments.
STATE_BYTES = 16
Ranks = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Settings of the benchmark."""

    store: Path = knob(help="Store to read; made when it is not there.")
    shape: str = knob("27b", help="27b, 8b or toy.")
    nproc: int = knob(2, help="Processes, one per GPU.")
    steps: int = knob(20, help="Measured steps of each run.")
    runs: tuple[str, ...] = knob(RUNS, help="one, many, same, fsdp, fits.")
    rows: int = knob(8, help="Rows of the store.")
    document: int | None = knob(None, help="Tokens of a document; default: the whole row.")
    fits: tuple[str, ...] = knob(
        ("16384x2048c", "4096x512c"), help="Rows tried with fsdp: TOKENSxANCHORS, with c for activation checkpointing."
    )
    train: str | None = knob(None, help="Further options as NAME=VALUE of TrainConfig, separated by spaces.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.runs) - set(RUNS)):
            raise ConfigRefused(f"--runs {','.join(unknown)} is unknown; there are {', '.join(RUNS)}")
        if self.nproc < 2 or self.steps < 2:
            raise ConfigRefused(f"--nproc {self.nproc} and --steps {self.steps} must both be at least 2")
        for text in self.fits:
            row_of(text)


def row_of(text: str) -> dict[str, Any]:
    """Options of `dflash train` for "TOKENSxANCHORS" or "TOKENSxANCHORSc". Raises ConfigRefused."""
    tokens, _, anchors = text.removesuffix("c").partition("x")
    if not (tokens.isdigit() and anchors.isdigit()):
        raise ConfigRefused(f"--fits {text!r} is not TOKENSxANCHORS, with a c behind it for activation checkpointing")
    checkpointing = {"activation_checkpointing": True} if text.endswith("c") else {}
    return {"max_length": int(tokens), "anchors": int(anchors), **checkpointing}


@click.command()
@options_of(ParallelConfig)
def main(config: ParallelConfig) -> None:
    """Compare one process with several, and sharded with repeated state."""
    from shared.atomic import write_json
    from shared.provenance import collect
    from stage2_train.benchmarks.made_store import fitting, make_store

    started = time.monotonic()
    shape = fitting(config.shape, None, None)
    make_store(config.store, shape, config.rows, config.document or shape.max_length)
    say(f"{cached_share(config.store):.0%} of the store in the page cache")
    warm(config.store / "blocks")
    found: dict[str, Ranks] = {}
    with tempfile.TemporaryDirectory(prefix="parallel-") as folder:
        for name, changes in planned(config).items():
            say(f"{name}: {changes}")
            found[name] = _run(config, shape, Path(folder), name, changes)
    show(config, found)
    tell(f"\nall of it took {time.monotonic() - started:.0f} s")
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "provenance": collect(), "runs": found})


def planned(config: ParallelConfig) -> dict[str, dict[str, Any]]:
    """Name and options of every training, in order."""
    many = {"nproc": config.nproc, "batch_rows": config.nproc}
    plans: dict[str, dict[str, Any]] = {
        "one": {"nproc": 1, "batch_rows": 1},
        "many": many,
        "same": {"nproc": 1, "batch_rows": config.nproc, "micro_rows": 1},
        "fsdp": {**many, "parallel": "fsdp"},
    }
    chosen = {name: plan for name, plan in plans.items() if name in config.runs}
    if "fits" in config.runs:
        chosen |= {f"fsdp {text}": {**many, "parallel": "fsdp", **row_of(text)} for text in config.fits}
    return chosen


def _run(config: ParallelConfig, shape: Shape, folder: Path, name: str, changes: Mapping[str, Any]) -> Ranks:
    from stage2_train.benchmarks.made_store import train_options
    from stage2_train.benchmarks.timed_run import Timing, run_timed

    fields = {
        "steps": config.steps + 1,
        "log_every": 1,
        "compile_cache": folder / "compile-cache",
        **changes,
        **train_options(config.train or ""),
    }
    train = shape.train_config(config.store, folder / name.replace(" ", "-"), **fields)
    return run_timed(train, Timing(steps=config.steps))


def warm(folder: Path) -> None:
    """Read all files below a folder, into the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def show(config: ParallelConfig, found: Mapping[str, Ranks]) -> None:
    """Print one row per run, the ratio of speeds, how far losses are apart, and what the memory is made of."""
    tell(table("runs", [row(name, ranks) for name, ranks in found.items()]))
    pairs: list[tuple[str, str]] = []
    if "one" in found and "many" in found:
        pairs.append(
            (f"{config.nproc} processes / one, same rows each", f"{speed(found['many']) / speed(found['one']):.3f}")
        )
    for first, second in (("same", "many"), ("many", "fsdp")):
        if first in found and second in found:
            differences = apart(found[first][0]["losses"], found[second][0]["losses"])
            pairs.append((f"losses of {first} and {second}", differences))
    for name in (name for name in found if name.startswith("fsdp")):
        first_rank = found[name][0]
        state, tables = STATE_BYTES * first_rank["parameters"] / config.nproc, first_rank["frozen_bytes"]
        most = max(rank["memory_last"] for rank in found[name])
        parts = f"share of the fp32 state {state / GIB:.2f}, target's tables {tables / GIB:.2f}"
        pairs.append((name, f"{most / GIB:.2f} GiB a process: {parts}, the rest {(most - state - tables) / GIB:.2f}"))
    summary("\ncompared", pairs)


def row(name: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run in the table."""
    losses = list(ranks[0]["losses"].values())
    return {
        "run": name,
        "processes": len(ranks),
        "step ms": max(rank["step_ms"] for rank in ranks),
        "context tokens/s": speed(ranks),
        "TFLOP/s": sum(rank["tflops"] for rank in ranks),
        "GiB a process": f"{max(rank['memory_last'] for rank in ranks) / GIB:.2f}",
        "first loss": f"{losses[0]:.5f}",
        "last loss": f"{losses[-1]:.5f}",
    }


def speed(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Context tokens per second over all processes."""
    return sum(float(rank["tokens_per_second"]) for rank in ranks)


def apart(first: Mapping[int, float], second: Mapping[int, float]) -> str:
    """Largest relative difference of two loss curves, at the first step and over all."""
    steps = sorted(first.keys() & second.keys())
    found = [abs(first[step] - second[step]) / abs(first[step]) for step in steps]
    return f"apart by {found[0]:.1e} at step {steps[0]}, by {max(found):.1e} at most over {len(steps)} steps"


if __name__ == "__main__":
    main()
