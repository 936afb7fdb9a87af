"""`python -m stage2_train.benchmarks.reading`: documents of a store into training batches, against a memmap copy.

Measures what `dflash train` does between the disk and the step: BatchBuilder with several reader threads, the
prefetching thread, with a free and with a busy consumer, and the copy to the GPU where there is one.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from shared.benchmarks.made_block import Shape, usual_lengths
from shared.benchmarks.measure import Case, interleaved, rows_of, table
from shared.benchmarks.store_bench import StoreBench
from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused
from shared.progress import tell

if TYPE_CHECKING:
    from stage2_train.data import BatchBuilder
    from stage2_train.packing import Rows

_BLOCKS = 2
_ANCHORS, _BLOCK_SIZE, _SEED = 512, 16, 0
# The default of `dflash train`.
_READERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig:
    """Settings of the benchmark."""

    dir: Path | None = knob(None, help="Folder on the disk to measure; default: a temporary one.")
    taps: int = knob(5, help="Tapped layers.")
    hidden: int = knob(5120, help="Hidden size.")
    tokens: int = knob(16_384, help="Tokens of the whole store.")
    length: int = knob(1100, help="Median length of a document in tokens.")
    max_length: int = knob(3072, help="Tokens of a row.")
    rows: int = knob(2, help="Rows of a batch.")
    precision: tuple[str, ...] = knob(("bfloat16", "int8"), help="bfloat16, int8 or both.")
    readers: tuple[int, ...] = knob((1, 2, 4), help="Reader threads to compare.")
    rounds: int = knob(3, help="Rounds of every table.")
    cold: bool = knob(True, help="Read also with the page cache dropped.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        for name in ("taps", "hidden", "tokens", "length", "max_length", "rows", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not self.readers or min(self.readers) < 1:
            raise ConfigRefused(f"--readers is {self.readers}; one or more numbers of at least 1")


@click.command()
@options_of(ReadingConfig)
def main(config: ReadingConfig) -> None:
    """Read a made-up store into training batches and print GB/s of features as ratios to a memmap copy."""
    from shared.atomic import write_json

    tables: dict[str, list[dict[str, Any]]] = {}
    for precision in config.precision:
        with tempfile.TemporaryDirectory(prefix="reading-", dir=config.dir) as folder:
            lengths = usual_lengths(config.tokens // _BLOCKS, config.length, np.random.default_rng(_SEED))
            bench = StoreBench(Path(folder), Shape(config.taps, config.hidden), precision, lengths)
            for case in bench.write_cases(2, with_zarr=False)[-1:] * _BLOCKS:
                case.run()
                case.after()
            for title, rows in _measure(config, bench):
                tables[title] = rows
                tell(table(title, rows))
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "tables": tables})


def _measure(config: ReadingConfig, bench: StoreBench) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    cases = _cases(config, bench)
    name = f"{bench.precision}, {config.taps} x {config.hidden}, {config.rows} rows of {config.max_length} tokens"
    interleaved(cases, 1)
    yield f"{name}: features into batches, warm", rows_of(interleaved(cases, config.rounds), ["memmap copy"])
    if config.cold:
        cases = [Case(case.name, case.run, bench.drop) for case in cases]
        yield f"{name}: features into batches, cold", rows_of(interleaved(cases, config.rounds), ["memmap copy"])


def _cases(config: ReadingConfig, bench: StoreBench) -> list[Case]:
    import torch

    from shared.store import TeacherStore
    from stage2_train.data import BatchBuilder, Shapes
    from stage2_train.packing import epoch_rows
    from stage2_train.selection import select

    store = TeacherStore(bench.store, bench.seals)
    documents, _ = select(store, "train")
    shapes = Shapes(
        max_length=config.max_length,
        anchors=_ANCHORS,
        block_size=_BLOCK_SIZE,
        feature_size=config.taps * config.hidden,
    )
    on_gpu = torch.cuda.is_available()
    builders = {
        readers: BatchBuilder(store, documents, shapes, _SEED, pinned=on_gpu, readers=readers)
        for readers in config.readers
    }
    rows = epoch_rows(documents.length, config.max_length, _SEED, 0)
    most = builders[max(config.readers)]
    cases = [Case("memmap copy", functools.partial(_by_memmap, bench, most, rows, config.rows))]
    for readers, builder in builders.items():
        cases.append(Case(f"build, {readers} readers", functools.partial(_by_build, builder, rows, config.rows)))
    usual = BatchBuilder(store, documents, shapes, _SEED, pinned=on_gpu, readers=_READERS)
    prefetched = functools.partial(_by_prefetcher, usual, config.rows, on_gpu)
    cases.append(Case(f"prefetch, {_READERS} readers", prefetched))
    cases.append(Case(f"prefetch, {_READERS}, busy Python", functools.partial(_beside_python, prefetched)))
    return cases


def _by_memmap(bench: StoreBench, builder: BatchBuilder, rows: Rows, count: int) -> int:
    """The features alone, copied from a memory-mapped raw file into batches that are made anew, as those of `build`."""
    maps = {block: bench.mapped(block) for block in bench.seals}
    maps = {block: values.reshape(len(values), -1) for block, values in maps.items()}
    documents, size = builder.documents, 0
    for first in range(0, len(rows), count):
        features = np.empty((count, builder.shapes.max_length, builder.shapes.feature_size), maps[0].dtype)
        for number, row in enumerate(rows[first : first + count]):
            features[number, sum(piece.length for piece in row) :] = 0
            for piece in row:
                start = int(documents.start[piece.document])
                place = features[number, piece.offset : piece.offset + piece.length]
                place[:] = maps[int(documents.block[piece.document])][start : start + piece.length]
                size += place.nbytes
    return size


def _by_build(builder: BatchBuilder, rows: Rows, count: int) -> int:
    return sum(_size(builder.build(rows[first : first + count], 0)) for first in range(0, len(rows), count))


def _by_prefetcher(builder: BatchBuilder, count: int, on_gpu: bool) -> int:
    """Batches as the training loop takes them, copied to the GPU if there is one; one pass over the store."""
    import torch

    from stage2_train.data import Prefetcher, Share, stream
    from stage2_train.device_feed import make_feed
    from stage2_train.packing import batches_in, epoch_rows

    rows = epoch_rows(builder.lengths(), builder.shapes.max_length, builder.seed, 0)
    share = Share(batch_rows=count, rows_per_pass=count, rank=0, world_size=1)
    number = batches_in(rows, count)
    batches = itertools.islice(stream(builder, share, 0, 0), number)
    feed = make_feed(Prefetcher(batches), torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    size = 0
    try:
        for _ in range(number):
            size += sum(_size(batch) for batch in next(feed).placed())
    finally:
        feed.close()
    if on_gpu:
        torch.cuda.synchronize()
    return size


def _beside_python(work: Any) -> int:
    """`work` while another thread runs Python without a pause, as a training loop that never waits for its GPU."""
    with _busy():
        return int(work())


@contextmanager
def _busy() -> Iterator[None]:
    end = threading.Event()

    def run() -> None:
        while not end.is_set():
            sum(range(1000))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _size(batch: Any) -> int:
    """Bytes of features of real tokens."""
    return int(batch.tokens * batch.features.shape[-1] * batch.features.itemsize)


if __name__ == "__main__":
    main()
