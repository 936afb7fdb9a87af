"""`dflash store info`: what a store is, holds, weighs and took, from its records (manifests/store_facts.py)."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from shared.progress import duration, readable_size, summary, tell

_TARGET = ("name", "kind", "weights_sha256", "revision", "tokenizer_sha256", "chat_template_sha256")
_SHOWN_SOURCES = 10


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def info(store: str, as_json: bool) -> None:
    """Describe STORE (a folder, or s3://bucket/prefix), finished or not: identity, contents, sizes, work.

    \b
    dflash store info runs/x.zarr
    dflash store info runs/x.zarr --json
    """
    from manifests.store_facts import facts_of

    facts = facts_of(store)
    if as_json:
        tell(json.dumps(facts, indent=2))
        return
    summary(f"store {store}", [*_identity(facts["identity"]), *_contents(facts), *_sizes(facts), *_work(facts)])


def _identity(identity: dict[str, Any]) -> list[tuple[str, Any]]:
    target = identity["target"]
    taps = ", ".join(map(str, identity["target_layer_ids"]))
    pairs = [(f"target {name}", _short(target[name])) for name in _TARGET if target.get(name)]
    pairs += [
        ("taps", f"layers {taps} of {identity.get('num_hidden_layers', '?')}, {identity['hidden_size']:,} channels"),
        ("precision", f"taps {identity['precision']}, last hidden state {identity['last_hidden']}"),
        ("forward", f"{identity.get('dtype', '?')}, top-k {identity['topk']}, mask token {identity['mask_token_id']}"),
        ("rows_sha256", _short(str(identity["rows_sha256"]))),
        ("version", f"{identity.get('version', '?')}, format {identity['format']}, id {identity['store_uuid']}"),
    ]
    if parts := identity.get("parts"):
        pairs.append(("made from", f"{len(parts)} stores, {identity.get('selection')}"))
    return pairs


def _contents(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    planned = "?" if facts["planned_blocks"] is None else f"{facts['planned_blocks']:,}"
    pairs: list[tuple[str, Any]] = [
        ("blocks", f"{facts['blocks']:,} of {planned}"),
        ("documents", f"{facts['documents']:,}, {facts['tokens']:,} tokens"),
    ]
    pairs += [(f"  {name}", _count(counts)) for name, counts in facts["by_split"].items()]
    sources = sorted(facts["by_source"].items(), key=lambda item: -item[1]["tokens"])
    pairs += [(f"  from {name}", _count(counts)) for name, counts in sources[:_SHOWN_SOURCES]]
    if len(sources) > _SHOWN_SOURCES:
        pairs.append((f"  from {len(sources) - _SHOWN_SOURCES} more", "see --json"))
    return [*pairs, *((f"skipped: {reason}", f"{count:,}") for reason, count in facts["skipped"].items())]


def _sizes(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = [("size", readable_size(facts["bytes"]))]
    pairs += [
        (f"  {name}", readable_size(size))
        for name, size in sorted(facts["bytes_by_array"].items(), key=lambda item: -item[1])
    ]
    if facts["bytes_per_token"] is not None:
        pairs.append(("bytes a token", f"{facts['bytes_per_token']:,.0f}"))
    if facts["topk_mass"] is not None:
        pairs.append(("top-k holds", f"{100 * facts['topk_mass']:.2f} % of the teacher's probability"))
    for name, error in facts["relative_error"].items():
        what = "last hidden state" if name == "last_hidden" else f"layer {name}"
        worst = "" if error["worst"] is None else f", worst token {100 * error['worst']:.2f} %"
        pairs.append((f"error of {what}", f"{100 * error['mean']:.3f} %{worst}"))
    return pairs


def _work(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, work in facts["writers"].items():
        rate = work["tokens"] / work["seconds"] if work["seconds"] else 0.0
        pairs.append((f"writer {name}", f"{work['blocks']:,} blocks, {work['tokens']:,} tokens, {rate:,.0f} tokens/s"))
    if facts["begun"] is not None:
        begun, ended = (time.strftime("%Y-%m-%d %H:%M", time.localtime(facts[name])) for name in ("begun", "ended"))
        rate = facts["tokens_per_second"]
        told = "" if rate is None else f", {rate:,.0f} tokens/s over all"
        pairs.append(("made", f"{begun} to {ended} ({duration(facts['ended'] - facts['begun'])}){told}"))
    return pairs


def _count(counts: dict[str, int]) -> str:
    return f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['supervised']:,} supervised"


def _short(text: str) -> str:
    return f"{text[:16]}..." if len(text) == 64 else text
