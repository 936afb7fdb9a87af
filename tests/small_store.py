"""A small store with everything a real one has, for tests of the store commands: two blocks, records, plan, target.

The target is three small files and the features are random; what they mean is tested elsewhere.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from manifests.commit import Ledger
from manifests.records import DocumentRecord, RunRecord, ShardRecord, SkipRecord
from shared.atomic import write_json
from shared.json_file import sealed
from shared.store import Arrays
from shared.store_layout import ARRAYS, arrays_of
from shared.store_write import create, write_block
from shared.target_files import write_list

LENGTHS = ((40, 70, 3), (65, 130, 1, 20))
TAPS, HIDDEN, TOPK = 2, 512, 3


@dataclass(frozen=True)
class SmallStore:
    """A store and the arrays that were written into its blocks."""

    path: Path
    arrays: dict[int, Arrays]
    seals: dict[int, str]


def make_arrays(lengths: tuple[int, ...], first: int, precision: str, seed: int = 0) -> Arrays:
    """Arrays of one block; documents are numbered from `first`, every third is held out."""
    rng = np.random.default_rng([seed, first])
    tokens, documents = sum(lengths), len(lengths)
    shapes = {
        "hidden_states": (tokens, TAPS, HIDDEN), "hidden_states_q": (tokens, TAPS, HIDDEN),
        "hidden_states_scale": (tokens, TAPS), "hidden_states_channel": (TAPS, HIDDEN),
        "last_hidden_state": (tokens, HIDDEN), "last_hidden_state_q": (tokens, HIDDEN),
        "last_hidden_state_scale": (tokens,), "last_hidden_state_channel": (HIDDEN,),
        "topk_ids": (tokens, TOPK), "topk_logits": (tokens, TOPK), "logsumexp": (tokens,),
    }  # fmt: skip
    arrays: Arrays = {
        "input_ids": rng.integers(0, 100, tokens, dtype=np.int32),
        "loss_mask": rng.integers(0, 2, tokens, dtype=np.uint8),
        "document_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "document_index": np.arange(first, first + documents, dtype=np.int64),
        "document_split": (np.arange(first, first + documents) % 3 == 2).astype(np.uint8),
    }
    for name in arrays_of(precision, precision):
        if name in shapes:
            rng = np.random.default_rng([seed, first, list(ARRAYS).index(name)])  # the same in every precision
            kind = np.dtype(ARRAYS[name].dtype)
            low, high = (-127, 128) if kind == np.int8 else (0, 2**14)
            drawn = rng.random(shapes[name]) + 0.5 if kind.kind == "f" else rng.integers(low, high, shapes[name])
            arrays[name] = drawn.astype(kind)
    return arrays


def write_store_of(path: Path, precision: str, arrays: Arrays) -> Path:
    """A finished store with these arrays over all its tokens (or channels), the rest made up."""
    return make_small_store(path, precision, given=arrays).path


def make_small_store(
    path: Path, precision: str = "bfloat16", *, seed: int = 0, writers: int = 1, given: Arrays | None = None
) -> SmallStore:
    """Write and finish a store as extraction does; `writers` processes have made the blocks in turn."""
    documents = sum(len(lengths) for lengths in LENGTHS)
    identity: dict[str, Any] = {
        "target": {"name": "small", "weights_sha256": "0" * 64, "hidden_size": HIDDEN, "vocab_size": 100},
        "target_layer_ids": list(range(TAPS)), "hidden_size": HIDDEN, "vocab_size": 100, "mask_token_id": 99,
        "topk": TOPK, "dtype": "bfloat16", "precision": precision, "last_hidden": precision, "version": "0.1.0",
        "rows_sha256": "1" * 64, "documents": documents, "tokens": sum(map(sum, LENGTHS)),
    }  # fmt: skip
    create(path, identity)
    runs = Ledger(path, "extract-run")
    config = {"target": "small", "data": "rows", "out": "elsewhere.zarr", "shards": writers, "target_layer_ids": [0, 1]}
    runs.append(
        RunRecord(run_id="r", command="extract", state="started", detail={"config": config, "provenance": {"cwd": "."}})
    )
    _write_target(path / "target")
    starts = np.cumsum([0, *map(len, LENGTHS)]).tolist()
    write_json(path / "plan.json", sealed({"blocks": [list(pair) for pair in itertools.pairwise(starts)]}))
    made: dict[int, Arrays] = {}
    seals = {}
    for block, lengths in enumerate(LENGTHS):
        first = sum(map(sum, LENGTHS[:block]))
        made[block] = make_arrays(lengths, starts[block], precision, seed) | {
            name: values if ARRAYS[name].rows == "block" else values[first : first + sum(lengths)]
            for name, values in (given or {}).items()
        }
        ledger = Ledger(path, f"extract-{block % writers}")
        seals[block] = _write(path, block, made[block], ledger)
        made[block] = {**made[block], "document_supervised": _supervised(made[block])}
    runs.append(SkipRecord(doc_id="none", source="a.jsonl", line=99, reason="nonfinite"))
    runs.append(RunRecord(run_id="r", command="extract", state="finished", exit_code=0))
    return SmallStore(path, made, seals)


def _write(path: Path, block: int, arrays: Arrays, ledger: Ledger) -> str:
    done = write_block(path, block, arrays)
    lengths, supervised = np.diff(arrays["document_offsets"]).tolist(), _supervised(arrays).tolist()
    ledger.append(
        *(
            DocumentRecord(
                document_index=index, doc_id=f"doc-{index}", source="ab"[index % 2] + ".jsonl", line=index + 1,
                n_tokens=lengths[i], n_supervised=supervised[i],
                split="heldout" if arrays["document_split"][i] else "train",
                block=block, topk_mass=0.5, token_sha=f"{index:016x}", seal=done["seal"],
            )
            for i, index in enumerate(arrays["document_index"].tolist())
        )
    )  # fmt: skip
    errors = {"relative_error": {"0": 0.01, "1": 0.02}} if "hidden_states_q" in arrays else {}
    ledger.append(
        ShardRecord(
            block=block, rank=0, documents=done["documents"], tokens=done["tokens"], bytes=done["bytes"], seconds=2.0,
            seal=done["seal"], detail={"files": done["files"], "skipped": 0, "topk_mass": 0.5 + 0.25 * block, **errors},
        )
    )  # fmt: skip
    return str(done["seal"])


def _supervised(arrays: Arrays) -> np.ndarray[Any, Any]:
    offsets = arrays["document_offsets"]
    return np.asarray(
        [arrays["loss_mask"][offsets[i] : offsets[i + 1]].sum() for i in range(len(offsets) - 1)], np.int64
    )


def _write_target(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "small", "hidden_size": HIDDEN}))
    (folder / "tokenizer.json").write_text(json.dumps({"tokens": ["a", "b"]}))
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(20, 8, generator=generator).to(torch.bfloat16)
    save_file({"embed_tokens.weight": embed, "norm.weight": torch.ones(8)}, folder / "head.safetensors")
    write_list(folder)
