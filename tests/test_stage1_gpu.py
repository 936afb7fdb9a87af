"""The same results on a CUDA device: features and answers, through the real commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny_target import save_target

from manifests.blocks import open_store
from shared.cli import cli
from shared.rows import PreparedRows

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def dflash(*arguments: object) -> None:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shards"), [("llama", 2), ("qwen3_5", 1)], ids=["llama", "qwen3_5"])
def test_answers_and_features_are_those_of_the_cpu(tmp_path: Path, kind: str, shards: int) -> None:
    """The hybrid one on the kernels of flash-linear-attention, which every process tunes for itself."""
    target = save_target(tmp_path / "target", kind)
    rows = [{"id": i, "messages": [{"role": "user", "content": " ".join(WORDS[: i + 1])}]} for i in range(10)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for device in ("cpu", "cuda"):
        dflash(
            "prepare",
            tmp_path / "d.jsonl",
            "--target",
            target,
            "--out",
            tmp_path / f"rows-{device}",
            "--regenerate",
            "--max-new-tokens",
            12,
            "--device",
            device,
            "--dtype",
            "float32",
        )
    assert (
        PreparedRows.open(tmp_path / "rows-cpu").info["rows_sha256"]
        == PreparedRows.open(tmp_path / "rows-cuda").info["rows_sha256"]
    )
    found = {}
    for device in ("cpu", "cuda"):
        store = tmp_path / f"{device}.zarr"
        dflash(
            "extract",
            "--target",
            target,
            "--data",
            tmp_path / "rows-cpu",
            "--out",
            store,
            "--target-layer-ids",
            "0,2",
            "--topk",
            8,
            "--block-tokens",
            150,
            "--device",
            device,
            "--dtype",
            "float32",
            "--shards",
            shards,
        )
        opened = open_store(store)
        found[device] = [opened.read_document(ref, ("hidden_states", "logsumexp")) for ref in opened.documents]
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        taken, wanted = (
            torch.from_numpy(each["hidden_states"].view(np.int16)).view(torch.bfloat16).float() for each in (cuda, cpu)
        )
        # Of a token's whole state: a sum of large numbers that nearly cancel has no small relative error. 0.03: Triton
        # multiplies float32 as TF32, and flash-linear-attention was off by 0.001 to 0.01 here, by 0.06 over 200 tokens.
        off = (taken - wanted).norm(dim=-1)
        limit = (0.03 if kind == "qwen3_5" else 0.01) * wanted.norm(dim=-1)  # 0 for a word whose embedding is all zeros
        assert (off <= limit).all(), (off - limit).max().item()
        np.testing.assert_allclose(cuda["logsumexp"], cpu["logsumexp"], atol=0.03 if kind == "qwen3_5" else 1e-3)
