"""`python -m shared.benchmarks.store_io`: writing and reading a store against raw files, memmap and zarr-python.

Every table is one interleaved run; its ratios are what counts. What was read is compared with what was written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from shared.benchmarks.flat_cost import flat_by_length, flat_by_size
from shared.benchmarks.made_block import Shape, on_disk, usual_lengths
from shared.benchmarks.measure import Case, cached_share, interleaved, rows_of, table
from shared.benchmarks.store_bench import StoreBench
from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused
from shared.progress import tell

Row = dict[str, Any]
# More than this still in memory after it was dropped, and the cold table is not one.
_STILL_CACHED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreIoConfig:
    """Settings of the benchmark."""

    dir: Path | None = knob(None, help="Folder on the disk to measure; default: a temporary one.")
    taps: int = knob(5, help="Tapped layers.")
    hidden: int = knob(5120, help="Hidden size.")
    gigabytes: float = knob(0.8, help="Features of one block in bf16; --rounds blocks and a copy lie on the disk.")
    tokens: int | None = knob(None, help="Tokens of one block, instead of --gigabytes.")
    length: int = knob(1100, help="Median length of a document in tokens.")
    precision: tuple[str, ...] = knob(("bfloat16", "int8"), help="bfloat16, int8 or both.")
    threads: int = knob(2, help="Writers of the raw files, and readers of the threaded cases.")
    rounds: int = knob(3, help="Rounds of every table; each writes a block.")
    cold: bool = knob(True, help="Read also with the page cache dropped.")
    zarr: bool = knob(True, help="Measure zarr-python too.")
    flat: bool = knob(True, help="Measure the cost per token by length and store size too.")
    seed: int = knob(0, help="Of the documents' lengths.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        for name in ("taps", "hidden", "length", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"--{name} is {getattr(self, name)}; it must be at least 1")
        if not self.precision or set(self.precision) - {"bfloat16", "int8"}:
            raise ConfigRefused(f"--precision is {','.join(self.precision)!r}; bfloat16 and int8 are known")

    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.tokens or max(4096, int(self.gigabytes * 1e9 / (2 * self.taps * self.hidden)))


@click.command()
@options_of(StoreIoConfig)
def main(config: StoreIoConfig) -> None:
    """Write and read a made-up store, and print GB/s as ratios to raw files and memmap of the same run."""
    from shared.atomic import write_json
    from shared.provenance import collect

    tables: dict[str, list[Row]] = {}

    def show(title: str, rows: list[Row]) -> None:
        tables[title] = rows
        tell(table(title, rows))

    shape = Shape(config.taps, config.hidden)
    lengths = usual_lengths(config.block_tokens(), config.length, np.random.default_rng(config.seed))
    for precision in config.precision:
        with _folder(config.dir) as folder:
            _measure(config, StoreBench(folder, shape, precision, lengths), show)
        if config.flat:
            with _folder(config.dir) as folder:
                show(f"{precision}: cost per token by document length", flat_by_length(folder, shape, precision))
            with _folder(config.dir) as folder:
                show(f"{precision}: cost per token as a store grows", flat_by_size(folder, precision))
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "provenance": collect(), "tables": tables})


def _measure(config: StoreIoConfig, bench: StoreBench, show: Any) -> None:
    name = f"{bench.precision}, {config.taps} x {config.hidden}"
    samples = interleaved(bench.write_cases(config.threads, config.zarr), config.rounds)
    show(
        f"{name}: write {bench.nbytes() / 1e9:.2f} GB blocks, fsynced", rows_of(samples, ["raw files", "raw, streamed"])
    )
    tokens = len(bench.seals) * len(bench.arrays["input_ids"])
    size, files = on_disk(bench.store)
    payload = bench.nbytes() * len(bench.seals)
    show(
        f"{name}: on disk",
        [{"tokens": tokens, "files": files, "bytes/token": size / tokens, "overhead": f"{size / payload - 1:.3%}"}],
    )
    refs = bench.refs()
    bench.check(refs)
    cases = bench.read_cases(refs, config.threads, config.zarr)
    for case in cases[:3]:
        case.run()  # into the page cache, and the interpreter's own caches
    _show_read(config, f"{name}: read {len(refs)} random documents, warm", cases, show)
    if config.cold:
        bench.drop()
        share = max(cached_share(bench.raw), cached_share(bench.store))
        note = f" ({share:.0%} STILL IN MEMORY)" if share > _STILL_CACHED else ""
        cases = [Case(case.name, case.run, bench.drop, rounds=case.rounds) for case in cases]
        _show_read(config, f"{name}: read {len(refs)} random documents, cold{note}", cases, show)


def _show_read(config: StoreIoConfig, title: str, cases: list[Case], show: Any) -> None:
    bases = ["memmap", "preadv"] + ([f"memmap x{config.threads}"] if config.threads > 1 else [])
    show(title, rows_of(interleaved(cases, config.rounds), bases))


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="store-io-", dir=parent) as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
