"""How many bytes and files a store takes, before it exists: arithmetic over the layout, nothing else.

The one size formula of the project: `dflash plan` prints it (stage1_extract/plan_report.py) and `dflash extract`
refuses by it. Shapes and file sizes come from shared/store_layout.py and shared/shard_file.py, so it cannot drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shared.seal import SealedArray, document, sealed_group
from shared.shard_file import ShardGrid
from shared.store_layout import ARRAYS, SHARD_TOKENS, array_metadata, arrays_of
from stage1_extract.plan import Plan

Counts = np.ndarray[Any, np.dtype[np.int64]]

# File systems hand out whole pages of this size: a file of 5 bytes takes one, and so does a folder.
PAGE_BYTES = 4096
# Lines of the manifest and of the document index, and plan.json: about; below 0.1 % of any store worth planning.
DOCUMENT_RECORD_BYTES = 450
BLOCK_RECORD_BYTES = 700
# A tokenizer of 150-250 thousand words with config and template, when there is no target to look at.
TOKENIZER_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """What something takes: `bytes` in files, `allocated` bytes of the file system (whole pages), files, folders."""

    bytes: int = 0
    allocated: int = 0
    files: int = 0
    folders: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.bytes + other.bytes,
            self.allocated + other.allocated,
            self.files + other.files,
            self.folders + other.folders,
        )

    def __mul__(self, times: int) -> Size:
        return Size(self.bytes * times, self.allocated * times, self.files * times, self.folders * times)

    @property
    def inodes(self) -> int:
        """Files and folders."""
        return self.files + self.folders


def file_size(size: int) -> Size:
    """One file of so many bytes."""
    return Size(size, -(-size // PAGE_BYTES) * PAGE_BYTES, 1, 0)


def total(sizes: Iterable[Size]) -> Size:
    """The sum."""
    return sum(sizes, Size())


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreShape:
    """What the size of a store depends on besides its rows. `head_dtype_bytes`: of the exported embedding and head."""

    hidden_size: int
    num_taps: int
    topk: int
    vocab_size: int
    precision: str
    last_hidden: str
    tied: bool = False
    head_dtype_bytes: int = 2
    tokenizer_bytes: int = TOKENIZER_BYTES

    @classmethod
    def of_identity(cls, identity: Mapping[str, Any]) -> StoreShape:
        """From a store's identity (store.json)."""
        return cls(
            hidden_size=identity["hidden_size"],
            num_taps=len(identity["target_layer_ids"]),
            topk=identity["topk"],
            vocab_size=identity["vocab_size"],
            precision=identity["precision"],
            last_hidden=identity["last_hidden"],
            tied=identity["target"]["tie_word_embeddings"],
            head_dtype_bytes=dtype_bytes(identity["dtype"]),
        )

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays in every block."""
        return arrays_of(self.precision, self.last_hidden)

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of an array: what follows its first axis."""
        if name.endswith("_channel"):  # one row per tap, or no tap axis at all
            return (self.hidden_size,) if name.startswith("hidden") else ()
        if name.endswith("_scale"):
            return (self.num_taps,) if name.startswith("hidden") else ()
        if name.startswith("hidden_states"):
            return (self.num_taps, self.hidden_size)
        if name.startswith("last_hidden_state"):
            return (self.hidden_size,)
        return (self.topk,) if name.startswith("topk") else ()

    def num_rows(self, name: str, tokens: Counts, documents: Counts) -> Counts:
        """Rows of an array in blocks of so many tokens and documents: int64 [blocks]."""
        rows = ARRAYS[name].rows
        if rows == "block":
            return np.full_like(tokens, self.num_taps if name.startswith("hidden") else self.hidden_size)
        return {"tokens": tokens, "documents": documents, "offsets": documents + 1}[rows]


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number of a torch dtype by name."""
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tokens and documents of every block: int64 [blocks] each, or of kinds of blocks with how many there are."""

    tokens: Counts
    documents: Counts
    times: Counts

    @classmethod
    def of_plan(cls, lengths: Counts, plan: Plan, only: Iterable[int] | None = None) -> Blocks:
        """The blocks of a plan over documents of these lengths, or only some of them."""
        starts = np.asarray(plan.starts, dtype=np.int64)
        sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        chosen = np.arange(plan.num_blocks) if only is None else np.fromiter(only, dtype=np.int64)
        first, last = starts[chosen], starts[chosen + 1]
        return cls(sums[last] - sums[first], last - first, np.ones(len(chosen), np.int64))

    @classmethod
    def even(cls, tokens: int, documents: int, block_tokens: int) -> Blocks:
        """Blocks of documents of one length, tokens / documents.

        A block takes documents until it holds `block_tokens`: ceil(block_tokens * documents / tokens) of them; the last
        block takes the rest.
        """
        per_block = min(-(-block_tokens * documents // tokens), documents)
        full, rest = divmod(documents, per_block)
        in_full = tokens * per_block * full // documents
        each, more = divmod(in_full, full)
        kinds = [(each, per_block, full - more), (each + 1, per_block, more), (tokens - in_full, rest, min(rest, 1))]
        kinds = [kind for kind in kinds if kind[2]]
        columns = np.asarray(kinds, dtype=np.int64).T
        return cls(columns[0], columns[1], columns[2])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self.times.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return int((self.tokens * self.times).sum())

    @property
    def num_documents(self) -> int:
        """Documents of all blocks."""
        return int((self.documents * self.times).sum())


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Sizes of a store's parts: one for each array (with its checksums and shard index), and what is around them."""

    arrays: dict[str, Size]
    metadata: Size
    """Zarr metadata of blocks and arrays, with the seals (8 bytes for each checksum), and the folders."""
    target: Size
    """Embedding, head, norm, tokenizer, config."""
    records: Size
    """Manifest, plan, document index, identity: about."""
    num_tokens: int
    num_blocks: int
    total: Size = field(init=False)

    def __post_init__(self) -> None:
        parts = total([*self.arrays.values(), self.metadata, self.target, self.records])
        object.__setattr__(self, "total", parts)

    @property
    def blocks(self) -> Size:
        """Everything below blocks/, byte for byte."""
        return total([*self.arrays.values(), self.metadata])

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the blocks for each token."""
        return self.blocks.bytes / self.num_tokens if self.num_tokens else 0.0

    @property
    def read_per_epoch(self) -> int:
        """Bytes that training reads of each epoch: tapped hidden states, ids, loss mask."""
        read = ("hidden_states", "hidden_states_q", "hidden_states_scale", "input_ids", "loss_mask")
        return total(self.arrays[name] for name in read if name in self.arrays).bytes


def store_size(shape: StoreShape, blocks: Blocks, *, with_target: bool = True) -> StoreSize:
    """Bytes and files of a store of these blocks.

    An array of a block with N rows of r bytes in chunks of c rows and shards of s rows takes
    ceil(N / c) * (c * r + 4) bytes of chunks with their CRC, and in each of its ceil(N / s) files an index of
    16 * s / c + 4 bytes. A last chunk is stored whole, so it counts whole.
    """
    arrays, metadata = {}, Size()
    for name in shape.arrays:
        rows = shape.num_rows(name, blocks.tokens, blocks.documents)
        data = Size()
        for count, times in _counted(rows, blocks.times):
            shards, around = _array_size(name, (count, *shape.row_shape(name)))
            data, metadata = data + shards * times, metadata + around * times
        arrays[name] = data
    metadata = metadata + _group_size() * blocks.num_blocks + _number_width(blocks.num_blocks)
    target = target_size(shape) if with_target else Size()
    return StoreSize(arrays, metadata, target, _record_size(blocks), blocks.num_tokens, blocks.num_blocks)


def _counted(rows: Counts, times: Counts) -> list[tuple[int, int]]:
    """(row count, how many blocks have it), so that equal blocks are worked out once."""
    values, place = np.unique(rows, return_inverse=True)
    sums = np.zeros(len(values), np.int64)
    np.add.at(sums, place.reshape(-1), times)
    return [(int(value), int(count)) for value, count in zip(values, sums, strict=True)]


@lru_cache(maxsize=65536)
def _array_size(name: str, shape: tuple[int, ...]) -> tuple[Size, Size]:
    """(shard files, metadata: its zarr.json, its entry in the block's seal, its folders) of one array of one block."""
    grid = ShardGrid.of("", name, shape)
    rows, num_shards = shape[0], grid.num_shards()
    # All shards but the last are alike.
    shards = file_size(grid.file_bytes(0)) * (num_shards - 1) + file_size(grid.file_bytes(num_shards - 1))
    folders = 2 + num_shards * (len(shape) - 1)  # the array's, "c", and one level for each further axis
    # Long token arrays differ in the digits of their length and in the number of checksums, 8 hex digits each.
    if num_shards > 1:
        alike = max(SHARD_TOKENS, 10 ** (len(str(rows)) - 1))
    else:
        alike = grid.shard_rows if len(str(grid.shard_rows)) == len(str(rows)) else rows
    metadata, entry = _metadata_bytes(name, (alike, *shape[1:]))
    entry += 8 * (grid.num_chunks() - ShardGrid.of("", name, (alike, *shape[1:])).num_chunks())
    around = file_size(metadata) + Size(entry, entry + folders * PAGE_BYTES, 0, folders)
    return shards, around


@lru_cache(maxsize=4096)
def _metadata_bytes(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(bytes of an array's zarr.json, bytes of its entry in the seal)."""
    entry = _seal_bytes({name: ShardGrid.of("", name, shape)}) - _empty_seal_bytes()
    return len(document(array_metadata(name, shape))), entry


def _group_size() -> Size:
    """A block's folder, and its zarr.json without the arrays' entries; half a page stands for rounding that file up."""
    size = _empty_seal_bytes()
    return Size(size, size + PAGE_BYTES // 2 + PAGE_BYTES, 1, 1)


@lru_cache(maxsize=1)
def _empty_seal_bytes() -> int:
    """Bytes of a block's zarr.json around the entries: two files of one entry each, less the file of both."""
    first, second = (ShardGrid.of("", name, (1,)) for name in ("input_ids", "loss_mask"))
    alone = _seal_bytes({"input_ids": first}) + _seal_bytes({"loss_mask": second})
    return alone - _seal_bytes({"input_ids": first, "loss_mask": second})


def _seal_bytes(grids: Mapping[str, ShardGrid]) -> int:
    sums = {name: np.zeros(grid.num_chunks(), np.uint32) for name, grid in grids.items()}
    return len(sealed_group(0, {name: SealedArray(grid, 0, sums[name]) for name, grid in grids.items()}))


def _number_width(num_blocks: int) -> Size:
    """The digits of the block numbers in the seals, beyond one each."""
    digits = sum(max(num_blocks - 10**power, 0) for power in range(1, len(str(num_blocks)) + 1))
    return Size(digits, digits, 0, 0)


def target_size(shape: StoreShape) -> Size:
    """The folder target/: embedding and (unless tied) head of vocab_size rows, norm, config, tokenizer."""
    matrices = 1 if shape.tied else 2
    head = (matrices * shape.vocab_size + 1) * shape.hidden_size * shape.head_dtype_bytes
    return file_size(head + 300) + file_size(shape.tokenizer_bytes) + Size(3000, 4 * PAGE_BYTES, 4, 1)


def _record_size(blocks: Blocks) -> Size:
    documents, count = blocks.num_documents, blocks.num_blocks
    size = documents * (DOCUMENT_RECORD_BYTES + 41) + count * (BLOCK_RECORD_BYTES + 40) + 10_000
    return file_size(size) + Size(0, 20 * PAGE_BYTES, 20, 5)
