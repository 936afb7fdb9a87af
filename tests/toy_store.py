"""A small finished teacher store with texts that can be learned, for tests of stage 2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from manifests.commit import Ledger
from manifests.records import ShardRecord
from shared.store import create, write_block

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


def make_store(
    path: Path, texts: list[Text], *, taps: int = 2, blocks: int = 1, hidden: int = HIDDEN, corrupt: int | None = None
) -> Path:
    """Write and finish a store; `corrupt` is the number of a document whose first feature is NaN."""
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
            "topk": 0,
            "dtype": "bfloat16",
            "rows_sha256": "1",
        },
    )
    (path / "target").mkdir()
    (path / "target" / "config.json").write_text(json.dumps(TARGET | {"hidden_size": hidden}))
    save_file(
        {"embed_tokens.weight": embed.to(torch.bfloat16), "norm.weight": torch.ones(hidden, dtype=torch.bfloat16)},
        path / "target" / "head.safetensors",
    )
    plan = [part.tolist() for part in np.array_split(np.arange(len(texts)), blocks)]
    (path / "plan.json").write_text(json.dumps({"blocks": plan}))
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
            "hidden_states": bits(states).reshape(len(ids), taps, hidden),
            "document_offsets": np.cumsum([0, *(len(text.input_ids) for text in chosen)]).astype(np.int64),
            "document_index": np.asarray(members, np.int64),
            "document_split": np.asarray([text.split == "heldout" for text in chosen], np.uint8),
        }
        done = write_block(path, block, arrays)
        ledger.append(
            ShardRecord(
                block=block,
                rank=0,
                documents=done["documents"],
                tokens=done["tokens"],
                bytes=done["bytes"],
                seconds=0.0,
            )
        )
    return path
