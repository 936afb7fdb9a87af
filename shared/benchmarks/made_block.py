"""Blocks of made-up features in the layout of a real store, and writing them as raw files and by zarr-python.

Used by store_io.py and store_open.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.early_writeback import start_writing
from shared.store_layout import ARRAYS, arrays_of, chunks_of

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
# Lengths of conversations, roughly: log-normal, a few times shorter and longer than the median.
_SPREAD, _WIDEST = 0.7, 4


@dataclass(frozen=True)
class Shape:
    """Sizes of one token's features."""

    taps: int
    hidden: int
    topk: int = 64

    def of(self, name: str, tokens: int) -> tuple[int, ...]:
        """Shape of one array of a block."""
        known = {
            "hidden_states": (tokens, self.taps, self.hidden),
            "hidden_states_scale": (tokens, self.taps),
            "hidden_states_channel": (self.taps, self.hidden),
            "topk_ids": (tokens, self.topk),
            "topk_logits": (tokens, self.topk),
        }
        return known.get(name.removesuffix("_q"), (tokens,))


def features_of(precision: str) -> str:
    """The array that nearly all bytes of a store are in."""
    return {"bfloat16": "hidden_states", "int8": "hidden_states_q"}[precision]


def read_of(precision: str) -> tuple[str, ...]:
    """The per-token arrays that training reads of every document."""
    scale = ("hidden_states_scale",) if precision == "int8" else ()
    return (features_of(precision), *scale, "input_ids", "loss_mask")


def usual_lengths(tokens: int, median: int, rng: np.random.Generator) -> list[int]:
    """Lengths of documents that fill `tokens`: log-normal, from a quarter of the median to four times it."""
    lengths: list[int] = []
    shortest = max(1, median // _WIDEST)
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(np.clip(rng.lognormal(np.log(median), _SPREAD), shortest, median * _WIDEST))
        lengths.append(left if left < drawn + shortest else drawn)
    return lengths


def make_block(shape: Shape, precision: str, lengths: Sequence[int], rng: np.random.Generator) -> Arrays:
    """Random bytes for every array of a block without the last hidden state."""
    tokens, documents = sum(lengths), len(lengths)
    arrays: Arrays = {
        "document_offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "document_index": np.arange(documents, dtype=np.int64),
        "document_split": np.zeros(documents, np.uint8),
        "loss_mask": rng.integers(0, 2, tokens, np.uint8),
    }
    for name in arrays_of(precision, "none"):
        if name not in arrays and ARRAYS[name].rows in ("tokens", "block"):
            kind, where = np.dtype(ARRAYS[name].dtype), shape.of(name, tokens)
            size = int(np.prod(where)) * kind.itemsize
            bits = rng.integers(0, 2**64, -(-size // 8), np.uint64, endpoint=False)
            arrays[name] = bits.view(np.uint8)[:size].view(kind).reshape(where)
    return arrays


def on_disk(folder: Path) -> tuple[int, int]:
    """Bytes and files below a folder."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


def in_threads(work: Callable[[Sequence[Any]], int], items: Sequence[Any], threads: int) -> int:
    """Sum of `work` over `items`, dealt out to threads."""
    if threads == 1:
        return work(items)
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, [items[number::threads] for number in range(min(threads, len(items)))]))


def write_raw(folder: Path, arrays: Arrays, threads: int, streamed: int = 0) -> int:
    """The same bytes as plain files, one per thread, one write() per array and thread, then fsync.

    `streamed`: bytes of a write instead, the disk being told to begin after each: the most that it can take.
    """
    shares: list[list[Array]] = [[] for _ in range(threads)]
    for values in arrays.values():
        for number, part in enumerate(np.array_split(values.reshape(-1).view(np.uint8), threads)):
            shares[number].append(part)
    folder.mkdir()

    def write(numbers: Sequence[int]) -> int:
        done = 0
        for number in numbers:
            with (folder / f"{number}.raw").open("xb", buffering=0) as file:
                for part in shares[number]:
                    view = part.data
                    while view:
                        written = file.write(view[: streamed or len(view)]) or 0
                        view = view[written:]
                        if streamed:
                            start_writing(file.fileno(), done, written)
                        done += written
                os.fsync(file.fileno())
        return done

    return in_threads(write, range(threads), threads)


def write_zarr(folder: Path, arrays: Arrays) -> int:
    """The same arrays by zarr-python in the same layout; fsynced as well, which zarr-python leaves out."""
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec

    group = zarr.create_group(folder)
    for name, values in arrays.items():
        chunk, shard = chunks_of(name, values.shape)
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=chunk, shards=shard, fill_value=ARRAYS[name].fill,
            compressors=[Crc32cCodec()], serializer=BytesCodec(endian="little"), filters=None,
        )  # fmt: skip
        array[...] = values
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return sum(values.nbytes for values in arrays.values())
