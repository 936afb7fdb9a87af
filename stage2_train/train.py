"""The training loop, read top-down: set up, warm up, then evaluate? save? stop? step, log.

Each process runs `main` (shared.worker starts it) or `train_under_torchrun`. Everything that must survive a restart is
in `state`, one dict. Read training_parts.py (what it uses), step.py (one step), objective.py (the loss) next.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from manifests.runs import recorded
from shared.atomic import remove_partials
from shared.config import from_dict
from shared.errors import CheckpointMismatch, ConfigRefused, Interrupted
from shared.progress import Reporter
from shared.worker import install_stop_signals, stop_requested
from stage2_train import checkpoint, compiled, launch_train
from stage2_train.checkpoint_folder import newest_complete
from stage2_train.config import TrainConfig
from stage2_train.data import Prefetcher, stream
from stage2_train.distributed import environment_ranks, pick_device, process_group, run_id
from stage2_train.estimate import estimate
from stage2_train.pinned_store import read_run
from stage2_train.step import Window, memory_bytes
from stage2_train.training_parts import Parts, set_up

logger = logging.getLogger(__name__)


def main(run_dir: Path, rank: int, world_size: int) -> None:
    """One worker: run the training that run.json in `run_dir` describes, to its end or to a stop."""
    run = read_run(run_dir)
    config = from_dict(TrainConfig, run["config"])
    with process_group(rank, world_size, pick_device(config.device)) as ranks:
        train(set_up(run_dir, run, ranks, run_id()))


def train_under_torchrun(config: TrainConfig) -> None:
    """Be one of torchrun's processes: rank 0 checks and writes run.json, then all train."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    install_stop_signals()
    rank, world_size = environment_ranks()
    if config.batch_rows % world_size:
        raise ConfigRefused(f"--batch-rows {config.batch_rows} is not a multiple of the {world_size} processes")
    run_dir = config.run_dir()
    with process_group(rank, world_size, pick_device(config.device)) as ranks:
        if rank > 0:
            ranks.barrier()
            train(set_up(run_dir, read_run(run_dir), ranks, run_id()))
            return
        run = launch_train.check(config)
        with recorded(run_dir, "train", run["config"]) as identifier:
            launch_train.open_run(run_dir, run, config)
            ranks.barrier()
            train(set_up(run_dir, run, ranks, identifier))


def fresh_state(block_size: int) -> dict[str, Any]:
    """Every variable of the loop that must survive a restart, as JSON values."""
    return {
        "global_step": 0,
        "epoch": 0,
        "batch": 0,  # the next batch
        "evaluated_at": None,
        "acceptance_length_estimate": None,
        "tokens": 0,
        "documents_without_anchors": 0,
        "steps_without_labels": 0,
        "window": Window.empty(block_size),
    }


def resume(parts: Parts) -> dict[str, Any]:
    """The newest complete checkpoint put in place, or a fresh state."""
    newest, ignored = newest_complete(parts.run_dir)
    for item in ignored:
        parts.event("checkpoint ignored", f"{item.path.name}: {item.reason}")
    if parts.ranks.rank == 0:
        remove_partials(parts.run_dir / "checkpoints")
    if newest is None:
        return fresh_state(parts.config.block_size)
    state = checkpoint.restore(newest, parts.drafter, parts.optimizer)
    if state["global_step"] > parts.run["total_steps"]:
        raise CheckpointMismatch(f"{newest} is at step {state['global_step']} of {parts.run['total_steps']}")
    parts.event("resumed", f"from {newest.name}", global_step=state["global_step"])
    return state


def train(parts: Parts) -> None:
    """The loop. Raises Interrupted after a requested stop (a checkpoint is saved), NonFinite before a bad update."""
    config, ranks, total = parts.config, parts.ranks, int(parts.run["total_steps"])
    reporter = Reporter(parts.run_dir, "train", ranks.rank)
    reporter.update("set up", 0, total, "steps")
    state = resume(parts)
    if parts.engine.attention == "flex":
        expected = compiled.compile_layers(parts.drafter)
        batch = parts.builder.build(((),) * parts.share.rows_per_pass, 0)
        parts.event("compiled", "decoder layer", **compiled.warm_up(lambda: parts.stepper.rehearse(batch), expected))
    batches = Prefetcher(stream(parts.builder, parts.share, state["epoch"], state["batch"]))
    shown: dict[str, float] = {}
    saved_at, window_started = state["global_step"] if state["global_step"] else None, time.perf_counter()
    try:
        while True:
            step = state["global_step"]
            last, stop = step >= total, ranks.any(stop_requested())
            if (step % config.eval_every == 0 or last) and state["evaluated_at"] != step and (last or not stop):
                reporter.update("estimate", step, total, "steps", **shown)
                shown |= _evaluate(parts, state)
            if (step % config.save_every == 0 or last or stop) and step > 0 and saved_at != step:
                _save(parts, state)
                saved_at = step
            if last:
                break
            if stop:
                raise Interrupted(
                    f"training stopped on request at step {step} of {total}, "
                    f"{'checkpoint saved' if step else 'nothing to save yet'}; the same command continues"
                )
            with compiled.contract(f"step {step}"):
                parts.stepper.step(state, next(batches), total)
            reporter.update("train", state["global_step"], total, "steps", **shown)
            if (
                state["global_step"] == 1
                or state["global_step"] % config.log_every == 0
                or state["global_step"] == total
            ):
                numbers = Window.read(state["window"], config.block_size)
                state["window"] = Window.empty(config.block_size)
                seconds, window_started = time.perf_counter() - window_started, time.perf_counter()
                numbers |= {
                    "tokens_per_second": numbers.pop("tokens") / seconds,
                    "memory_bytes": memory_bytes(ranks.device),
                }
                parts.metrics(state, "train", numbers)
                logger.info("step %d of %d: %s", state["global_step"], total, _headline(numbers))
                shown |= {
                    name: numbers[key]
                    for name, key in (("loss", "loss"), ("accept", "acceptance_length_estimate"))
                    if key in numbers
                }
    finally:
        batches.close()
    reporter.update("done", total, total, "steps", **shown)


def _evaluate(parts: Parts, state: dict[str, Any]) -> dict[str, float]:
    state["evaluated_at"] = state["global_step"]
    if parts.heldout is None:
        return {}
    started = time.perf_counter()
    with compiled.contract("the held-out estimate"):
        found = estimate(parts.drafter, parts.heldout, parts.share, parts.engine, parts.ranks)
    if not found:
        return {}
    state["acceptance_length_estimate"] = found["acceptance_length_estimate"]
    parts.metrics(state, "heldout", found | {"seconds": time.perf_counter() - started})
    logger.info("held-out estimate at step %d: %s", state["global_step"], _headline(found))
    return {"held-out": found["acceptance_length_estimate"]}


def _headline(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in numbers.items() if "_slot_" not in name)


def _save(parts: Parts, state: dict[str, Any]) -> None:
    if parts.ranks.rank > 0:
        return
    fresh = state["evaluated_at"] == state["global_step"]
    snapshot = checkpoint.Snapshot(
        loop_state=state,
        run={key: parts.run[key] for key in ("config", "drafter", "store", "total_steps")},
        acceptance_length_estimate=state["acceptance_length_estimate"] if fresh else None,
    )
    folder = checkpoint.save(parts.run_dir, parts.drafter, parts.optimizer, snapshot)
    checkpoint.record(parts.run_dir, folder, parts.ledger, parts.run_id, snapshot, parts.config.keep)
    logger.info("saved %s", folder)
