"""`dflash plan`: put sizes, disk and break-even of a store together and say what they mean.

Called by stage1_extract/cli_plan.py. Sizes are stage1_extract/disk_plan.py, hours and money break_even.py, inputs
plan_inputs.py; the tables are plan_tables.py. Writes nothing, apart from the probe of --measure-disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from shared.progress import tell
from stage1_extract.break_even import Costs, Workload, byte_hours, disk_needed, hours, money
from stage1_extract.config import PlanConfig, Precision, resolve_last_hidden
from stage1_extract.disk_plan import Size, StoreShape, StoreSize, dtype_bytes, store_size
from stage1_extract.disk_room import Room, measure_disk, require_room, reserve_of
from stage1_extract.extract import resolve_device, resolve_dtype
from stage1_extract.plan_inputs import Rate, TargetFacts, WorkFacts, target_facts, target_rate, work_facts
from stage1_extract.plan_tables import readable_number, render


@dataclass(frozen=True, slots=True)
class Option:
    """One precision: the size of the whole store, of what is still to be written, and the work."""

    precision: str
    last_hidden: str
    size: StoreSize
    left: StoreSize
    work: Workload


def run(config: PlanConfig) -> None:
    """Print the plan. Raises DiskFull after printing when the store asked for does not fit at --out."""
    target = target_facts(config)
    layer_ids = target.layer_ids(config)
    facts = work_facts(config, _identity(config, target, layer_ids))
    rate = target_rate(config, target)
    room = None if config.out is None else Room.at(config.out)
    disk = config.disk_gbps
    if config.measure_disk:
        assert config.out is not None, "PlanConfig refuses it"
        disk = measure_disk(config.out)
    options = [_option(config, target, facts, rate, disk, precision) for precision in get_args(Precision)]
    asked = next(option for option in options if option.precision == config.precision)
    reserve = Size() if config.out is None else reserve_of(config.out, config.disk_reserve_gb)
    report = _report(config, layer_ids, facts, rate, disk) | {
        "precisions": {option.precision: _figures(option, config.epochs) for option in options},
        "room": None if room is None else _room(asked.left.total + reserve, room),
        "verdict": verdict(asked, config.epochs),
    }
    tell(json.dumps(report, indent=2) if config.json else render(report))
    if config.out is not None and room is not None:
        require_room(config.out, asked.left.total, room, reserve)


def _identity(config: PlanConfig, target: TargetFacts, layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What a begun store must agree with, as far as a plan knows it."""
    return {
        "target_layer_ids": list(layer_ids),
        "num_hidden_layers": target.num_hidden_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "topk": config.topk,
        "precision": config.precision,
        "last_hidden": resolve_last_hidden(config.last_hidden, config.precision),
        "block_tokens": config.block_tokens,
    }


def _option(
    config: PlanConfig, target: TargetFacts, facts: WorkFacts, rate: Rate, disk: float | None, precision: Precision
) -> Option:
    shape = StoreShape(
        hidden_size=target.hidden_size,
        num_taps=len(target.layer_ids(config)),
        topk=config.topk,
        vocab_size=target.vocab_size,
        precision=precision,
        last_hidden=resolve_last_hidden(config.last_hidden, precision),
        tied=target.tied,
        head_dtype_bytes=dtype_bytes(resolve_dtype(config.dtype, resolve_device("auto"))),
        tokenizer_bytes=target.tokenizer_bytes,
    )
    size = store_size(shape, facts.blocks)
    train = config.train_tokens_per_second
    work = Workload(
        num_tokens=size.num_tokens,
        write_bytes=size.total.bytes,
        read_bytes_per_epoch=size.read_per_epoch,
        tokens_per_second=rate.per_process * config.shards,
        disk=None if disk is None else disk * 1e9,
        processes=config.shards,
        train_tokens_per_second=None if train is None else train * config.shards,
        gpu_price_per_hour=config.gpu_price_per_hour,
        disk_price_per_tb_month=config.disk_price_per_tb_month,
    )
    left = size if facts.left is facts.blocks else store_size(shape, facts.left, with_target=not facts.exported)
    return Option(precision, shape.last_hidden, size, left, work)


def _report(
    config: PlanConfig, layer_ids: tuple[int, ...], facts: WorkFacts, rate: Rate, disk: float | None
) -> dict[str, Any]:
    if disk is None:
        source = "unknown: give --disk-gbps, or --measure-disk with --out"
    else:
        source = "measured: 256 MB written and fsynced by one process" if config.measure_disk else "as given"
    return {
        "out": None if config.out is None else str(config.out),
        "tokens": facts.blocks.num_tokens,
        "documents": facts.blocks.num_documents,
        "blocks": facts.blocks.num_blocks,
        "blocks_left": facts.left.num_blocks,
        "target_layer_ids": list(layer_ids),
        "topk": config.topk,
        "precision": config.precision,
        "shards": config.shards,
        "epochs": config.epochs,
        "tokens_per_second": {"per_process": rate.per_process, "source": rate.source},
        "train_tokens_per_second": config.train_tokens_per_second,
        "disk_gbps": {"value": disk, "source": source},
    }


def _figures(option: Option, epochs: int) -> dict[str, Any]:
    size, work = option.size, option.work
    held, needed = byte_hours(work, epochs), disk_needed(work, epochs)
    return {
        "last_hidden": option.last_hidden,
        "arrays": {
            name: {"bytes": part.bytes, "bytes_per_token": part.bytes / size.num_tokens}
            for name, part in size.arrays.items()
        },
        "metadata_bytes": size.metadata.bytes,
        "target_bytes": size.target.bytes,
        "records_bytes": size.records.bytes,
        "bytes": size.total.bytes,
        "bytes_left": option.left.total.bytes,
        "bytes_allocated": size.total.allocated,
        "bytes_per_token": size.bytes_per_token,
        "files": size.total.files,
        "inodes": size.total.inodes,
        "write_gbps_needed": work.write_rate / 1e9,
        "compute_hours": work.compute_hours,
        "extract_hours": work.extract_hours,
        "read_bytes_per_epoch": work.read_bytes_per_epoch,
        "read_hours_per_epoch": work.read_hours,
        "terabyte_hours": None if held is None else held / 1e12,
        "disk_gbps_needed_to_pay": None if needed is None else needed / 1e9,
        "recompute_hours": epochs * work.recompute_epoch_hours,
        "hours": _costs(hours(work), epochs),
        "money": _costs(money(work), epochs),
    }


def _costs(costs: Costs | None, epochs: int) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {
        "store": costs.store(epochs),
        "recompute": costs.recompute(epochs),
        "cheaper_from_epochs": costs.cheaper_from(),
    }


def _room(needed: Size, room: Room) -> dict[str, Any]:
    return {
        "needed_bytes": needed.allocated,
        "free_bytes": room.bytes,
        "needed_inodes": needed.inodes,
        "free_inodes": room.inodes,
        "fits": room.lacks(needed) is None,
    }


def verdict(option: Option, epochs: int) -> str:
    """One sentence: store it or not, with both numbers, in hours and, when priced, in money."""
    times = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    in_hours, in_money = hours(option.work), money(option.work)
    if in_hours is None:
        needed = disk_needed(option.work, epochs)
        if needed is None:
            return f"The disk costs more than recomputing: at {times} no disk is fast enough to save hours."
        return (
            f"At {times} a {option.precision} store saves hours over recomputing if its disk gives more than "
            f"{needed / 1e9:.3g} GB/s, which is unknown."
        )
    parts = [_comparison(in_hours, epochs, "h")]
    if in_money is not None:
        parts.append(_comparison(in_money, epochs, "in money"))
    deciding = in_money or in_hours
    cheaper = deciding.store(epochs) < deciding.recompute(epochs)
    lead = "The store pays" if cheaper else "The disk costs more than recomputing"
    return f"{lead} at {times} ({option.precision}): {'; '.join(parts)}."


def _comparison(costs: Costs, epochs: int, unit: str) -> str:
    since = costs.cheaper_from()
    when = "never cheaper" if since is None else f"cheaper from {since} epoch{'' if since == 1 else 's'} on"
    numbers = f"{readable_number(costs.store(epochs))} against {readable_number(costs.recompute(epochs))} {unit}"
    return f"{numbers}, the store is {when}"
