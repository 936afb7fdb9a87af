"""The work of `dflash store subset`: which documents an SQL condition, or a seed, picks.

The condition is asked of the store's document records through manifests/query.py (read-only, locked). Called by
manifests/store_subset.py; the store is made by manifests/derived_store.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from manifests.derived_source import Source
from manifests.derived_store import Derivation, derive
from manifests.query import ask
from manifests.store_subset import SubsetConfig
from shared.config import to_dict
from shared.errors import ConfigRefused, NothingLeft, StoreDamaged
from shared.progress import say, summary
from shared.shard_file import Array
from shared.store_files import is_remote


def run(config: SubsetConfig) -> None:
    """Make the subset, or go on with it. Raises the store, disk and configuration errors of shared/errors.py."""
    if is_remote(config.store):
        raise ConfigRefused(f"{config.store} is in a bucket and SQL reads local records only; pull the store first")
    source = Source.open(config.store)
    kept, heldout = choose(source, config)
    if not kept.any():
        raise NothingLeft(
            f"none of the {len(kept):,} documents of {config.store} fits --where {config.where!r}; look at them with "
            f'dflash query "SELECT * FROM stored_documents LIMIT 5" --in {config.store}'
        )
    copies = source.copies(0, kept, 0, heldout)
    done = derive(
        Derivation(
            command="store subset",
            config=to_dict(config),
            out=config.out,
            sources=[source],
            copies=copies,
            num_rows=source.num_rows,
            mask_token_id=source.store.identity["mask_token_id"],
            selection={name: getattr(config, name) for name in ("where", "heldout_where", "limit", "seed")},
            link=not config.copy,
            verify=config.verify,
        )
    )
    splits = source.documents.heldout if heldout is None else heldout
    summary(
        "subset made" if done["made"] else "the subset is there already: nothing to do",
        [
            ("documents", f"{done['documents']:,} of {len(kept):,}, {int((splits & kept).sum()):,} of them held out"),
            ("tokens", f"{done['tokens']:,}"),
            ("blocks", f"{done['blocks']:,}, {sum(copy.is_whole for copy in copies):,} of them kept whole"),
            (
                "size",
                f"{done['bytes'] / 1e9:.3g} GB, {done['linked_bytes'] / 1e9:.3g} GB of it linked to {config.store}",
            ),
            ("written to", config.out),
            ("next", f"dflash train --store {config.out}"),
        ],
    )


def choose(source: Source, config: SubsetConfig) -> tuple[Array, Array | None]:
    """(kept, new splits or None), bool [D] each. Raises ConfigRefused for SQL that is not such a condition."""
    kept = np.ones(len(source.documents), np.bool_)
    if config.where is not None:
        kept = evaluate(source, config.where, "--where")
    heldout = None if config.heldout_where is None else evaluate(source, config.heldout_where, "--heldout-where")
    if config.limit is not None:
        kept &= drawn(np.flatnonzero(kept), config.limit, config.seed, len(kept))
    return kept, heldout


def evaluate(source: Source, condition: str, option: str) -> Array:
    """Whether an SQL condition is true of each stored document, bool [D]. Raises ConfigRefused, StoreDamaged.

    Where it is NULL it is not true; how often that is, is said.
    """
    location = source.store.location
    folder = str(Path(location)).encode(errors="replace").decode().replace("'", "''")
    # The line break ends a comment in the condition.
    answer = ask(
        [Path(location)],
        f"SELECT document_index, block, ({condition}\n) AS chosen FROM stored_documents WHERE folder = '{folder}' "
        "ORDER BY block, document_index",
    )
    if len(answer.types) != 3 or answer.types[2] not in ("BOOLEAN", "bool"):
        raise ConfigRefused(
            f"{option} {condition!r} gives {' and '.join(answer.types[2:])}, one BOOLEAN is needed; write a comparison "
            'such as "n_tokens > 100"'
        )
    rows = answer.rows
    index, block = (np.fromiter((row[column] for row in rows), np.int64, len(rows)) for column in (0, 1))
    documents = source.documents
    if not (np.array_equal(index, documents.index) and np.array_equal(block, documents.block)):
        if condition != "true" and evaluate(source, "true", option).all():  # then the records are not at fault
            raise ConfigRefused(
                f"{option} {condition!r} gives {len(rows):,} values for {len(documents):,} documents, one for each is "
                'needed; write a comparison such as "n_tokens > 100"'
            )
        raise StoreDamaged(
            f"{location} has records of {len(rows):,} documents, its blocks hold {len(documents):,}, or others; "
            f"`dflash store verify {location}` says which"
        )
    if unknown := sum(row[2] is None for row in rows):
        say(f"{option} is NULL for {unknown:,} of {len(rows):,} documents, which counts as not true")
    return np.fromiter((row[2] is True for row in rows), np.bool_, len(rows))


def drawn(candidates: Array, limit: int, seed: int, count: int) -> Array:
    """At most `limit` of the candidates (positions, int64), drawn by seed, as bool [count]; a larger limit draws more.

    Raw Philox numbers, which no version of numpy draws differently.
    """
    keys = np.random.Philox(key=seed).random_raw(len(candidates))
    chosen = np.zeros(count, np.bool_)
    chosen[candidates[np.argsort(keys, kind="stable")[:limit]]] = True
    return chosen
