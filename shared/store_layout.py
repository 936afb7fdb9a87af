"""What a teacher store looks like on disk: names, dtypes, chunks. Pure; written by store_write.py, read by store.py.

    STORE/store.json            identity, written once when the store is created
          plan.json             blocks of whole documents, made once, independent of the number of workers
          target/               config, tokenizer, head.safetensors (embed_tokens, lm_head unless tied, norm)
          blocks/<000000>/      one immutable Zarr v3 group per block; appears by one rename
          manifest/             append-only records; a block is done when its shard record says so
          index/                a cache of all blocks' per-document arrays; may be deleted at any time

bf16 has no Zarr v3 core dtype (zarr 3.1-3.4 refuse it), so its bits are kept as uint16 and the array's
attributes say so. The fill value of such arrays is a bf16 NaN: a missing chunk never reads as zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

STORE_FORMAT = 2
BF16_NAN = 0x7FC1
# Tokens of an inner chunk, and of one with small or large rows.
CHUNK_TOKENS = 32
SMALL_CHUNK_TOKENS = 1024
SMALL_ROW_BYTES = 1 << 10
LARGE_CHUNK_TOKENS = 16
LARGE_ROW_BYTES = 16 << 10
SHARD_TOKENS = 8192
SMALL_SHARD_TOKENS = 1 << 20

Precision = Literal["bfloat16", "int8"]


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a block: numpy dtype, what its bits mean, fill value, what its rows are."""

    dtype: str
    bits_of: str
    fill: float
    rows: Literal["tokens", "documents", "offsets", "block"] = "tokens"


ARRAYS: dict[str, ArrayLayout] = {
    "input_ids": ArrayLayout("int32", "int32", -1),
    "loss_mask": ArrayLayout("uint8", "bool", 255),
    "hidden_states": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    # -128 is no code: quantised values lie in [-127, 127].
    "hidden_states_q": ArrayLayout("int8", "int8 codes: value = code * scale * channel", -128),
    "hidden_states_scale": ArrayLayout("float32", "float32", float("nan")),
    "hidden_states_channel": ArrayLayout("float32", "float32", float("nan"), "block"),
    "last_hidden_state": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    "last_hidden_state_q": ArrayLayout("int8", "int8 codes: value = code * scale * channel", -128),
    "last_hidden_state_scale": ArrayLayout("float32", "float32", float("nan")),
    "last_hidden_state_channel": ArrayLayout("float32", "float32", float("nan"), "block"),
    "topk_ids": ArrayLayout("int32", "int32", -1),
    "topk_logits": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    "logsumexp": ArrayLayout("float32", "float32", float("nan")),
    "document_offsets": ArrayLayout("int64", "int64", -1, "offsets"),
    "document_index": ArrayLayout("int64", "int64", -1, "documents"),
    "document_split": ArrayLayout("uint8", "uint8", 255, "documents"),
    "document_supervised": ArrayLayout("int64", "int64", -1, "documents"),
}


def arrays_of(precision: str, last_hidden: str) -> tuple[str, ...]:
    """Names of the arrays in every block of a store; precisions are "bfloat16" or "int8", last_hidden also "none"."""
    left_out = set(_forms("hidden_states")) - set(_form("hidden_states", precision))
    left_out |= set(_forms("last_hidden_state")) - set(_form("last_hidden_state", last_hidden))
    return tuple(name for name in ARRAYS if name not in left_out)


def _form(name: str, precision: str) -> tuple[str, ...]:
    quantised = (f"{name}_q", f"{name}_scale", f"{name}_channel")
    return {"bfloat16": (name,), "int8": quantised, "none": ()}[precision]


def _forms(name: str) -> tuple[str, ...]:
    return _form(name, "bfloat16") + _form(name, "int8")


def block_name(block: int) -> str:
    """The folder of one block, relative to the store."""
    return f"blocks/{block:06d}"


def chunks_of(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(inner chunk, Zarr shard) shapes; whole arrays for those whose rows are not tokens.

    A chunk is what is read and checked at once, 32 KB to 1 MB: small enough to stay in a core's second cache between
    the two, and to read little beyond a document's ends (16 tokens at the 27B shape, 820 KB); it costs 4 bytes and two
    calls. 8,192 tokens a shard file of rows of 1 KiB or more (420 MB there), one file for narrow ones: at 1.6e9 tokens
    the files and their folders are millions of inodes.
    """
    layout = ARRAYS[name]
    rows = max(shape[0], 1)
    if layout.rows != "tokens":
        return (rows, *shape[1:]), (rows, *shape[1:])
    row_bytes = math.prod(shape[1:]) * np.dtype(layout.dtype).itemsize
    wide = row_bytes >= SMALL_ROW_BYTES
    usual = LARGE_CHUNK_TOKENS if row_bytes >= LARGE_ROW_BYTES else CHUNK_TOKENS
    chunk = min(usual if wide else SMALL_CHUNK_TOKENS, rows)
    shard = chunk * max(1, min(SHARD_TOKENS if wide else SMALL_SHARD_TOKENS, -(-rows // chunk) * chunk) // chunk)
    return (chunk, *shape[1:]), (shard, *shape[1:])


def from_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 of bf16 bit patterns (uint16)."""
    return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)


def array_metadata(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The Zarr v3 metadata document of one array; the same bytes whatever version of zarr is installed."""
    layout = ARRAYS[name]
    chunk, shard = chunks_of(name, shape)
    number = np.dtype(layout.dtype)
    serializer: dict[str, Any] = {"name": "bytes"}
    if number.itemsize > 1:
        serializer["configuration"] = {"endian": "little"}
    fill: Any = "NaN" if number.kind == "f" else int(layout.fill)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(chunk),
                    "codecs": [serializer, {"name": "crc32c"}],
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ],
        "attributes": {"bits_of": layout.bits_of},
        "storage_transformers": [],
    }


def group_metadata(attributes: dict[str, Any]) -> dict[str, Any]:
    """The Zarr v3 metadata document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}
