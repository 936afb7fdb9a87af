"""`dflash store diff`: how two stores differ (manifests/store_comparison.py); exit code 0 when in nothing compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shared.errors import StoresDiffer
from shared.progress import summary, tell

if TYPE_CHECKING:
    from manifests.store_comparison import Comparison

_SHOWN = 5


@click.command()
@click.argument("first")
@click.argument("second")
@click.option(
    "--content", is_flag=True, help="Also compare the values of the documents that both have (reads them all)."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def diff(first: str, second: str, content: bool, as_json: bool) -> None:
    """Compare the stores FIRST and SECOND: identity, documents by id and tokens, and with --content every value.

    Hidden states are compared as training sees them, so a bf16 store and an int8 store of the same rows show the error
    of the codes. Exit code 0: no difference in what was compared; 35: they differ.

    \b
    dflash store diff runs/a.zarr runs/b.zarr
    dflash store diff runs/bf16.zarr runs/int8.zarr --content
    """
    from manifests.store_comparison import compare

    found = compare(first, second, content=content)
    if as_json:
        tell(json.dumps(_facts(first, second, found), indent=2))
    else:
        _print(first, second, found, content)
    if not found.same:
        raise StoresDiffer(f"{first} and {second} differ in {_told(found)}")


def _facts(first: str, second: str, found: Comparison) -> dict[str, Any]:
    return {
        "first": first,
        "second": second,
        "same": found.same,
        "identity": {name: list(pair) for name, pair in found.identity.items()},
        "documents": {
            "common": found.common,
            "only_first": sorted([doc_id, sha, count] for (doc_id, sha), count in found.only_first.items()),
            "only_second": sorted([doc_id, sha, count] for (doc_id, sha), count in found.only_second.items()),
            "other_tokens": found.other_tokens(),
        },
        "blocks": {"first": found.blocks[0], "second": found.blocks[1], "same_seal": found.same_seals},
        "content": {name: difference.as_dict() for name, difference in found.content.items()},
        "not_compared": found.not_compared,
    }


def _print(first: str, second: str, found: Comparison, content: bool) -> None:
    pairs: list[tuple[str, Any]] = [(name, f"{mine!r} | {other!r}") for name, (mine, other) in found.identity.items()]
    only, other = sum(found.only_first.values()), sum(found.only_second.values())
    pairs += [
        ("documents", f"{found.common:,} in both, {only:,} only in the first, {other:,} only in the second"),
        *((f"  only in {which}", _keys(keys)) for which, keys in _sides(found) if keys),
    ]
    if ids := found.other_tokens():
        pairs.append(("  same id, other tokens", f"{len(ids):,}: {', '.join(ids[:_SHOWN])}"))
    pairs.append(("blocks", f"{found.blocks[0]:,} | {found.blocks[1]:,}, {found.same_seals:,} the same in every byte"))
    for name, difference in found.content.items():
        facts = difference.as_dict()
        what = "relative difference" if name in _FLOATS else "share of values that differ"
        pairs.append(
            (name, f"{what} of a row: largest {facts['largest']:.3g}, mean {facts['mean']:.3g}, "
                   f"{facts['differing']:,} of {facts['rows']:,} rows differ")
        )  # fmt: skip
    pairs += [(name, f"not compared: {reason}") for name, reason in found.not_compared.items()]
    if not content:
        pairs.append(("values", "not compared; --content does"))
    summary(f"{first} | {second}", pairs)


_FLOATS = ("hidden_states", "last_hidden_state", "topk_logits", "logsumexp")


def _sides(found: Comparison) -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    return ("the first", sorted(found.only_first)), ("the second", sorted(found.only_second))


def _keys(keys: list[tuple[str, str]]) -> str:
    more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
    return ", ".join(doc_id for doc_id, _ in keys[:_SHOWN]) + more


def _told(found: Comparison) -> str:
    parts = []
    if found.identity:
        count = len(found.identity)
        parts.append(f"{count} identity field{'' if count == 1 else 's'} ({', '.join(found.identity)})")
    if count := sum(found.only_first.values()) + sum(found.only_second.values()):
        parts.append(f"{count:,} documents")
    if arrays := [name for name, difference in found.content.items() if difference.differing] + list(
        found.not_compared
    ):
        parts.append(f"the values of {', '.join(arrays)}")
    return ", ".join(parts)
