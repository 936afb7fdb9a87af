"""The store's plan: which documents make up which block, and which blocks are still to do. Pure files, no torch.

A plan is made once per store and never depends on the number of workers; what is done is what the shard records say
and what lies on disk, looked up anew at every start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.blocks import recorded_blocks
from shared.atomic import write_json
from shared.errors import StoreDamaged, StoreMismatch
from shared.json_file import read_object, require_sealed, sealed
from shared.store_layout import block_name


@dataclass(frozen=True, slots=True)
class Plan:
    """Block number b holds documents [starts[b], starts[b + 1])."""

    starts: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.starts) - 1

    def documents_of(self, block: int) -> range:
        """Row numbers of a block's documents."""
        return range(self.starts[block], self.starts[block + 1])


def make_plan(lengths: Sequence[int], block_tokens: int) -> Plan:
    """Whole documents in their order, a new block once one holds `block_tokens` tokens or more."""
    starts, held = [0], 0
    for index, length in enumerate(lengths):
        if held >= block_tokens:
            starts.append(index)
            held = 0
        held += int(length)
    return Plan((*starts, len(lengths)))


def save_plan(store: Path, plan: Plan) -> None:
    """Write plan.json."""
    blocks = [[plan.starts[b], plan.starts[b + 1]] for b in range(plan.num_blocks)]
    write_json(store / "plan.json", sealed({"blocks": blocks}))


def load_plan(store: Path) -> Plan | None:
    """The store's plan, or None before it was made. Raises StoreDamaged."""
    path = store / "plan.json"
    if not path.is_file():
        return None
    advice = "restore it or extract to another --out"
    plan = read_object(path, advice)
    require_sealed(plan, str(path), advice)
    try:
        blocks = plan["blocks"]
        return Plan((*(int(first) for first, _ in blocks), int(blocks[-1][1])))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StoreDamaged(f"{path} is not a plan ({error!r}); restore it or extract to another --out") from error


def settle_plan(store: Path, lengths: Sequence[int], block_tokens: int) -> Plan:
    """The plan on disk, which must be the one these rows and settings give, or a new one written now."""
    plan = make_plan(lengths, block_tokens)
    if not require_same_plan(store, plan):
        save_plan(store, plan)
    return plan


def require_same_plan(store: Path, plan: Plan) -> bool:
    """Whether the store has a plan; raises StoreMismatch when it is not this one, StoreDamaged when it is none."""
    existing = load_plan(store)
    if existing is not None and existing != plan:
        raise StoreMismatch(
            f"{store} was planned as {existing.num_blocks} blocks over {existing.starts[-1]} documents, these rows "
            f"give {plan.num_blocks} over {plan.starts[-1]}; use the same rows and --block-tokens, or another --out"
        )
    return existing is not None


def done_blocks(store: Path) -> dict[int, dict[str, Any]]:
    """Shard records of the blocks that are recorded and present: {block: record}."""
    records = recorded_blocks(store)
    return {block: record for block, record in records.items() if (store / block_name(block) / "zarr.json").is_file()}


def remaining_blocks(store: Path, plan: Plan) -> list[int]:
    """Blocks that must still be made, in order."""
    done = done_blocks(store)
    return [block for block in range(plan.num_blocks) if block not in done]


def committed_among(store: Path, blocks: Sequence[int]) -> set[int]:
    """Those of some blocks that are recorded and present now; looks at no other block's folder."""
    records = recorded_blocks(store)
    return {block for block in blocks if block in records and (store / block_name(block) / "zarr.json").is_file()}


def is_exported(store: Path) -> bool:
    """Whether `target/` is there in full (it appears by one rename)."""
    return (store / "target" / "head.safetensors").is_file()


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions in `lengths` grouped for one forward each, longest first, count x longest <= batch_tokens.

    A document longer than that goes alone. Depends on the block alone, so the same block gives the same bytes
    whichever worker makes it.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))
    batches: list[list[int]] = []
    for i in order:
        # The first of a batch is its longest, so it sets the padded width.
        if batches and (len(batches[-1]) + 1) * int(lengths[batches[-1][0]]) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
