"""`dflash store subset`: the command and its settings; the work is in manifests/derived_subset.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from shared.config import knob, options_of
from shared.errors import ConfigRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetConfig:
    """Settings of `dflash store subset`."""

    store: str = knob(help="A finished store.", argument=True)
    out: Path = knob(help="The new store.")
    where: str | None = knob(
        None, help="SQL condition on a document: source, doc_id, n_tokens, n_supervised, split, topk_mass, block, ..."
    )
    heldout_where: str | None = knob(
        None, help="SQL condition that decides the split anew: held out where true, for training elsewhere."
    )
    limit: int | None = knob(None, help="Keep at most this many of the documents, drawn by --seed.")
    seed: int = knob(0, help="Seed of --limit.")
    copy: bool = knob(False, help="Copy array files also where a hard link would do.")
    verify: bool = knob(True, help="Check every byte of a block before it is taken over.")

    def __post_init__(self) -> None:
        if self.where is None and self.heldout_where is None and self.limit is None:
            raise ConfigRefused("nothing to choose by; give --where, --heldout-where or --limit")
        if self.limit is not None and self.limit < 1:
            raise ConfigRefused(f"--limit {self.limit} must be at least 1")


@click.command()
@options_of(SubsetConfig)
def subset(config: SubsetConfig) -> None:
    """Make the store OUT from some documents of STORE.

    Blocks whose documents are all kept are hard-linked, the others written anew with the same values. STORE is not
    changed. Interrupted? Run the same command again. For a random part use --limit, not random(): the same command
    must choose the same documents.

    \b
    dflash store subset runs/x.zarr --out runs/code.zarr --where "source LIKE '%code%' AND n_supervised > 64"
    dflash store subset runs/x.zarr --out runs/tenth.zarr --limit 10000 --seed 1
    dflash store subset runs/x.zarr --out runs/y.zarr --heldout-where "source = 'gsm8k.jsonl'"
    """
    from manifests.derived_subset import run

    run(config)
