"""A store takes the bytes that were planned for it, exactly, and is refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DiskFull
from shared.store_layout import ARRAYS
from shared.store_write import create, write_block
from stage1_extract.disk_plan import Blocks, Size, StoreShape, StoreSize, store_size
from stage1_extract.disk_room import Room, measure_disk, readable_bytes, require_room
from stage1_extract.plan import Plan, make_plan

FORMS = [(p, last) for p in ("bfloat16", "int8") for last in ("bfloat16", "int8", "none")]


def shape_of(precision: str = "bfloat16", last_hidden: str = "bfloat16", **changes: Any) -> StoreShape:
    sizes: dict[str, Any] = {"hidden_size": 48, "num_taps": 3, "topk": 7, "vocab_size": 1000, **changes}
    return StoreShape(precision=precision, last_hidden=last_hidden, **sizes)


def block_of(shape: StoreShape, lengths: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """A block as extraction writes it, of zeros; shapes are spelt out here, not asked of the code under test."""
    n, d, taps, hidden, k = sum(lengths), len(lengths), shape.num_taps, shape.hidden_size, shape.topk
    shapes = {
        "input_ids": (n,),
        "loss_mask": (n,),
        "hidden_states": (n, taps, hidden),
        "hidden_states_q": (n, taps, hidden),
        "hidden_states_scale": (n, taps),
        "hidden_states_channel": (taps, hidden),
        "last_hidden_state": (n, hidden),
        "last_hidden_state_q": (n, hidden),
        "last_hidden_state_scale": (n,),
        "last_hidden_state_channel": (hidden,),
        "topk_ids": (n, k),
        "topk_logits": (n, k),
        "logsumexp": (n,),
        "document_index": (d,),
        "document_split": (d,),
    }
    quantised = {name: (shape.precision if name.startswith("h") else shape.last_hidden) for name in shapes}
    kept = {
        name
        for name in shapes
        if "hidden_state" not in name
        or quantised[name] == ("bfloat16" if name in ("hidden_states", "last_hidden_state") else "int8")
    }
    arrays = {name: np.zeros(shapes[name], ARRAYS[name].dtype) for name in kept}
    return arrays | {"document_offsets": np.cumsum([0, *lengths], dtype=np.int64)}


def write_store(folder: Path, shape: StoreShape, blocks: list[list[int]]) -> list[dict[str, Any]]:
    (folder / "blocks").mkdir(exist_ok=True)
    return [write_block(folder, number, block_of(shape, lengths)) for number, lengths in enumerate(blocks)]


def planned(shape: StoreShape, blocks: list[list[int]]) -> StoreSize:
    lengths = np.asarray([length for block in blocks for length in block], np.int64)
    starts = np.cumsum([0, *map(len, blocks)]).tolist()
    return store_size(shape, Blocks.of_plan(lengths, Plan(tuple(starts))))


def on_disk(folder: Path) -> tuple[int, int, int]:
    """(bytes of files, files, folders) below a folder."""
    entries = list(folder.rglob("*"))
    files = [entry for entry in entries if entry.is_file()]
    return sum(file.stat().st_size for file in files), len(files), len(entries) - len(files)


@pytest.mark.parametrize(("precision", "last_hidden"), FORMS)
def test_blocks_take_exactly_the_planned_bytes_files_and_folders(
    tmp_path: Path, precision: str, last_hidden: str
) -> None:
    shape = shape_of(precision, last_hidden, hidden_size=300)  # rows of a tap are above and below 1 KiB
    rng = np.random.default_rng(0)
    blocks = [rng.integers(16, 700, count).tolist() for count in (1, 3, 9, 2, 14, 5, 1, 1, 1, 2, 2)]
    blocks[1] = [1, 1, 1]  # a block of fewer tokens than a chunk
    blocks[3] = [4096, 4096]  # whole shards, nothing left over
    records = write_store(tmp_path, shape, blocks)
    size = planned(shape, blocks)
    assert (size.blocks.bytes, size.blocks.files, size.blocks.folders) == on_disk(tmp_path / "blocks")
    assert size.blocks.bytes == sum(record["bytes"] for record in records)
    for name in shape.arrays:
        stored = [path for path in (tmp_path / "blocks").glob(f"*/{name}/c/**/*") if path.is_file()]
        assert (size.arrays[name].bytes, size.arrays[name].files) == (
            sum(path.stat().st_size for path in stored),
            len(stored),
        ), name
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "blocks").rglob("*"))
    assert size.blocks.allocated == pytest.approx(taken, rel=0.02)
    assert size.num_tokens == sum(map(sum, blocks))


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(1, 1500), min_size=1, max_size=4), min_size=1, max_size=3),
    form=st.sampled_from(FORMS),
    hidden_size=st.integers(1, 40),
    num_taps=st.integers(1, 20),
    topk=st.integers(1, 300),
)
def test_any_shape_is_planned_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: list[list[int]],
    form: tuple[str, str],
    hidden_size: int,
    num_taps: int,
    topk: int,
) -> None:
    folder = tmp_path_factory.mktemp("size")
    shape = shape_of(*form, hidden_size=hidden_size, num_taps=num_taps, topk=topk)
    write_store(folder, shape, blocks)
    size = planned(shape, blocks).blocks
    assert (size.bytes, size.files, size.folders) == on_disk(folder / "blocks")


def test_hundreds_of_blocks_and_more_digits_in_their_numbers(tmp_path: Path) -> None:
    shape = shape_of(hidden_size=2, num_taps=1, topk=1)
    blocks = [[3 + number % 2] for number in range(105)]
    write_store(tmp_path, shape, blocks)
    size = planned(shape, blocks).blocks
    assert (size.bytes, size.files, size.folders) == on_disk(tmp_path / "blocks")


def test_an_empty_rest_takes_no_blocks() -> None:
    lengths = np.asarray([5, 6], np.int64)
    nothing = store_size(shape_of(), Blocks.of_plan(lengths, Plan((0, 2)), []), with_target=False)
    assert (nothing.blocks, nothing.num_tokens, nothing.bytes_per_token) == (Size(), 0, 0.0)
    assert nothing.target == Size()


def test_bytes_per_token_at_the_27b_shape_are_those_of_the_formula() -> None:
    shape = shape_of(hidden_size=5120, num_taps=5, topk=64, vocab_size=248320)
    size = store_size(shape, Blocks.even(1_600_000_000, 800_000, 32768))
    plain = 5 * 5120 * 2 + 5120 * 2 + 64 * 6 + 4 + 5
    assert plain < size.bytes_per_token < 1.005 * plain
    small = store_size(
        shape_of("int8", "int8", hidden_size=5120, num_taps=5, topk=64, vocab_size=248320),
        Blocks.even(1_600_000_000, 800_000, 32768),
    )
    assert small.total.bytes <= 0.55 * size.total.bytes
    # 16 tokens of taps with their checksum, and 16 bytes of index for each chunk.
    assert size.arrays["hidden_states"].bytes / size.num_tokens == pytest.approx(51200 + (4 + 16) / 16, rel=0.002)
    assert size.read_per_epoch == sum(size.arrays[name].bytes for name in ("hidden_states", "input_ids", "loss_mask"))


@settings(max_examples=60, deadline=None)
@given(documents=st.integers(1, 400), length=st.integers(1, 300), block_tokens=st.integers(1, 3000))
def test_even_blocks_are_the_plan_of_equal_documents(documents: int, length: int, block_tokens: int) -> None:
    lengths = [length] * documents
    even = Blocks.even(documents * length, documents, block_tokens)
    real = Blocks.of_plan(np.asarray(lengths, np.int64), make_plan(lengths, block_tokens))
    assert np.repeat(even.tokens, even.times).tolist() == real.tokens.tolist()
    assert np.repeat(even.documents, even.times).tolist() == real.documents.tolist()


@settings(max_examples=60, deadline=None)
@given(documents=st.integers(1, 10**6), more=st.integers(0, 10**9), block_tokens=st.integers(1, 10**6))
def test_even_blocks_hold_all_tokens_and_documents(documents: int, more: int, block_tokens: int) -> None:
    even = Blocks.even(documents + more, documents, block_tokens)
    assert (even.num_tokens, even.num_documents) == (documents + more, documents)
    assert (even.tokens >= even.documents).all()


def test_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    room = Room(bytes=10_000_000, inodes=100)
    require_room(tmp_path, Size(9, 10_000_000, 60, 40), room)
    with pytest.raises(DiskFull) as caught:
        require_room(tmp_path, Size(9, 10_000_001, 1, 1), room)
    assert "10 MB are needed, 10 MB are free" in str(caught.value)
    with pytest.raises(DiskFull) as caught:
        require_room(tmp_path, Size(9, 9, 60, 41), room)
    assert "101 files and folders are needed, 100 are free" in str(caught.value)
    require_room(tmp_path, Size(9, 9, 10**9, 0), Room(bytes=10, inodes=None))
    here = Room.at(tmp_path / "not" / "there" / "yet")
    assert here.bytes > 0
    assert here.inodes is None or here.inodes > 0


def test_the_disk_probe_leaves_nothing(tmp_path: Path) -> None:
    assert 0.001 < measure_disk(tmp_path / "x" / "y.zarr", 4 << 20) < 1000
    assert not list(tmp_path.iterdir())


def test_the_shape_of_an_identity(tmp_path: Path) -> None:
    identity = {
        "target": {"tie_word_embeddings": True},
        "target_layer_ids": [0, 2],
        "hidden_size": 64,
        "vocab_size": 320,
        "topk": 8,
        "precision": "int8",
        "last_hidden": "none",
        "dtype": "float32",
    }
    create(tmp_path / "x", identity)
    shape = StoreShape.of_identity(identity)
    assert shape == StoreShape(
        hidden_size=64,
        num_taps=2,
        topk=8,
        vocab_size=320,
        precision="int8",
        last_hidden="none",
        tied=True,
        head_dtype_bytes=4,
    )


def test_bytes_are_said_in_the_units_of_disks() -> None:
    sizes = (0, 999, 1000, 999_499, 999_500, 51_200_000, 83_900_000_000_000)
    assert [readable_bytes(size) for size in sizes] == ["0 B", "999 B", "1 kB", "999 kB", "1 MB", "51.2 MB", "83.9 TB"]
