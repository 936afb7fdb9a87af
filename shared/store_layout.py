"""What a teacher store looks like on disk: names, dtypes, chunks. Pure; read with shared/store.py.

    STORE/store.json            identity, written once when the store is created
          plan.json             blocks of whole documents, made once, independent of the number of workers
          target/               config, tokenizer, head.safetensors (embed_tokens, lm_head unless tied, norm)
          blocks/<000000>/      one immutable Zarr v3 group per block; appears by one rename
          manifest/             append-only records; a block is done when its shard record says so

bf16 has no Zarr v3 core dtype (zarr 3.1-3.4 refuse it), so its bits are kept as uint16 and the array's
attributes say so. The fill value of such arrays is a bf16 NaN: a missing chunk never reads as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STORE_FORMAT = 1
BF16_NAN = 0x7FC1
CHUNK_TOKENS = 64
SHARD_TOKENS = 4096


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a block: numpy dtype, what its bits mean, fill value, whether rows are tokens."""

    dtype: str
    bits_of: str
    fill: float
    per_token: bool = True


ARRAYS: dict[str, ArrayLayout] = {
    "input_ids": ArrayLayout("int32", "int32", -1),
    "loss_mask": ArrayLayout("uint8", "bool", 255),
    "hidden_states": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    "last_hidden_state": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    "topk_ids": ArrayLayout("int32", "int32", -1),
    "topk_logits": ArrayLayout("uint16", "bfloat16", BF16_NAN),
    "logsumexp": ArrayLayout("float32", "float32", float("nan")),
    "document_offsets": ArrayLayout("int64", "int64", -1, per_token=False),
    "document_index": ArrayLayout("int64", "int64", -1, per_token=False),
    "document_split": ArrayLayout("uint8", "uint8", 255, per_token=False),
    "document_supervised": ArrayLayout("int64", "int64", -1, per_token=False),
}


def block_dir(store: Path, block: int) -> Path:
    """The folder of one block."""
    return store / "blocks" / f"{block:06d}"


def chunks_of(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(inner chunk, Zarr shard) shapes: 64 tokens in shards of 4,096, whole arrays for the per-document ones."""
    if not ARRAYS[name].per_token or shape[0] == 0:
        whole = (max(shape[0], 1), *shape[1:])
        return whole, whole
    chunk = min(CHUNK_TOKENS, shape[0])
    shard = chunk * max(1, min(SHARD_TOKENS, -(-shape[0] // chunk) * chunk) // chunk)
    return (chunk, *shape[1:]), (shard, *shape[1:])
