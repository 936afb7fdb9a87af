"""The training loop, read top-down: set up, warm up, then evaluate? save? stop? step, log.

Each process runs `main` (shared.worker starts it) or `train_under_torchrun`. Everything that must survive a restart is
in `state`, one dict. Read training_parts.py (what it uses), step.py (one step), objective.py (the loss) next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from manifests.runs import recorded
from shared import phases
from shared.atomic import remove_partials
from shared.config import from_dict
from shared.errors import CheckpointMismatch, ConfigRefused, Interrupted, NothingLeft
from shared.progress import say
from shared.reporter import Reporter, Ticks
from shared.stop_file import forget_stop, read_stop
from shared.worker import Worker, stop_requested
from stage2_train import checkpoint, launch_train
from stage2_train.checkpoint_folder import folder_of, newest_complete, read_info
from stage2_train.compile_warm_up import compiled_regions
from stage2_train.compiled import Contract
from stage2_train.config import TrainConfig
from stage2_train.data import Prefetcher, stream
from stage2_train.device_feed import Feed, make_feed
from stage2_train.distributed import environment_ranks, pick_device, process_group, run_id
from stage2_train.estimate import StopAsked, estimate
from stage2_train.metrics import Metrics, headline
from stage2_train.pinned_store import read_run
from stage2_train.selection import nothing_to_learn
from stage2_train.sending import send_beside
from stage2_train.step import Window
from stage2_train.training_parts import Parts, set_up

logger = logging.getLogger(__name__)
NOT_PROMISED = (
    "started by torchrun or Slurm, not by our supervisor: nothing is restarted, a hang is not noticed, and of a kill "
    "only a silent heartbeat remains; `dflash status`, `why`, `stop` and `logs --stacks` work"
)


def main(run_dir: Path, rank: int, world_size: int) -> None:
    """One worker: run the training that run.json in `run_dir` describes, to its end or to a stop."""
    reporter = Reporter(run_dir, "train", rank)
    run = read_run(run_dir)
    config = from_dict(TrainConfig, run["config"])
    reporter.update(phases.RENDEZVOUS, 0, world_size, "ranks")
    with process_group(rank, world_size, pick_device(config.device)) as ranks:
        train(set_up(run_dir, run, ranks, run_id(), reporter.update), reporter)


def train_under_torchrun(config: TrainConfig) -> None:
    """Be one of torchrun's (or Slurm's) processes: rank 0 checks and writes run.json, then all train."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rank, world_size = environment_ranks()
    run_dir = config.run_dir()
    worker = Worker(run_dir, "train", rank)
    worker.take_signals(look=partial(read_stop, run_dir))
    config.require_processes(world_size)
    with process_group(rank, world_size, pick_device(config.device)) as ranks:
        if rank > 0:
            if ranks.any(False):
                raise ConfigRefused("rank 0 could not begin this run: its one line, on the first node, says why")
            with worker.attended() as reporter:
                train(set_up(run_dir, read_run(run_dir), ranks, run_id(), reporter.update), reporter)
            return
        with ExitStack() as ending:
            try:
                run = launch_train.check(config)
                identifier = ending.enter_context(recorded(run_dir, "train", run["config"]))
                launch_train.open_run(run_dir, run, config)
                forget_stop(run_dir)
            except BaseException:
                ranks.any(True)  # the others must not wait for a run that does not begin
                raise
            ranks.any(False)
            say(NOT_PROMISED)
            with worker.attended() as reporter:
                train(set_up(run_dir, run, ranks, identifier, reporter.update), reporter)


def fresh_state(drafts: int) -> dict[str, Any]:
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
        "window": Window.empty(drafts),
    }


def resume(parts: Parts, told: Callable[[int], None] = lambda read: None) -> dict[str, Any]:
    """The newest complete checkpoint put in place, or a fresh state; `told` hears how many of its bytes are read."""
    newest, ignored = newest_complete(parts.run_dir)
    for item in ignored:
        parts.event("checkpoint ignored", f"{item.path.name}: {item.reason}")
    steps = parts.ranks.gather([-1.0 if newest is None else read_info(newest)["global_step"]])
    if len({step for (step,) in steps}) > 1:
        raise CheckpointMismatch(
            f"the processes see different newest checkpoints in {parts.run_dir}, at steps "
            f"{[int(step) for (step,) in steps]}; --run must be one folder that all nodes share"
        )
    if parts.ranks.rank == 0:
        remove_partials(parts.run_dir / "checkpoints")
    if newest is None:
        if begun := parts.run.get("continues_at", 0):
            raise CheckpointMismatch(
                f"{parts.run_dir} held a checkpoint of step {begun} when this run was started and holds none now; "
                "bring it back, or run the same command again to begin at step 0"
            )
        return fresh_state(parts.engine.objective.drafts)
    state = checkpoint.restore(newest, parts.drafter, parts.optimizer, told)
    if state["global_step"] > parts.run["total_steps"]:
        raise CheckpointMismatch(f"{newest} is at step {state['global_step']} of {parts.run['total_steps']}")
    parts.event("resumed", f"from {newest.name}", global_step=state["global_step"])
    return state


def train(parts: Parts, reporter: Reporter | None = None) -> None:
    """Compile, then the loop. Raises Interrupted after a requested stop (a checkpoint is saved), NonFinite before a bad
    update, NothingLeft when nothing had a label, CompileContract when a region does not compile as declared.
    """
    reporter = reporter or Reporter(parts.run_dir, "train", parts.ranks.rank)
    state = resume(parts, reporter.inner)
    if state["global_step"]:
        reporter.saved(state["global_step"])
    _, _, loaded, unit = reporter.where
    reporter.update(phases.LOAD, loaded or 0, loaded, unit)
    with compiled_regions(parts, report=reporter.update) as contract:
        _loop(parts, state, reporter, contract)


def _watch(parts: Parts, tick: Callable[[], None], slow: bool) -> AbstractContextManager[object]:
    """Have `tick` called all along a step and an estimate; where steps are slow, within what this returns.

    SmolLM2's drafter takes two CPU cores minutes for a step, a layer of one for a 0.6B target 20 s, Muon's iterations
    half a minute: work, and no hang. On a GPU no operation is that long, and a mode would stand in the compiler's way.
    """
    parts.stepper.tick = parts.engine.scorer.tick = tick
    if parts.heldout is not None:
        parts.heldout.tick = tick
    return _EveryOperation(tick) if slow and parts.ranks.device.type == "cpu" else nullcontext()


class _EveryOperation(TorchDispatchMode):
    """Calls `tick` before every operation, those of backward too; some microseconds each."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self._tick = tick

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tick()
        return func(*args, **(kwargs or {}))


def _loop(parts: Parts, state: dict[str, Any], reporter: Reporter, contract: Contract) -> None:
    config, ranks, total = parts.config, parts.ranks, int(parts.run["total_steps"])
    metrics = Metrics(parts, state)
    pace = metrics.pace()
    send_beside(parts, metrics.backward_seconds())
    working = _watch(parts, Ticks(reporter.inner), ranks.any(bool(pace)))
    batches = stream(parts.builder, parts.share, state["epoch"], state["batch"])
    reading = Prefetcher(batches, config.prefetch, lambda: reporter.inner(parts.builder.documents_read))
    feed = make_feed(reading, ranks.device)
    shown = dict(pace)
    saved_at = state["global_step"] if state["global_step"] else None
    stop = ranks.any(stop_requested())
    metrics.start(state, feed)
    try:
        while True:
            step = state["global_step"]
            last = step >= total
            _require_labels(parts, state, last)
            if (step % config.eval_every == 0 or last) and state["evaluated_at"] != step and (last or not stop):
                reporter.update(phases.EVAL, step, total, "steps", **shown)
                try:
                    with metrics.outside(), working:
                        found = _evaluate(parts, state, metrics, contract, reporter)
                except StopAsked:  # an estimate takes minutes on a CPU; the next start makes it anew
                    found, stop = {}, True
                shown |= found
                if found and saved_at == step:  # a stop saves without an estimate: the checkpoint gets its score now
                    _record(parts, state, folder_of(parts.run_dir, step))
            if (step % config.save_every == 0 or last or stop) and step > 0 and saved_at != step:
                reporter.update(phases.CHECKPOINT, step, total, "steps", **shown)
                with metrics.outside():
                    _save(parts, state, reporter)
                saved_at = step
            if last:
                contract.check("the end of training")
                break
            if stop:
                raise Interrupted(
                    f"training stopped on request at step {step} of {total}, "
                    f"{'checkpoint saved; the same command continues' if step else 'nothing to save yet'}"
                )
            reporter.update(phases.STEP, step, total, "steps", **shown)
            with working:
                stop = _step(parts, state, feed, metrics, contract)
            if state["global_step"] == step:  # given up for the stop
                continue
            if saved_at is not None:  # rank 0 has recorded it: it took part in a step since
                reporter.saved(saved_at)
            if (
                state["global_step"] == 1
                or state["global_step"] % config.log_every == 0
                or state["global_step"] == total
            ):
                shown = {name: value for name, value in shown.items() if name not in pace} | metrics.log(state, feed)
                contract.check(f"the end of step {step}")
        reporter.update(phases.DRAIN, total, total, "steps", **shown)
    finally:
        feed.close()
        metrics.close()
    reporter.update(phases.DONE, total, total, "steps", **shown)


def _require_labels(parts: Parts, state: dict[str, Any], last: bool) -> None:
    """Raise NothingLeft when a whole epoch, or a whole run that is shorter, had not one label: it trained nothing.

    The check before the start looks at few documents. Labels are counted over all ranks, so that all raise alike.
    """
    steps = state["global_step"]
    if 0 < steps == state["steps_without_labels"] and (state["epoch"] > 0 or last):
        said = nothing_to_learn(parts.config.store, parts.config.max_length)
        raise NothingLeft(f"none of the first {steps:,} steps had a label: {said}")


def _step(parts: Parts, state: dict[str, Any], feed: Feed, metrics: Metrics, contract: Contract) -> bool:
    """One step; returns whether any rank was asked to stop. The batch's memory is free again when this returns."""
    with contract.watch(f"step {state['global_step']}"):
        rows = next(feed)
        step, total = state["global_step"], int(parts.run["total_steps"])
        stop: bool = parts.stepper.step(state, rows, total, stop_requested)
    if state["global_step"] > step:
        metrics.add(rows.parts)
    return stop


def _evaluate(
    parts: Parts, state: dict[str, Any], metrics: Metrics, contract: Contract, reporter: Reporter
) -> dict[str, float]:
    step = state["global_step"]
    if parts.heldout is None:
        state["evaluated_at"] = step
        return {}
    started, last = time.perf_counter(), step >= int(parts.run["total_steps"])
    team = (parts.share, parts.engine, parts.ranks)
    with contract.watch("the held-out estimate"):
        found = estimate(parts.drafter, parts.heldout, *team, reporter.inner, step=step, to_the_end=last)
    state["evaluated_at"] = step
    if not found:
        return {}
    state["acceptance_length_estimate"] = found["acceptance_length_estimate"]
    metrics.record(state, {"heldout": found | {"seconds": time.perf_counter() - started}})
    logger.info("held-out estimate at step %d: %s", step, headline(found))
    return {"held-out": found["acceptance_length_estimate"]}


def _save(parts: Parts, state: dict[str, Any], reporter: Reporter) -> None:
    if parts.ranks.rank > 0:
        checkpoint.contents(parts.drafter, parts.optimizer)  # rank 0 asks for this rank's shares, if there are any
        return
    folder = checkpoint.save(parts.run_dir, parts.drafter, parts.optimizer, _snapshot(parts, state), reporter.inner)
    _record(parts, state, folder)
    reporter.saved(state["global_step"])
    logger.info("saved %s", folder)


def _snapshot(parts: Parts, state: dict[str, Any]) -> checkpoint.Snapshot:
    fresh = state["evaluated_at"] == state["global_step"]
    return checkpoint.Snapshot(
        loop_state=state,
        run={key: value for key, value in parts.run.items() if key in checkpoint.RUN_KEYS},
        acceptance_length_estimate=state["acceptance_length_estimate"] if fresh else None,
    )


def _record(parts: Parts, state: dict[str, Any], folder: Path) -> None:
    """Rank 0 says that a checkpoint is done, or once more what it is worth: the newest record of a folder counts."""
    if parts.ranks.rank == 0:
        checkpoint.record(parts.run_dir, folder, parts.ledger, parts.run_id, _snapshot(parts, state), parts.config.keep)
