"""`dflash store merge`: the command and its settings; the work is in manifests/derived_merge.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from shared.config import knob, options_of
from shared.errors import ConfigRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """Settings of `dflash store merge`."""

    out: Path = knob(help="The new store.", argument=True)
    stores: tuple[str, ...] = knob(help="Finished stores, two or more.", argument=True)
    on_duplicate: Literal["refuse", "keep-first", "keep-all"] = knob(
        "refuse", help="What to do with a document (id and tokens) that two of the stores hold."
    )
    copy: bool = knob(False, help="Copy array files also where a hard link would do.")
    verify: bool = knob(True, help="Check every byte of a block before it is taken over.")

    def __post_init__(self) -> None:
        if len(self.stores) < 2:
            raise ConfigRefused(f"{len(self.stores)} store given; a merge takes two or more after the new store's name")


@click.command()
@options_of(MergeConfig)
def merge(config: MergeConfig) -> None:
    """Make the store OUT from the documents of all STORES, in their order.

    They must agree in target, taps, precision and everything else a drafter depends on. On one file system the
    arrays are hard-linked: OUT takes almost no room, and STORES can be deleted afterwards. Nothing in STORES is
    changed. Interrupted? Run the same command again.

    \b
    dflash store merge runs/all.zarr runs/code.zarr runs/chat.zarr
    dflash store merge runs/all.zarr runs/a.zarr runs/b.zarr --on-duplicate keep-first
    """
    from manifests.derived_merge import run

    run(config)
