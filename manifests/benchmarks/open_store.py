"""`python -m manifests.benchmarks.open_store`: opening a store as trainers do, its records read and checked first.

The records, the plan and the cache are those of a store with so many documents of 1,000 tokens; its blocks are not
made, because with the cache nothing is read of them. The blocks themselves: shared/benchmarks/store_open.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from manifests.blocks import open_store
from manifests.commit import Ledger
from manifests.records import ShardRecord
from shared.atomic import write_json
from shared.benchmarks.measure import drop_cache, table
from shared.benchmarks.store_open import USUAL_DOCUMENTS, build_cache, resident_megabytes, select
from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused
from shared.json_file import sealed
from shared.progress import tell

_MEASURE = "import sys; from manifests.benchmarks.open_store import measure; measure(sys.argv[1])"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStoreConfig:
    """Settings of the benchmark."""

    dir: Path | None = knob(None, help="Folder on the disk to measure; default: a temporary one.")
    documents: tuple[int, ...] = knob((1_000, 100_000, 1_000_000), help="Documents of each store.")
    writers: int = knob(8, help="Processes that wrote the records, a file each.")
    rounds: int = knob(5, help="Openings of each store.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ConfigRefused(f"--documents is {self.documents}; one or more numbers of at least 1")
        for name in ("writers", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"--{name} is {getattr(self, name)}; it must be at least 1")


def build(store: Path, documents: int, writers: int) -> None:
    """Identity, plan, cache and shard records of a finished store."""
    seals = build_cache(store, documents)
    per_block = USUAL_DOCUMENTS
    plan = [[block * per_block, min(documents, (block + 1) * per_block)] for block in seals]
    write_json(store / "plan.json", sealed({"blocks": plan}))
    detail = {
        "files": 60,
        "skipped": 0,
        "topk_mass": 0.987654321,
        "relative_error": {str(tap): 0.0098765 for tap in range(5)},
    }
    for rank in range(writers):
        mine = list(seals.items())[rank::writers]
        records = [
            ShardRecord(
                block=block, rank=rank, documents=per_block, tokens=32768, bytes=1_700_000_000, seconds=3.21,
                seal=seal, detail=detail,
            )
            for block, seal in mine
        ]  # fmt: skip
        Ledger(store, f"extract-{rank}").append(*records)


def measure(store: str) -> None:
    """Open a store in this process, select what trains, and print the seconds and megabytes as JSON."""
    before, started = resident_megabytes(), time.perf_counter()
    opened = open_store(store)
    documents = opened.documents
    ready = time.perf_counter()
    select(documents)
    found = {"open": ready - started, "select": time.perf_counter() - ready, "blocks": len(opened.blocks)}
    tell(json.dumps(found | {"documents": len(documents), "megabytes": resident_megabytes() - before}))


@click.command()
@options_of(OpenStoreConfig)
def main(config: OpenStoreConfig) -> None:
    """Print how long it takes to read the records of a store of many documents and to open it."""
    rows = []
    for documents in config.documents:
        with tempfile.TemporaryDirectory(prefix="open-store-", dir=config.dir) as folder:
            store = Path(folder) / "x.zarr"
            build(store, documents, config.writers)
            rows.append(_row(store, config.rounds))
    tell(table("records, plan and documents, each in a fresh process, page cache dropped", rows))
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "rows": rows})


def _row(store: Path, rounds: int) -> dict[str, Any]:
    found = []
    for _ in range(rounds):
        drop_cache(store)
        command = [sys.executable, "-c", _MEASURE, str(store)]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    median = {key: statistics.median(float(one[key]) for one in found) for key in found[0]}
    return {
        "documents": int(median["documents"]),
        "blocks": int(median["blocks"]),
        "open s": median["open"],
        "select s": median["select"],
        "memory MB": median["megabytes"],
    }


if __name__ == "__main__":
    main()
