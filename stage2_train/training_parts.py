"""What a run is made of in one process: drafter, optimizer, data, records, and the target's frozen tables.

Called by train.py before its loop. The same on every rank except which rows it takes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from manifests.commit import Ledger
from manifests.records import EventRecord
from shared import phases
from shared.config import from_dict
from shared.errors import ConfigRefused
from shared.reporter import Report, unreported
from shared.store import TeacherStore
from stage2_train import warm_start
from stage2_train.checkpoint_folder import newest_complete, read_info
from stage2_train.config import TrainConfig
from stage2_train.data import BatchBuilder, Shapes, Share
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig
from stage2_train.gradient import FlatGradient, Gradient
from stage2_train.loss import Head
from stage2_train.objective import Engine
from stage2_train.optimizers import Optimizer, make_optimizer
from stage2_train.pinned_store import reopen
from stage2_train.selection import select
from stage2_train.sharding import ShardedGradient, shard
from stage2_train.step import Stepper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, in one process."""

    config: TrainConfig
    run: dict[str, Any]
    run_dir: Path
    run_id: str
    ranks: Ranks
    drafter: Drafter
    optimizer: Optimizer
    engine: Engine
    share: Share
    stepper: Stepper
    builder: BatchBuilder
    heldout: BatchBuilder | None
    ledger: Ledger

    def event(self, event: str, message: str, **detail: Any) -> None:
        """Log a fact on every rank and record it once."""
        logger.info("%s: %s %s", event, message, detail or "")
        if self.ranks.rank == 0:
            self.ledger.append(EventRecord(run_id=self.run_id, event=event, message=message, detail=detail))


def set_up(run_dir: Path, run: dict[str, Any], ranks: Ranks, identifier: str, report: Report = unreported) -> Parts:
    """Model, optimizer, data and records; the same on every rank except which rows it takes. Tells `report` the bytes
    loaded, of the target's tables and the checkpoint, which train.py puts in place.
    """
    report(phases.LOAD, 0, None, "bytes")
    config = from_dict(TrainConfig, run["config"])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    geometry = DrafterConfig.from_hf_config(run["drafter"])
    store = reopen(config.store, run, run_dir)
    tables, state = bytes_to_load(run_dir, store)
    report(phases.LOAD, 0, tables + state, "bytes")
    engine = make_engine(config, geometry, store.load_head(), ranks.device, store.identity.get("dtype"))
    report(phases.LOAD, tables, tables + state, "bytes")
    drafter = Drafter(geometry).initialise(config.seed).recompute_layers(config.activation_checkpointing)
    start = warm_start.begin(drafter, run, run_dir)
    gradient = _place(drafter, config, engine, ranks)
    optimizer = make_optimizer(config.optimizer, gradient, ranks, config.learning_rate, config.weight_decay)
    shapes = Shapes(
        max_length=config.max_length,
        anchors=config.anchors,
        block_size=config.block_size,
        feature_size=len(geometry.target_layer_ids) * geometry.target_hidden_size,
        objective=engine.objective,
    )
    pinned = ranks.device.type == "cuda"
    documents, left_out = select(store, "train")
    held, _ = select(store, "heldout")
    share = Share(
        batch_rows=config.batch_rows,
        rows_per_pass=config.rows_per_pass(ranks.world_size, ranks.device.type),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    parts = Parts(
        config=config,
        run=run,
        run_dir=run_dir,
        run_id=identifier,
        ranks=ranks,
        drafter=drafter,
        optimizer=optimizer,
        engine=engine,
        share=share,
        builder=BatchBuilder(store, documents, shapes, config.seed, pinned=pinned, readers=config.reader_threads),
        heldout=BatchBuilder(
            store,
            held[: config.heldout_documents],
            # Always against the text: decoding is played back on it, whatever the labels of training are.
            replace(shapes, objective=replace(engine.objective, labels="data")),
            config.seed,
            pinned=pinned,
            readers=config.reader_threads,
        )
        if held
        else None,
        stepper=Stepper(drafter, optimizer, gradient, engine, ranks, config),
        ledger=Ledger(run_dir, f"train-{identifier}-{ranks.rank}"),
    )
    _announce(parts, len(held), left_out)
    if start is not None:
        parts.event("warm start", f"first weights from {start['path']}", **start)
    return parts


def bytes_to_load(run_dir: Path, store: TeacherStore) -> tuple[int, int]:
    """Bytes of the target's tables, and of the checkpoint or the weights that training goes on from."""
    head = store.target_dir / "head.safetensors"
    newest, _ = newest_complete(run_dir)
    return (
        head.stat().st_size if head.is_file() else 0,
        0 if newest is None else sum(read_info(newest)["files"].values()),
    )


def _place(drafter: Drafter, config: TrainConfig, engine: Engine, ranks: Ranks) -> Gradient:
    """Put the drafter on this rank's device, whole or in shares; returns what the optimizer works on."""
    if config.parallel == "fsdp":
        shard(drafter, ranks, engine.dtype)
        return ShardedGradient(drafter, ranks)
    return FlatGradient(drafter.to(ranks.device), ranks)


def _announce(parts: Parts, held: int, left_out: int) -> None:
    config, engine, documents = parts.config, parts.engine, parts.builder.documents
    cut = int((documents.length > config.max_length).sum())
    parts.event(
        "data",
        f"{len(documents)} training and {held} held-out documents",
        documents=len(documents),
        tokens=int(documents.length.sum()),
        blocks=len(parts.builder.store.blocks),
        snapshot=parts.builder.store.snapshot,
        left_out_unsupervised=left_out,
        longer_than_a_row=cut,
    )
    parts.event(
        "engine",
        f"{engine.attention} attention, {engine.dtype}, {engine.device}, {parts.ranks.world_size} processes",
        attention=engine.attention,
        dtype=str(engine.dtype),
        device=str(engine.device),
        world_size=parts.ranks.world_size,
        parameters=sum(p.numel() for p in parts.drafter.parameters()),
        threads=torch.get_num_threads(),
    )
    if not held:
        parts.event("no held-out documents", "no acceptance estimate is made while training")


def make_engine(
    config: TrainConfig,
    geometry: DrafterConfig,
    tables: dict[str, torch.Tensor],
    device: torch.device,
    target_dtype: str | None = "bfloat16",
) -> Engine:
    """Kernel, dtype and the target's frozen tables; `target_dtype` is what the store's target ran in.

    Raises ConfigRefused for a kernel the device cannot train with.
    """
    attention = ("flex" if device.type == "cuda" else "sdpa") if config.attention == "auto" else config.attention
    if attention == "flex" and device.type == "cpu":
        raise ConfigRefused("--attention flex on a CPU: flex_attention has no backward there; use sdpa or auto")
    names = {
        "auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
    }
    dtype = names[config.dtype]
    for name, tensor in tables.items():
        if name != "norm" and tuple(tensor.shape) != (geometry.vocab_size, geometry.hidden_size):
            raise ConfigRefused(
                f"the store's {name} is {tuple(tensor.shape)}, the drafter needs "
                f"{(geometry.vocab_size, geometry.hidden_size)}"
            )
    embed = tables["embed_tokens"].to(device, dtype)
    head = embed if tables["lm_head"] is tables["embed_tokens"] else tables["lm_head"].to(device, dtype)
    return Engine(
        embed_tokens=embed,
        head=Head(head, geometry.output_multiplier, geometry.final_logit_softcapping),
        objective=replace(config.objective(), rounded_logits=target_dtype not in ("bfloat16", None)),
        attention=attention,
        dtype=dtype,
        device=device,
    )
