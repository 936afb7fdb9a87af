"""What store_io.py measures: one store and raw files of the same contents, written and read in every way to compare.

Sizes count the features only, also where ids and loss mask are read as well.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from shared.benchmarks.made_block import (
    Array,
    Arrays,
    Shape,
    features_of,
    in_threads,
    make_block,
    read_of,
    write_raw,
    write_zarr,
)
from shared.benchmarks.measure import Case, drop_cache
from shared.documents import DocumentRef
from shared.store import TeacherStore
from shared.store_layout import block_name
from shared.store_write import create, write_block

Refs = Sequence[DocumentRef]
# Of so many documents zarr-python reads one: it is slow, and a rate is a rate.
_ZARR_SHARE = 8


class StoreBench:
    """A store of made-up features in `folder`; the write cases fill it, the read cases read it."""

    def __init__(self, folder: Path, shape: Shape, precision: str, lengths: Sequence[int]) -> None:
        self.precision, self.name = precision, features_of(precision)
        self.store, self.raw, self.spare = folder / "x.zarr", folder / "raw", folder / "spare"
        self.rng = np.random.default_rng(len(lengths))
        self.arrays = make_block(shape, precision, lengths, self.rng)
        self.seals: dict[int, str] = {}
        create(self.store, {"precision": precision, "target_layer_ids": list(range(shape.taps))})
        self.raw.mkdir()

    def nbytes(self) -> int:
        """Bytes of one block's arrays."""
        return sum(values.nbytes for values in self.arrays.values())

    def write_cases(self, threads: int, with_zarr: bool) -> list[Case]:
        """Each run of write_block adds a block to the store, and its features to the raw files."""

        def ours() -> int:
            block = len(self.seals)
            self.seals[block] = write_block(self.store, block, self.arrays)["seal"]
            return self.nbytes()

        def keep() -> None:
            self.arrays[self.name].tofile(self.raw / f"{len(self.seals) - 1}.bin")
            drop_cache(self.raw)
            self.arrays[self.name] += 1  # no two blocks are alike

        def clear() -> None:
            shutil.rmtree(self.spare)

        cases = [
            Case("raw files", lambda: write_raw(self.spare, self.arrays, threads), after=clear),
            Case("raw, streamed", lambda: write_raw(self.spare, self.arrays, threads, 4 << 20), after=clear),
            Case("write_block", ours, after=keep),
        ]
        if with_zarr:
            cases.append(Case("zarr-python", lambda: write_zarr(self.spare, self.arrays), after=clear, rounds=1))
        return cases

    def mapped(self, block: int) -> Array:
        """The raw copy of a block's features, memory-mapped."""
        features = self.arrays[self.name]
        return np.memmap(self.raw / f"{block}.bin", features.dtype, "r", shape=features.shape)

    def refs(self) -> list[DocumentRef]:
        """Documents from all over the store in random order, as many as one block has."""
        documents = TeacherStore(self.store, self.seals).documents
        picked = self.rng.permutation(len(documents))[: len(self.arrays["document_index"])]
        return [documents[int(position)] for position in picked]

    def check(self, refs: Refs) -> None:
        """Read every document once and compare it with what was written."""
        store = TeacherStore(self.store, self.seals)
        for ref in refs:
            rows = slice(ref.start, ref.start + ref.length)
            read = store.read_document(ref, read_of(self.precision))
            np.testing.assert_array_equal(read[self.name], self.mapped(ref.block)[rows], strict=True)
            np.testing.assert_array_equal(read["input_ids"], self.arrays["input_ids"][rows], strict=True)

    def drop(self) -> None:
        """Nothing of the store or of the raw files stays in memory."""
        drop_cache(self.raw)
        drop_cache(self.store)

    def read_cases(self, refs: Refs, threads: int, with_zarr: bool) -> list[Case]:
        """Reading these documents, in this order, by one thread and by several."""
        store = TeacherStore(self.store, self.seals)
        store.documents  # noqa: B018 - opened before the clock starts
        ways: dict[str, Callable[[Refs], int]] = {
            "memmap": self._by_memmap,
            "preadv": self._by_preadv,
            "read_document": lambda refs: self._by_store(store, refs),
        }
        cases = [Case(name, functools.partial(way, refs)) for name, way in ways.items()]
        if threads > 1:
            cases += [
                Case(f"{name} x{threads}", functools.partial(in_threads, way, refs, threads))
                for name, way in ways.items()
            ]
        if with_zarr:
            cases.append(Case("zarr-python", lambda: self._by_zarr(refs[::_ZARR_SHARE]), rounds=1))
        return cases

    def _by_memmap(self, refs: Refs) -> int:
        maps = {block: self.mapped(block) for block in self.seals}
        return sum(np.array(maps[ref.block][ref.start : ref.start + ref.length]).nbytes for ref in refs)

    def _by_preadv(self, refs: Refs) -> int:
        buffer = self._buffers([self.name], refs)[self.name]
        row, size = buffer[0].nbytes, 0
        with ExitStack() as stack:
            files = {block: stack.enter_context((self.raw / f"{block}.bin").open("rb")) for block in self.seals}
            for ref in refs:
                view = buffer[: ref.length].reshape(-1).view(np.uint8).data
                done = 0
                while done < view.nbytes:
                    done += os.preadv(files[ref.block].fileno(), [view[done:]], ref.start * row + done)
                size += done
        return size

    def _by_store(self, store: TeacherStore, refs: Refs) -> int:
        names = read_of(self.precision)
        buffers = self._buffers(names, refs)
        size = 0
        for ref in refs:
            out = {name: buffer[: ref.length] for name, buffer in buffers.items()}
            size += store.read_document(ref, names, out)[self.name].nbytes
        return size

    def _by_zarr(self, refs: Refs) -> int:
        import zarr

        folders = {block: self.store / block_name(block) / self.name for block in self.seals}
        arrays: dict[int, Any] = {block: zarr.open_array(folder, mode="r") for block, folder in folders.items()}
        return sum(np.asarray(arrays[ref.block][ref.start : ref.start + ref.length]).nbytes for ref in refs)

    def _buffers(self, names: Sequence[str], refs: Refs) -> Arrays:
        rows = max(ref.length for ref in refs)
        return {name: np.zeros((rows, *self.arrays[name].shape[1:]), self.arrays[name].dtype) for name in names}
