"""Cost per token: does it stay the same when documents get longer, and when a store gets more blocks?

Called by store_io.py.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from shared.benchmarks.made_block import Arrays, Shape, make_block, on_disk, read_of
from shared.benchmarks.measure import Case, interleaved
from shared.documents import DocumentRef
from shared.store import TeacherStore
from shared.store_layout import block_name
from shared.store_write import create, write_block

LENGTHS = (256, 512, 1024, 2048, 4096)
_GROWTH = (4, 16, 64)
_SMALL = Shape(5, 576)
_ROUNDS = 7
_TOKENS = 8192


def flat_by_length(folder: Path, shape: Shape, precision: str) -> list[dict[str, Any]]:
    """A block for each length, read document by document, warm: bytes and microseconds per token."""
    create(folder, {})
    rng = np.random.default_rng(0)
    seals = {
        block: write_block(folder, block, make_block(shape, precision, [length] * (_TOKENS // length), rng))["seal"]
        for block, length in enumerate(LENGTHS)
    }
    store = TeacherStore(folder, seals)
    documents = list(store.documents)
    buffers = _buffers(store, precision)
    cases = [
        Case(str(length), functools.partial(_read, store, [ref for ref in documents if ref.block == block], buffers))
        for block, length in enumerate(LENGTHS)
    ]
    interleaved(cases, 1)
    samples = interleaved(cases, _ROUNDS)
    longest = samples[str(LENGTHS[-1])]
    return [
        {
            "tokens a document": length,
            "bytes/token": on_disk(folder / block_name(block))[0] / _TOKENS,
            "read us/token": statistics.median(sample.seconds / sample.size * 1e6 for sample in samples[str(length)]),
            f"/ {LENGTHS[-1]}": statistics.median(
                (a.seconds / a.size) / (b.seconds / b.size) for a, b in zip(samples[str(length)], longest, strict=True)
            ),
        }
        for block, length in enumerate(LENGTHS)
    ]


def flat_by_size(folder: Path, precision: str) -> list[dict[str, Any]]:
    """One store that grows: bytes per token, and microseconds to write and to read a token, warm."""
    create(folder, {})
    rng = np.random.default_rng(0)
    arrays = make_block(_SMALL, precision, [512] * 8, rng)
    seals: dict[int, str] = {}
    written: list[float] = []
    stores: dict[int, tuple[TeacherStore, list[DocumentRef]]] = {}
    for block in range(_GROWTH[-1]):
        started = time.perf_counter()
        seals[block] = write_block(folder, block, arrays)["seal"]
        written.append(time.perf_counter() - started)
        if block + 1 in _GROWTH:
            store = TeacherStore(folder, seals)
            stores[block + 1] = store, list(store.documents)
    some = 32
    buffers = _buffers(store, precision)
    picked = {blocks: [refs[i] for i in rng.integers(0, len(refs), some)] for blocks, (_, refs) in stores.items()}
    cases = [
        Case(str(blocks), functools.partial(_read, stores[blocks][0], picked[blocks], buffers)) for blocks in _GROWTH
    ]
    interleaved(cases, 1)
    samples = interleaved(cases, _ROUNDS)
    first = samples[str(_GROWTH[0])]
    return [
        {
            "blocks": blocks,
            "tokens": blocks * 4096,
            "bytes/token": sum(on_disk(folder / block_name(block))[0] for block in range(blocks)) / (blocks * 4096),
            "write us/token": statistics.median(written[max(0, blocks - 16) : blocks]) / 4096 * 1e6,
            "read us/token": statistics.median(s.seconds / s.size * 1e6 for s in samples[str(blocks)]),
            "read / first": statistics.median(
                (a.seconds / a.size) / (b.seconds / b.size) for a, b in zip(samples[str(blocks)], first, strict=True)
            ),
        }
        for blocks in _GROWTH
    ]


def _buffers(store: TeacherStore, precision: str) -> Arrays:
    grids = {name: array.grid for name, array in store.sealed(0).items()}
    return {name: np.zeros((_TOKENS, *grids[name].row_shape), grids[name].dtype) for name in read_of(precision)}


def _read(store: TeacherStore, refs: list[DocumentRef], buffers: Arrays) -> int:
    """Read documents one after another into the buffers, as into a batch; returns tokens."""
    for number, ref in enumerate(refs):
        start = number * ref.length % _TOKENS
        out = {name: buffer[start : start + ref.length] for name, buffer in buffers.items()}
        store.read_document(ref, tuple(out), out)
    return sum(ref.length for ref in refs)
