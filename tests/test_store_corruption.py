"""Whatever happens to any file of a store: verification names it, and reading never gives a wrong byte.

Thousands of random faults over every file and array of a small store in both precisions; the number of a trial and
the seed repeat it (DFLASH_SEED=... pytest -k corruption). The layout's chunks are made small, so that the store has
many chunks and shards. The faults are in tests/store_faults.py.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import zarr
from small_store import make_arrays, make_small_store
from store_faults import Changes, Ground, bytes_below, faults, flip_bit, grid_of

import shared.store_layout as layout
from manifests.blocks import open_store
from manifests.store_findings import Finding, VerifyOptions
from manifests.store_verification import check_store
from shared.documents import write_index
from shared.errors import StoreDamaged, StoreIncomplete, StoreMissing
from shared.store import TeacherStore
from shared.store_check import check_block
from shared.store_files import LocalFiles
from shared.store_layout import ARRAYS
from shared.store_write import create, write_block

PRECISIONS = ("bfloat16", "int8")


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SMALL_CHUNK_TOKENS", 32)
        patch.setattr(layout, "SHARD_TOKENS", 128)
        patch.setattr(layout, "SMALL_SHARD_TOKENS", 128)
        yield


@pytest.fixture(scope="module", params=PRECISIONS)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _small_chunks: None) -> Ground:
    root = tmp_path_factory.mktemp(request.param)
    made = make_small_store(root / "x.zarr", request.param, writers=2)
    older = make_small_store(root / "older.zarr", request.param, writers=2, seed=1)
    for store in (made, older):
        opened = open_store(store.path)
        write_index(store.path, opened.snapshot, opened.documents)
    return Ground(made, bytes_below(made.path), bytes_below(older.path))


def check(path: Path) -> list[Finding]:
    with redirect_stderr(io.StringIO()):
        return check_store(str(path), VerifyOptions(threads=1)).findings


def names_it(finding: Finding, file: str) -> bool:
    """Whether a finding says where the fault in a file is: block, array and file, or line, or what is lost by it."""
    parts = file.split("/")
    if parts[0] == "blocks" and len(parts) > 2:
        array = parts[2] if len(parts) > 3 else ""
        return (
            finding.kind == "damage"
            and finding.block == int(parts[1])
            and finding.array == array
            and finding.file == file
        )
    if file.startswith("manifest/shards."):
        return finding.file == file or (finding.kind != "note" and finding.block is not None)
    if file.startswith("manifest/documents."):
        return finding.file == file or finding.part == "documents"
    return finding.file == file and (finding.kind == "damage" or file.startswith("manifest/"))


def expected_in(file: str, changes: Changes) -> bool:
    """A block whose own seal is another is named by that: nothing below it can be told apart any more."""
    parts = file.split("/")
    seal = f"blocks/{parts[1]}/zarr.json" if parts[0] == "blocks" and len(parts) > 2 else ""
    return not seal or seal not in changes or file == seal


def read_touched(ground: Ground, changes: Changes, chance: random.Random) -> str:
    """Read what the fault lies in, through the door that training uses; returns how that ended. Wrong bytes fail."""
    try:
        opened = open_store(ground.made.path)
        documents = opened.documents
        if any(name.startswith("target/") for name in changes):
            opened.load_head()
            return "read"
        refs = touched(ground, opened, changes) or [documents[chance.randrange(len(documents))]]
        for ref in refs:
            arrays = ground.made.arrays[ref.block]
            names = [name for name in arrays if ARRAYS[name].rows == "tokens"]
            read = opened.read_document(ref, names)
            for name in names:
                np.testing.assert_array_equal(read[name], arrays[name][ref.start : ref.start + ref.length], strict=True)
            offsets = arrays["document_offsets"]
            place = int(np.flatnonzero(arrays["document_index"] == ref.index)[0])
            assert (ref.start, ref.length) == (offsets[place], offsets[place + 1] - offsets[place])
        for name in {name.split("/")[2] for name in changes if grid_of(ground, name)}:
            for block, arrays in ground.made.arrays.items():
                np.testing.assert_array_equal(opened.read_block_array(block, name), arrays[name], strict=True)
    except (StoreDamaged, StoreIncomplete) as error:
        return type(error).__name__
    except StoreMissing:
        assert changes.get("store.json", b"") is None
        return "StoreMissing"
    return "read"


def touched(ground: Ground, opened: TeacherStore, changes: Changes) -> list[layout.Any]:
    """Documents with a token in a row that differs from what was written."""
    rows: set[tuple[int, int]] = set()
    for name, data in changes.items():
        found = grid_of(ground, name)
        if found is None or data is None or len(data) != len(ground.files[name]):
            continue
        grid, shard = found
        block, array = int(name.split("/")[1]), name.split("/")[2]
        if ARRAYS[array].rows == "tokens":
            different = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(ground.files[name], np.uint8))[0]
            rows.add((block, shard * grid.shard_rows + int(different) // grid.step * grid.chunk_rows))
    documents = opened.documents
    ends = documents.start + documents.length
    found_in = [
        np.flatnonzero((documents.block == block) & (documents.start <= row) & (row < ends)) for block, row in rows
    ]
    return [documents[int(position)] for position in sorted({int(p) for positions in found_in for p in positions})[:3]]


def trial(ground: Ground, fault: str, changes: Changes, chance: random.Random) -> str:
    """One fault: verification must name every changed file, reading must refuse or give the right bytes."""
    ground.apply(changes)
    try:
        found = check(ground.made.path)
        for file in changes:
            if changes[file] != ground.files[file] and expected_in(file, changes):
                assert any(names_it(finding, file) for finding in found), f"{fault} accepted in {file}: {found}"
        return read_touched(ground, changes, chance)
    finally:
        ground.restore(changes)


def run(ground: Ground, count: int, seed: int) -> None:
    """So many trials; DFLASH_SEED wins over the seed. Says how often each fault was tried and how reading ended."""
    seed, started = int(os.environ.get("DFLASH_SEED", seed)), time.monotonic()
    chance, told = random.Random(seed), Counter[str]()
    for number, (fault, name, changes) in enumerate(itertools.islice(faults(ground, chance), count)):
        try:
            ended = trial(ground, fault, changes, chance)
        except Exception as error:
            raise AssertionError(f"trial {number} of seed {seed}, {fault} on {name}: {error!r}") from error
        told.update((fault, f"reading: {ended}"))
        if number % 200 == 0:
            assert check(ground.made.path) == [], (number, seed)
    assert bytes_below(ground.made.path) == ground.files
    assert check(ground.made.path) == []
    tried = ", ".join(f"{name} {number}" for name, number in sorted(told.items()))
    print(f"\n{count} corruptions, seed {seed}, 0 accepted, {time.monotonic() - started:.0f} s: {tried}")  # noqa: T201


def test_random_corruption_is_never_accepted(ground: Ground) -> None:
    run(ground, 150, 3)


@pytest.mark.slow
def test_ten_thousand_corruptions_are_never_accepted(ground: Ground) -> None:
    run(ground, 5_000, time.time_ns() % 10**9)


# The table of silent damage: what plain zarr does with each was measured; here none may pass, array by array.


def _missing(data: bytes) -> bytes | None:
    return None


def _empty(data: bytes) -> bytes:
    return b""


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _appended(data: bytes) -> bytes:
    return data + bytes(16)


def _zero_filled(data: bytes) -> bytes:
    return bytes(len(data))


TABLE = (_missing, _empty, _truncated, _appended, _zero_filled)


@pytest.mark.parametrize("damage", TABLE, ids=lambda damage: damage.__name__.strip("_"))
def test_no_kind_of_damage_is_silent_in_any_array(ground: Ground, damage: Callable[[bytes], bytes | None]) -> None:
    for name, file in first_shards(ground).items():
        ground.apply({file: damage(ground.files[file])})
        try:
            found = check(ground.made.path)
            assert [(f.block, f.array, f.file) for f in found] == [(1, name, file)], (file, found)
            with pytest.raises(StoreDamaged) as caught:
                open_store(ground.made.path).read_block_array(1, name)
            assert file in str(caught.value)
            require_no_zeros(ground, name)
        finally:
            ground.restore({file: None})


def require_no_zeros(ground: Ground, name: str) -> None:
    """What zarr alone makes of a damaged array of block 1: an error, or the fill value, which is never data."""
    group = zarr.open_group(ground.made.path, mode="r")["blocks/000001"]
    assert isinstance(group, zarr.Group)
    try:
        read = np.asarray(group[name][...])  # type: ignore[index]
    except Exception:  # noqa: BLE001 - zarr raises many kinds
        return
    written = ground.made.arrays[1][name]
    wrong = read != written
    fill = ARRAYS[name].fill
    assert wrong.any()
    assert (np.isnan(read[wrong]) if np.isnan(fill) else read[wrong] == fill).all()


def test_every_flip_is_seen_in_every_array(ground: Ground) -> None:
    chance = random.Random(0)
    store = open_store(ground.made.path)
    for name, file in first_shards(ground).items():
        for _ in range(30):
            ground.apply(flip_bit(ground, file, chance) or {})
            with pytest.raises(StoreDamaged) as caught:
                TeacherStore(store.location, store.blocks).read_block_array(1, name)
            assert file in str(caught.value)
        ground.restore({file: None})
    assert check(ground.made.path) == []


def first_shards(ground: Ground) -> dict[str, str]:
    """The first shard file of each array of block 1."""
    dimensions = {name: array.ndim for name, array in ground.made.arrays[1].items()}
    return {name: f"blocks/000001/{name}/c{'/0' * count}" for name, count in dimensions.items()}


def test_a_chunk_of_zeros_is_data(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    arrays = make_arrays((40, 130), 0, "bfloat16")
    for name in arrays:
        if ARRAYS[name].rows == "tokens":
            arrays[name][:] = 0
    create(path, {"precision": "bfloat16", "last_hidden": "bfloat16"})
    files, seal = LocalFiles(path), write_block(path, 0, arrays)["seal"]
    assert list(check_block(files, 0, seal)) == []
    assert not TeacherStore(path, {0: seal}).read_block_array(0, "hidden_states").any()
