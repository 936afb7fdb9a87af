"""Training runs on a toy store, in this process or by the real command, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from manifests.commit import latest, read
from manifests.runs import recorded
from stage2_train import launch_train
from stage2_train.config import TrainConfig
from stage2_train.distributed import Ranks
from stage2_train.drafter_config import DrafterConfig
from stage2_train.train import train
from stage2_train.training_parts import set_up

# A drafter for tests that need no target.
GEOMETRY = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=20,
    block_size=4,
    mask_token_id=19,
    target_layer_ids=(1, 2),
    num_target_layers=6,
)
ALONE = Ranks(0, 1, torch.device("cpu"))
SMALL: dict[str, Any] = {
    "max_length": 48,
    "anchors": 6,
    "batch_rows": 4,
    "block_size": 4,
    "num_layers": 2,
    "device": "cpu",
    "log_every": 1,
    "eval_every": 4,
    "save_every": 4,
    "steps": 10,
    "learning_rate": 3e-3,
}


def config_of(store: Path, run: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(store=store, run=run, **{**SMALL, **changes})


def run_here(config: TrainConfig) -> Any:
    """What one worker does, in this process; returns its parts."""
    torch.set_num_threads(1)
    run = launch_train.check(config)
    with recorded(config.run_dir(), "train", run["config"]) as identifier:
        launch_train.open_run(config.run_dir(), run, config)
        parts = set_up(config.run_dir(), run, ALONE, identifier)
        train(parts)
    return parts


def curve(run_dir: Path, name: str = "loss", split: str = "train") -> dict[int, float]:
    records = [r for r in read(run_dir, "metrics") if r["name"] == name and r["split"] == split]
    return {step: record["value"] for step, record in latest(records, "global_step").items()}


def command(config: TrainConfig, *more: str) -> list[str]:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    return [
        sys.executable,
        "-m",
        "shared",
        "train",
        f"--store={config.store}",
        f"--run={config.run_dir()}",
        *options,
        *more,
    ]


def run_command(line: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is."""
    return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
