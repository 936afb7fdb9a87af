"""The commands `dflash prepare` and `dflash extract`. Only click and configs are imported before a command runs."""

from __future__ import annotations

import click

from shared.config import options_of
from stage1_extract.config import ExtractConfig, PrepareConfig


@click.command()
@options_of(PrepareConfig)
def prepare(config: PrepareConfig) -> None:
    """Conversations to tokenised rows with a loss mask, through the tokenizer's own chat template.

    DATA are JSON lines files: each row has `messages` (role, content), `conversations` (from, value), or ready
    `input_ids` and `loss_mask`. The assistant's words and turn end are supervised.

    \b
    Example:
      dflash prepare prompts.jsonl --target ./model --out rows --regenerate
    """
    from stage1_extract.prepare import run

    run(config)


@click.command()
@options_of(ExtractConfig)
def extract(config: ExtractConfig) -> None:
    """Run the target once over prepared rows and store what the drafter learns from.

    Stored per token: the residual stream after the tapped layers, the last hidden state, the largest teacher logits
    with their logsumexp. Run the same command again to go on after an interruption, also with other --shards.

    \b
    Example:
      dflash extract --target ./model --data rows --out runs/x.zarr --shards 8
    """
    from stage1_extract.extract import run

    run(config)
