"""The real training loop with a stopwatch around its step, stopped before it would save anything.

`run_timed` starts the workers of `dflash train` with `main` in the place of stage2_train.train:main: set_up and train
themselves, with one object replaced, the Stepper, by one that also takes the time. Used by step.py and parallel.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config import from_dict, to_dict

if TYPE_CHECKING:
    from stage2_train.config import TrainConfig
    from stage2_train.objective import Engine

TIMING_FILE = "timing.json"
# Steps before clocks, caches and allocations have settled; the memory of the last of them is compared with the end's.
SETTLED = 5


class Enough(Exception):
    """All steps that were asked for are measured; leaves the loop before it saves a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What to measure in a run."""

    steps: int
    ceiling: bool = False
    """Measure the matrix product's ceiling before, in the middle and after."""
    profiled: int = 0
    """Steps under the profiler, after the measured ones."""
    cold_store: bool = False
    """Keep the store's files out of the page cache while training reads them."""


def run_timed(config: TrainConfig, timing: Timing) -> list[dict[str, Any]]:
    """Train by the real launcher and loop; returns what each rank measured, with the records of the run."""
    from manifests.commit import latest, read
    from manifests.launch import LaunchSpec, run_workers
    from manifests.runs import recorded
    from shared.atomic import write_json
    from stage2_train import launch_train

    run_dir = config.run_dir()
    run = launch_train.check(config)
    started = time.monotonic()
    with recorded(run_dir, "train", run["config"]) as identifier:
        launch_train.open_run(run_dir, run, config)
        write_json(run_dir / TIMING_FILE, to_dict(timing))
        run_workers(
            LaunchSpec(
                run_dir=run_dir,
                role="train",
                entry="stage2_train.benchmarks.timed_run:main",
                num_workers=config.nproc,
                environment={"DFLASH_RUN_ID": identifier},
                hang_limit_scale=0.0,  # a profiled step takes what it takes
            )
        )
    metrics = read(run_dir, "metrics")
    losses = [record for record in metrics if (record["split"], record["name"]) == ("train", "loss")]
    found = [json.loads(_result(run_dir, rank).read_text()) for rank in range(config.nproc)]
    more = {
        "wall_s": time.monotonic() - started,
        "metrics": means([record for record in metrics if record["global_step"] > SETTLED]),
        "losses": {step: record["value"] for step, record in latest(losses, "global_step").items()},
        "events": {
            record["event"]: {"said": record["message"], **record["detail"]} for record in read(run_dir, "events")
        },
    }
    return [{**result, **more} for result in found]


def means(metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over log lines of every metric, by split/name."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in metrics:
        values[f"{record['split']}/{record['name']}"].append(record["value"])
    return {name: statistics.mean(found) for name, found in values.items()}


def frozen_bytes(engine: Engine) -> int:
    """Bytes of the target's tables that lie where the step runs; a tied table counts once."""
    tables = {table.data_ptr(): table for table in (engine.embed_tokens, engine.head.weight)}
    return sum(table.nbytes for table in tables.values() if table.device.type == engine.device.type)


def _result(run_dir: Path, rank: int) -> Path:
    return run_dir / f"timing-{rank}.json"


def main(run_dir: Path, rank: int, world_size: int) -> None:
    """One worker: stage2_train.train.main with a stopwatch; leaves its measurements in RUN/timing-RANK.json."""
    from shared.atomic import write_json
    from stage2_train.benchmarks.stopwatch import Stopwatch, kept_cold
    from stage2_train.config import TrainConfig
    from stage2_train.distributed import pick_device, process_group, run_id
    from stage2_train.pinned_store import read_run
    from stage2_train.train import train
    from stage2_train.training_parts import set_up

    run = read_run(run_dir)
    config = from_dict(TrainConfig, run["config"])
    timing = from_dict(Timing, json.loads((run_dir / TIMING_FILE).read_text()))
    began = time.perf_counter()
    with process_group(rank, world_size, pick_device(config.device)) as ranks:
        parts = set_up(run_dir, run, ranks, run_id())
        watch = Stopwatch(parts.stepper, timing)
        store = Path(config.store) if timing.cold_store and rank == 0 else None
        with kept_cold(store), contextlib.suppress(Enough):
            train(dataclasses.replace(parts, stepper=watch))
        result = watch.result() | {
            "set_up_s": watch.rehearsed - began,
            "parameters": sum(parameter.numel() for parameter in parts.drafter.parameters()),
            "attention": parts.engine.attention,
            "frozen_bytes": frozen_bytes(parts.engine),
        }
        write_json(_result(run_dir, rank), result)
