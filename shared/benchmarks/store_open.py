"""`python -m shared.benchmarks.store_open`: how long a store of a million documents takes to open.

Blocks are written as always, with documents of a few tokens and features of a few numbers. Each opening is a process
of its own. Reading the records that say which blocks are done is measured by manifests/benchmarks/open_store.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from shared.benchmarks.made_block import Shape, make_block
from shared.benchmarks.measure import drop_cache, table
from shared.config import knob, options_of, to_dict
from shared.documents import Documents, write_index
from shared.errors import ConfigRefused
from shared.progress import tell
from shared.store import TeacherStore, snapshot_of
from shared.store_write import create, write_block

_TOKENS = 4
_SHAPE = Shape(taps=1, hidden=4, topk=2)
# As many blocks as a million documents of 1,000 tokens make at the usual 32,768 tokens a block.
USUAL_DOCUMENTS = 32
_MEASURE = "import sys; from shared.benchmarks.store_open import measure; measure(*sys.argv[1:])"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOpenConfig:
    """Settings of the benchmark."""

    dir: Path | None = knob(None, help="Folder on the disk to measure; default: a temporary one.")
    documents: tuple[int, ...] = knob((1_000, 100_000, 1_000_000), help="Documents of each store.")
    block_documents: int = knob(2_000, help="Documents of a block.")
    rounds: int = knob(5, help="Openings of each kind.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ConfigRefused(f"--documents is {self.documents}; one or more numbers of at least 1")
        for name in ("block_documents", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")


def build(store: Path, documents: int, per_block: int) -> dict[int, str]:
    """Write a store of so many documents and its cache; returns {block: seal}."""
    create(store, {})
    rng = np.random.default_rng(0)
    seals: dict[int, str] = {}
    for block, first in enumerate(range(0, documents, per_block)):
        count = min(per_block, documents - first)
        arrays = make_block(_SHAPE, "bfloat16", [_TOKENS] * count, rng)
        arrays["document_index"] = np.arange(first, first + count, dtype=np.int64)
        arrays["document_split"] = (rng.random(count) < 0.05).astype(np.uint8)
        seals[block] = write_block(store, block, arrays)["seal"]
    opened = TeacherStore(store, seals)
    write_index(store, opened.snapshot, opened.documents)
    return seals


def build_cache(store: Path, documents: int) -> dict[int, str]:
    """Only the cache of a store with the usual number of documents in a block, for what depends on the blocks."""
    create(store, {})
    seals = {block: f"{block:032x}" for block in range(-(-documents // USUAL_DOCUMENTS))}
    numbers = np.arange(documents)
    columns = {
        "index": numbers,
        "block": numbers // USUAL_DOCUMENTS,
        "start": numbers % USUAL_DOCUMENTS * 1024,
        "length": np.full(documents, 1024),
        "n_supervised": numbers % 7,
        "heldout": numbers % 20 == 0,
    }
    write_index(store, snapshot_of(seals), Documents(columns))
    return seals


def measure(store: str, blocks: str, cache: str) -> None:
    """Open a store in this process, select what trains, and print the seconds and megabytes as JSON."""
    seals = {int(block): seal for block, seal in json.loads(Path(blocks).read_text()).items()}
    before = resident_megabytes()
    started = time.perf_counter()
    opened = TeacherStore(Path(store), seals)
    documents = opened.documents if cache == "cache" else opened.documents_in_blocks()
    ready = time.perf_counter()
    train = select(documents)
    selected = time.perf_counter()
    found = {"documents": len(documents), "train": len(train), "open": ready - started, "select": selected - ready}
    tell(json.dumps(found | {"megabytes": resident_megabytes() - before}))


def select(documents: Documents) -> Documents:
    """What training takes of them: not held out, two supervised tokens, in the order of the prepared data."""
    train = documents.take(np.flatnonzero(~documents.heldout & (documents.n_supervised >= 2)))
    return train.take(np.argsort(train.index, kind="stable"))


def resident_megabytes() -> float:
    """Megabytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@click.command()
@options_of(StoreOpenConfig)
def main(config: StoreOpenConfig) -> None:
    """Build stores of many short documents and print how long opening them takes, with the cache and without."""
    from shared.atomic import write_json

    rows = []
    for documents in config.documents:
        with tempfile.TemporaryDirectory(prefix="store-open-", dir=config.dir) as folder:
            store = Path(folder) / "x.zarr"
            started = time.perf_counter()
            seals = build(store, documents, config.block_documents)
            made = time.perf_counter() - started
            rows += [_row(store, seals, way, config.rounds) | {"made in s": made} for way in ("cache", "blocks")]
            usual = Path(folder) / "usual.zarr"
            rows.append(_row(usual, build_cache(usual, documents), "cache", config.rounds) | {"made in s": ""})
    tell(table("time to open, each in a fresh process, page cache dropped", rows))
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "rows": rows})


def _row(store: Path, seals: dict[int, str], way: str, rounds: int) -> dict[str, Any]:
    blocks = store.parent / f"{store.stem}.json"
    blocks.write_text(json.dumps(seals))
    found = []
    for _ in range(rounds):
        drop_cache(store)
        command = [sys.executable, "-c", _MEASURE, str(store), str(blocks), way]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    median = {key: statistics.median(float(one[key]) for one in found) for key in found[0]}
    return {
        "documents": int(median["documents"]),
        "blocks": len(seals),
        "from": way,
        "open s": median["open"],
        "select s": median["select"],
        "memory MB": median["megabytes"],
    }


if __name__ == "__main__":
    main()
