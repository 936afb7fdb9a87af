"""The `dflash train` command. Imports nothing heavy: `--help` must answer at once. Next: launch_train.py."""

from __future__ import annotations

import os

import click

from shared.config import options_of
from stage2_train.config import TrainConfig


@click.command()
@options_of(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a drafter from a teacher store (stage 2).

    Interrupted? Run the same command again: it continues the newest complete checkpoint. Under torchrun each process
    is one worker and --nproc is ignored.

    \b
    dflash train --store runs/x.zarr
    dflash train --store runs/x.zarr --nproc 8 --epochs 6 --batch-rows 32
    torchrun --nproc-per-node 8 -m -- shared train --store runs/x.zarr --batch-rows 32
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from stage2_train.train import train_under_torchrun

        train_under_torchrun(config)
        return
    from stage2_train.launch_train import launch

    launch(config)
