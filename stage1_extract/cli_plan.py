"""The command `dflash plan`. Only click and configs are imported before it runs."""

from __future__ import annotations

import click

from shared.config import options_of
from stage1_extract.config import PlanConfig


@click.command()
@options_of(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Size, files and hours of a teacher store before it is made, and whether its disk pays.

    Sizes are those that `dflash extract` refuses by. Exit code 41 when the store does not fit at --out. A store pays
    when extracting once and reading in each epoch takes less than running the target again in each epoch.

    \b
    Examples:
      dflash plan --target ./model --data rows --out runs/x.zarr --shards 8 --measure-disk
      dflash plan --tokens 1.6e9 --documents 8e5 --hidden-size 5120 --num-hidden-layers 64 --vocab-size 248320 \\
                  --disk-gbps 5 --shards 8
    """
    from stage1_extract.plan_report import run

    run(config)
