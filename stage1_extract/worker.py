"""The main loop of stage 1: one process, one replica of the target, its share of the blocks that are still to do.

Started by shared/launch.py as `stage1_extract.worker:main`. Reads STORE/work.json (stage1_extract/extract.py wrote it);
the forward is stage1_extract/teacher.py, what becomes of its output stage1_extract/block_writer.py.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.config import from_dict
from shared.errors import Interrupted
from shared.progress import Reporter
from shared.rows import PreparedRows
from shared.store import read_identity
from shared.target import load_target, resolve_device
from shared.worker import stop_requested
from stage1_extract.block_encoder import BlockEncoder
from stage1_extract.block_writer import BlockWriter
from stage1_extract.config import ExtractConfig
from stage1_extract.disk_plan import StoreShape
from stage1_extract.headroom import Headroom
from stage1_extract.plan import Plan, is_exported, load_plan, make_batches
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
    """Make this worker's blocks. Raises Interrupted between blocks when asked to stop; other errors as they come."""
    work = Work.read(store)
    mine = work.remaining[rank::world_size]
    exporting = rank == 0 and not is_exported(store)
    if not mine and not exporting:
        return
    reporter = Reporter(store, "extract", rank)
    reporter.update("load target", 0, None, "tokens")
    rows = PreparedRows.open(work.config.data)
    device = device_of(work.device, rank)
    resolve_device(device)  # a device that is not there is refused here in one line
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    target = load_target(work.config.target, dtype=work.dtype, device=device)
    logger.info("target on %s as %s; %d blocks to do", target.device, target.dtype, len(mine))
    lengths = rows.lengths
    total = sum(int(lengths[work.plan.documents_of(block)].sum()) for block in mine)
    done = 0
    headroom = Headroom(
        store=store,
        shape=StoreShape.of_identity(read_identity(store)),
        lengths=lengths,
        plan=work.plan,
        remaining=work.remaining,
        workers=world_size,
        reserve_gb=work.config.disk_reserve_gb,
        wait=work.config.on_disk_full == "wait",
        report=lambda free, needed: reporter.update(
            "waiting for room", done, total, "tokens", free=free, needed=needed
        ),
    )
    if exporting:
        headroom.patiently("the target", lambda: export_target(target, store))

    teacher = Teacher(target, work.target_layer_ids, work.config.topk)
    encoder = BlockEncoder(work.target_layer_ids, work.config.precision, work.config.resolved_last_hidden)
    with BlockWriter(store, rank, rows, encoder, headroom) as writer:
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
                done += int(lengths[indices].sum())
                reporter.update("extract", done, total, "tokens", blocks=len(writer.committed))
            writer.end()
            if number == 0:
                # Early, not at the end: a kernel that mixes up batch rows must not cost a night.
                writer.wait()
                verify_document(store, block, writer.committed[block], target, work.target_layer_ids)
    reporter.update("extract", done, total, "tokens", blocks=len(writer.committed))
