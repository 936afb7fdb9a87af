"""The work of `dflash store merge`: what must agree between the stores, and which of their documents are kept.

Called by manifests/store_merge.py; the store is made by manifests/derived_store.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from manifests.derived_source import Source
from manifests.derived_store import Derivation, derive
from manifests.store_merge import MergeConfig
from shared.config import to_dict
from shared.errors import ConfigRefused, MaskTokenInUse, StoreMismatch
from shared.progress import say, summary
from shared.shard_file import Array
from shared.store import all_differences, comparable

# What two stores of one drafter may differ in: which rows they hold, how these were cut into blocks, and by whom.
_FREE = frozenset(
    {"rows_sha256", "documents", "tokens", "block_tokens", "version", "parts", "made_by", "selection", "mask_token_id"}
)


def run(config: MergeConfig) -> None:
    """Merge, or go on with it. Raises the store, disk and configuration errors of shared/errors.py."""
    sources = [Source.open(location) for location in config.stores]
    require_agreement(sources)
    mask = settle_mask_token(sources)
    kept = keep(sources, config.on_duplicate)
    offsets = np.cumsum([0, *(source.num_rows for source in sources)]).tolist()
    copies = [
        copy for number, source in enumerate(sources) for copy in source.copies(number, kept[number], offsets[number])
    ]
    done = derive(
        Derivation(
            command="store merge",
            config=to_dict(config),
            out=config.out,
            sources=sources,
            copies=copies,
            num_rows=offsets[-1],
            mask_token_id=mask,
            selection={"on_duplicate": config.on_duplicate},
            link=not config.copy,
            verify=config.verify,
        )
    )
    left_out = sum(len(mask) - int(mask.sum()) for mask in kept)
    summary(
        "merged" if done["made"] else "already merged: nothing to do",
        [
            ("stores", len(sources)),
            ("documents", f"{done['documents']:,}" + (f", {left_out:,} duplicates left out" if left_out else "")),
            ("tokens", f"{done['tokens']:,}"),
            ("blocks", f"{done['blocks']:,}"),
            ("size", f"{done['bytes'] / 1e9:.3g} GB, {done['linked_bytes'] / 1e9:.3g} GB of it linked to the inputs"),
            ("written to", config.out),
            ("next", f"dflash train --store {config.out}"),
        ],
    )


def require_agreement(sources: Sequence[Source]) -> None:
    """Raise StoreMismatch naming the first field in which a store differs from the first one, and both values."""
    first = sources[0].store
    want = {key: value for key, value in comparable(first.identity).items() if key not in _FREE}
    for source in sources[1:]:
        have = {key: value for key, value in comparable(source.store.identity).items() if key not in _FREE}
        for field, (mine, other) in all_differences(have, want).items():
            raise StoreMismatch(
                f"{source.store.location} was made with {field} = {mine!r}, {first.location} with {other!r}; only "
                "stores that agree in everything a drafter depends on can be merged: extract one of them again"
            )


def settle_mask_token(sources: Sequence[Source]) -> int:
    """A mask token of one of the stores that occurs in none of them. Raises MaskTokenInUse."""
    tokens = list(dict.fromkeys(int(source.store.identity["mask_token_id"]) for source in sources))
    if len(tokens) == 1:
        return tokens[0]  # unused in each: extraction made sure
    used: dict[int, str] = {}
    for source in sources:
        left = [token for token in tokens if token not in used]
        for block in source.store.blocks:
            ids = source.store.read_block_array(block, "input_ids")
            used |= {token: source.store.location for token in left if token not in used and (ids == token).any()}
    for token in tokens:
        if token not in used:
            say(f"the stores name mask tokens {tokens}; {token} occurs in none of them and is taken")
            return token
    raise MaskTokenInUse(
        f"the stores name mask tokens {tokens}, and each occurs in the tokens of another store ("
        + ", ".join(f"{token} in {place}" for token, place in used.items())
        + "); extract one of them again with a --mask-token-id that occurs in neither"
    )


def keep(sources: Sequence[Source], on_duplicate: str) -> list[Array]:
    """Which documents of each store are kept, bool [D] each. Raises ConfigRefused for duplicates, with an example.

    A document of an earlier store is the same when its id and its tokens with their loss mask are.
    """
    kept = [np.ones(len(source.documents), np.bool_) for source in sources]
    if on_duplicate == "keep-all":
        return kept
    first_in: dict[tuple[str, str], int] = {}
    repeated = _ids_in_several(sources)
    example, count = "", 0
    for number, source in enumerate(sources):
        for position, line in enumerate(source.lines):
            if line.doc_id not in repeated:
                continue
            key = (line.doc_id, _token_sha(source, position))
            earlier = first_in.setdefault(key, number)
            if earlier != number:
                kept[number][position] = False
                count += 1
                example = example or (
                    f"{line.doc_id!r} ({line.source}:{line.line}) of {source.store.location} is in "
                    f"{sources[earlier].store.location} too"
                )
    if count and on_duplicate == "refuse":
        raise ConfigRefused(
            f"{count:,} documents are in two of the stores, the first: {example}; pass --on-duplicate keep-first to "
            "keep one of each, or keep-all"
        )
    return kept


def _ids_in_several(sources: Sequence[Source]) -> set[str]:
    seen: set[str] = set()
    several: set[str] = set()
    for source in sources:
        ids = {line.doc_id for line in source.lines}
        several |= seen & ids
        seen |= ids
    return several


def _token_sha(source: Source, position: int) -> str:
    """As in the document's record; from the stored tokens when the record has none."""
    if recorded := source.lines[position].token_sha:
        return recorded
    arrays = source.store.read_document(source.documents[position], ("input_ids", "loss_mask"))
    return hashlib.sha256(arrays["input_ids"].tobytes() + arrays["loss_mask"].tobytes()).hexdigest()[:16]
