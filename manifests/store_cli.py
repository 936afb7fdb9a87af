"""`dflash store`: commands on finished or growing stores, each in a module of its own, loaded only when called.

Listed as text so that `--help` imports none of them.
"""

from __future__ import annotations

import click

from shared.cli import LazyGroup

COMMANDS: dict[str, tuple[str, str, str]] = {
    "verify": ("manifests.store_verify", "verify", "Check every byte; --repair sets damage aside."),
    "info": ("manifests.store_info", "info", "What a store is, holds, weighs and took."),
    "merge": ("manifests.store_merge", "merge", "One store from several that agree."),
    "subset": ("manifests.store_subset", "subset", "A store of the documents that SQL picks."),
    "gc": ("manifests.store_gc", "gc", "What nobody needs any more, and remove it."),
    "push": ("manifests.cli_transfer", "push", "Copy what is done to a bucket; readers there never see a half."),
    "pull": ("manifests.cli_transfer", "pull", "Copy a store from a bucket to a folder, byte for byte."),
    "diff": ("manifests.store_diff", "diff", "How two stores differ: identity, documents, values."),
}


@click.command(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def store() -> None:
    """Check, describe, clean and compare teacher stores.

    \b
    dflash store verify runs/x.zarr
    dflash store info   runs/x.zarr
    """
