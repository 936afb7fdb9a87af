"""A small finished teacher store with texts that can be learned, for tests of stage 2."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from manifests.commit import Ledger
from manifests.records import DocumentRecord, ShardRecord
from shared.atomic import write_json
from shared.json_file import sealed
from shared.store_write import create, write_block
from shared.target_files import write_list
from stage2_train.benchmarks.made_store import stored_features

VOCAB, HIDDEN, MASK = 40, 32, 39
TARGET = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Text:
    """One document of a toy store."""

    input_ids: list[int]
    loss_mask: list[int]
    split: str = "train"


def counting_text(start: int, stride: int, prompt: int, answer: int, split: str = "train") -> Text:
    """prompt + answer tokens that count up by `stride` modulo 37; only the answer is supervised."""
    ids = [(start + stride * i) % 37 for i in range(prompt + answer)]
    return Text(ids, [0] * prompt + [1] * answer, split)


def counting_texts(count: int, seed: int = 0, longest: int = 40) -> list[Text]:
    """Texts of many lengths; every fourth is held out."""
    rng = np.random.default_rng(seed)
    return [
        counting_text(
            int(rng.integers(37)),
            int(rng.integers(1, 4)),
            int(rng.integers(1, 8)),
            int(rng.integers(4, longest)),
            "heldout" if i % 4 == 3 else "train",
        )
        for i in range(count)
    ]


def bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """bf16 bits of a tensor as the store keeps them."""
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def teacher_arrays(ids: np.ndarray[Any, Any], topk: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Distributions of the next token for tokens int32 [N]: at every third place another word than the next is best."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(ids), VOCAB, generator=generator)
    best = torch.from_numpy(np.append(ids[1:], 0)).long()
    best[::3] = (best[::3] + 1) % 37
    logits[torch.arange(len(ids)), best] += 6.0
    top = logits.topk(topk, dim=-1)
    return {
        "topk_ids": top.indices.to(torch.int32).numpy(),
        "topk_logits": bits(top.values),
        "logsumexp": logits.logsumexp(-1).numpy(),
    }


def make_store(
    path: Path,
    texts: list[Text],
    *,
    taps: int = 2,
    blocks: int = 1,
    hidden: int = HIDDEN,
    corrupt: int | None = None,
    precision: str = "bfloat16",
    topk: int = 0,
    name: str = "toy",
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write and finish a store; `corrupt` is the number of a document whose first feature is NaN.

    Document i is `name`-i; `identity` replaces fields of the store's.
    """
    generator = torch.Generator().manual_seed(7)
    embed = torch.randn(VOCAB, hidden, generator=generator) * 0.3  # as small as trained tables are
    mix = torch.randn(hidden, taps * hidden, generator=generator) / hidden**0.5
    create(
        path,
        {
            "target": {
                "name": "toy",
                "weights_sha256": "0",
                **{k: TARGET[k] for k in ("vocab_size", "num_hidden_layers")},
                "hidden_size": hidden,
            },
            "target_layer_ids": list(range(1, taps + 1)),
            "num_hidden_layers": TARGET["num_hidden_layers"],
            "hidden_size": hidden,
            "vocab_size": VOCAB,
            "mask_token_id": MASK,
            "topk": topk,
            "dtype": "bfloat16",
            "precision": precision,
            "last_hidden": "none",
            "rows_sha256": "1",
            **(identity or {}),
        },
    )
    (path / "target").mkdir()
    (path / "target" / "config.json").write_text(json.dumps(TARGET | {"hidden_size": hidden}))
    save_file(
        {"embed_tokens.weight": embed.to(torch.bfloat16), "norm.weight": torch.ones(hidden, dtype=torch.bfloat16)},
        path / "target" / "head.safetensors",
    )
    write_list(path / "target")
    plan = [part.tolist() for part in np.array_split(np.arange(len(texts)), blocks)]
    write_json(path / "plan.json", sealed({"blocks": [[part[0], part[-1] + 1] for part in plan if part]}))
    ledger = Ledger(path, "toy")
    for block, members in enumerate(plan):
        chosen = [texts[i] for i in members]
        ids = np.concatenate([np.asarray(text.input_ids, np.int32) for text in chosen])
        states = embed[torch.from_numpy(ids).long()] @ mix
        if corrupt in members:
            states[sum(len(text.input_ids) for text in chosen[: members.index(corrupt)])] = float("nan")
        arrays = {
            "input_ids": ids,
            "loss_mask": np.concatenate([np.asarray(text.loss_mask, np.uint8) for text in chosen]),
            **(teacher_arrays(ids, topk, block) if topk else {}),
            **stored_features(states.view(len(ids), taps, hidden).to(torch.bfloat16), precision),
            "document_offsets": np.cumsum([0, *(len(text.input_ids) for text in chosen)]).astype(np.int64),
            "document_index": np.asarray(members, np.int64),
            "document_split": np.asarray([text.split == "heldout" for text in chosen], np.uint8),
        }
        done = write_block(path, block, arrays)
        ledger.append(*(_document_record(name, i, texts[i], block, done["seal"]) for i in members))
        ledger.append(
            ShardRecord(
                block=block,
                rank=0,
                documents=done["documents"],
                tokens=done["tokens"],
                bytes=done["bytes"],
                seal=done["seal"],
                seconds=0.0,
            )
        )
    return path


def _document_record(name: str, index: int, text: Text, block: int, seal: str) -> DocumentRecord:
    ids, mask = np.asarray(text.input_ids, np.int32), np.asarray(text.loss_mask, np.uint8)
    return DocumentRecord(
        document_index=index,
        doc_id=f"{name}-{index}",
        source=f"{name}.jsonl",
        line=index + 1,
        n_tokens=len(ids),
        n_supervised=int(mask.sum()),
        split=text.split,
        block=block,
        topk_mass=0.5,
        token_sha=hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:16],
        seal=seal,
    )
