"""The end of an extraction: is every block there, and what was made? Runs once all workers ended well.

Called in a process of its own by manifests/finish.py; `report` also by stage1_extract/extract.py when nothing was to
do. No torch.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from manifests.blocks import open_store
from manifests.commit import read
from shared.atomic import remove_partials
from shared.errors import StoreIncomplete
from shared.progress import duration, summary
from stage1_extract.plan import Plan, done_blocks, load_plan, remaining_blocks


def finish(store: Path) -> None:
    """Raise StoreIncomplete when a block is missing, else print what the store holds."""
    plan = load_plan(store)
    assert plan is not None, "workers made blocks without a plan"
    for part in ("", "blocks"):  # of a worker that was killed and started again
        remove_partials(store / part)
    if left := remaining_blocks(store, plan):
        raise StoreIncomplete(
            f"{store}: {len(left)} of {plan.num_blocks} blocks are missing after all workers ended well, the first is "
            f"{left[0]}; see {store / 'logs'} and run the same command again"
        )
    open_store(store)  # makes the file of its documents now, which the first trainer would wait for
    begun = max(record["time"] for record in read(store, "runs") if record["state"] == "started")
    report(store, plan, time.time() - begun)


def report(store: Path, plan: Plan, seconds: float) -> None:
    """Print what the store holds; `seconds` of this run, 0 when nothing was to do."""
    done = done_blocks(store)
    tokens = sum(record["tokens"] for record in done.values())
    size = sum(record["bytes"] for record in done.values())
    documents = sum(record["documents"] for record in done.values())
    skipped = Counter(record["reason"] for record in {r["doc_id"]: r for r in read(store, "skips")}.values())
    mass = sum(record["detail"]["topk_mass"] * record["tokens"] for record in done.values()) / max(tokens, 1)
    pairs: list[tuple[str, Any]] = [
        ("documents", f"{documents:,} of {plan.starts[-1]:,}"),
        ("tokens", f"{tokens:,}"),
        ("blocks", f"{len(done)} of {plan.num_blocks}"),
        ("size", f"{size / 1e9:.3g} GB"),
        ("top-k holds", f"{100 * mass:.1f} % of the teacher's probability"),
    ]
    pairs += [(f"skipped: {reason}", f"{count:,}") for reason, count in sorted(skipped.items())]
    if seconds:
        pairs.append(("time", duration(seconds)))
    summary("extracted", [*pairs, ("written to", store)])
