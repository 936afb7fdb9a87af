"""The main loop of stage 1: one process, one replica of the target, its share of the blocks that are still to do.

Started by manifests/supervise.py as `stage1_extract.worker:main`. Reads STORE/work.json, which
stage1_extract/extract.py wrote; the forward is stage1_extract/teacher.py, what becomes of its output
stage1_extract/block_writer.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared import phases
from shared.config import from_dict
from shared.errors import Interrupted
from shared.reporter import Reporter, Ticks
from shared.rows import PreparedRows
from shared.store import read_identity
from shared.target import load_target, resolve_device, watch_layers
from shared.worker import stop_requested
from stage1_extract.block_encoder import BlockEncoder
from stage1_extract.block_writer import BlockWriter
from stage1_extract.config import ExtractConfig
from stage1_extract.disk_plan import StoreShape
from stage1_extract.headroom import Headroom
from stage1_extract.plan import Plan, committed_among, is_exported, load_plan, make_batches
from stage1_extract.target_export import export_target
from stage1_extract.teacher import Teacher
from stage1_extract.verify import verify_document

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """What the parent asks of all workers; device and dtype are resolved, ids are chosen."""

    config: ExtractConfig
    target_layer_ids: tuple[int, ...]
    device: str
    dtype: Any
    remaining: tuple[int, ...]
    plan: Plan

    @classmethod
    def read(cls, store: Path) -> Work:
        """From work.json and plan.json."""
        work = json.loads((store / "work.json").read_text(encoding="utf-8"))
        plan = load_plan(store)
        assert plan is not None, "the parent writes the plan before it starts workers"
        return cls(
            from_dict(ExtractConfig, work["config"]),
            tuple(work["target_layer_ids"]),
            work["device"],
            work["dtype"],
            tuple(work["remaining"]),
            plan,
        )


def device_of(device: str, rank: int) -> str:
    """`cuda` means one GPU per process, round robin; anything else is taken as it is."""
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" and torch.cuda.is_available() else device


def main(store: Path, rank: int, world_size: int) -> None:
    """Make this worker's blocks, all but those that an earlier attempt of it has committed. Raises Interrupted between
    blocks when asked to stop; other errors as they come.
    """
    reporter = Reporter(store, "extract", rank)
    work = Work.read(store)
    assigned = work.remaining[rank::world_size]
    committed = committed_among(store, assigned)
    reporter.saved(len(committed))
    mine = [block for block in assigned if block not in committed]
    exporting = rank == 0 and not is_exported(store)
    if not mine and not exporting:
        return
    rows = PreparedRows.open(work.config.data)
    device = device_of(work.device, rank)
    resolve_device(device)  # a device that is not there is refused here in one line
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    target = load_target(work.config.target, dtype=work.dtype, device=device, report=reporter.update)
    logger.info("target on %s as %s; %d blocks to do", target.device, target.dtype, len(mine))
    lengths = rows.lengths
    progress = _Progress(reporter, assigned, committed, work.plan, lengths)
    headroom = Headroom(
        store=store,
        shape=StoreShape.of_identity(read_identity(store)),
        lengths=lengths,
        plan=work.plan,
        remaining=work.remaining,
        workers=world_size,
        reserve_gb=work.config.disk_reserve_gb,
        wait=work.config.on_disk_full == "wait",
        report=progress.waiting,
        over=progress.show,
    )
    if exporting:
        headroom.patiently("the target", lambda: export_target(target, store))

    watch_layers(target, Ticks(progress.ticked))
    teacher = Teacher(target, work.target_layer_ids, work.config.topk)
    encoder = BlockEncoder(work.target_layer_ids, work.config.precision, work.config.resolved_last_hidden)
    # Until the first batch is through: kernels of hybrid targets are tuned on it, for minutes and without a word.
    progress.show(phases.WARM_UP)
    with BlockWriter(store, rank, rows, encoder, headroom, progress.told) as writer:
        for number, block in enumerate(mine):
            if stop_requested():
                writer.wait()
                raise Interrupted(
                    f"extract stopped after {number} of this worker's {len(mine)} blocks; run the same command again "
                    "to go on"
                )
            headroom.require(block)
            documents = work.plan.documents_of(block)
            writer.begin(block)
            for batch in make_batches(lengths[documents].tolist(), work.config.batch_tokens):
                indices = [documents[i] for i in batch]
                writer.add(indices, teacher([rows.document(index)[0] for index in indices]))
                progress.add(int(lengths[indices].sum()))
            writer.end()
            if number == 0:
                # Early, not at the end: a kernel that mixes up batch rows must not cost a night.
                writer.wait()
                verify_document(store, block, writer.committed[block], target, work.target_layer_ids)
        progress.show(phases.DRAIN)
    progress.show(phases.DONE)


class _Progress:
    """What this worker has done of all the blocks assigned to it, whichever attempt of it did them."""

    def __init__(
        self, reporter: Reporter, assigned: Sequence[int], committed: Collection[int], plan: Plan, lengths: Any
    ) -> None:
        tokens = {block: int(lengths[plan.documents_of(block)].sum()) for block in assigned}
        self._reporter, self._total = reporter, sum(tokens.values())
        self._done = sum(tokens[block] for block in committed)
        self._before = self._blocks = len(committed)
        self._written = self._ticks = 0.0
        self._phase = phases.LOAD

    def show(self, phase: str = "") -> None:
        """Report, in another phase if one is named."""
        self._phase = phase or self._phase
        self._reporter.update(self._phase, self._done, self._total, "tokens", blocks=self._blocks)

    def add(self, tokens: int) -> None:
        """Count what the target has done; from the first of it on, steps have the limit of steps."""
        self._done += tokens
        self.show(phases.STEP)

    def told(self, committed: int, written: int) -> None:
        """What the writer's threads say: their bytes are progress too while the target waits for them."""
        self._blocks, self._written = self._before + committed, written
        self._reporter.inner(self._written + self._ticks)
        self._reporter.saved(self._blocks)

    def ticked(self, ticks: float) -> None:
        """What the target says inside a forward."""
        self._ticks = ticks
        self._reporter.inner(self._written + self._ticks)

    def waiting(self, free: str, needed: str) -> None:
        """Report a disk without room."""
        self._reporter.update(
            phases.WAIT_FOR_ROOM, self._done, self._total, "tokens", free=free, needed=needed, blocks=self._blocks
        )
