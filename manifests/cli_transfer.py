"""`dflash store push` and `dflash store pull`: stores to and from s3:// and gs://."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shared.config import FilePath


@click.command()
@click.argument("store", type=FilePath(path_type=Path))
@click.argument("url")
@click.option("--watch", is_flag=True, help="Follow the extraction that fills STORE, until all of it is there.")
@click.option(
    "--free-local",
    is_flag=True,
    help="Remove the large arrays of each block here, once its copy was read back and compared.",
)
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks uploaded at a time.")
def push(store: Path, url: str, watch: bool, free_local: bool, threads: int) -> None:
    """Copy what is done in STORE to URL (s3://BUCKET/PREFIX or gs://...); run it again to go on or to add.

    Readers of URL see what an earlier push published until this one has everything in place. Endpoint and credentials
    come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ... or GOOGLE_...; needs pip install 'dflash-offline[s3]'.

    \b
    dflash store push runs/x.zarr s3://features/x.zarr
    dflash store push runs/x.zarr s3://features/x.zarr --watch --free-local   # beside `dflash extract`
    dflash train --store s3://features/x.zarr
    """
    from manifests.store_push import PushOptions
    from manifests.store_push import push as run

    if watch:
        os.nice(10)  # the extraction comes first
    run(store, url, PushOptions(watch=watch, free_local=free_local, threads=threads))


@click.command()
@click.argument("url")
@click.argument("store", type=FilePath(path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks copied at a time.")
def pull(url: str, store: Path, threads: int) -> None:
    """Copy the store at URL to the folder STORE; run it again to go on or to fetch what was added.

    \b
    dflash store pull s3://features/x.zarr runs/x.zarr
    """
    from manifests.store_pull import pull as run

    run(url, store, threads)
