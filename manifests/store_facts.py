"""Numbers about a store from its records alone: no block is opened, so unfinished and damaged stores have them too.

Called by manifests/store_info.py and store_diff.py.
"""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manifests.blocks import recorded_blocks
from manifests.lines import scan
from shared.errors import StoreDamaged
from shared.json_file import parse_object, require_sealed
from shared.seal import document
from shared.shard_file import ShardGrid
from shared.store import read_identity
from shared.store_files import StoreFiles, open_files
from shared.store_layout import ARRAYS, array_metadata, arrays_of

Record = dict[str, Any]
_SUMMED = ("tokens", "bytes", "seconds")
_TOPK = ("topk_ids", "topk_logits", "logsumexp")


def records_of(files: StoreFiles, kind: str) -> Iterator[Record]:
    """All whole records of a kind, file by file."""
    for name in files.list("manifest"):
        if name.startswith(f"{kind}.") and name.endswith(".jsonl"):
            for lines, _ in scan(io.BytesIO(files.read_bytes(f"manifest/{name}"))):
                yield from map(json.loads, lines)


def stored_documents(files: StoreFiles, blocks: Mapping[int, Record]) -> Iterator[Record]:
    """The record of every document that counts: of recorded blocks as they are now, each once."""
    seen: set[tuple[int, int]] = set()
    for record in records_of(files, "documents"):
        block, key = blocks.get(record["block"]), (record["block"], record["document_index"])
        if block is not None and record["seal"] in (block["seal"], "") and key not in seen:
            seen.add(key)
            yield record


def facts_of(location: Path | str) -> dict[str, Any]:
    """Everything `dflash store info` says, as JSON values. Raises StoreMissing, StoreMismatch, StoreDamaged."""
    files, identity = open_files(location), read_identity(location)
    blocks = recorded_blocks(location)
    records = list(blocks.values())
    sums = {name: sum(int(record[name]) for record in records) for name in ("documents", "tokens", "bytes")}
    arrays = bytes_by_array(identity, records)
    return {
        "store": str(location),
        "identity": {name: value for name, value in identity.items() if name != "crc32c"},
        "blocks": len(blocks),
        "planned_blocks": _planned(files),
        **sums,
        "bytes_per_token": sums["bytes"] / sums["tokens"] if sums["tokens"] else None,
        "bytes_by_array": arrays | ({"metadata": sums["bytes"] - sum(arrays.values())} if records else {}),
        "by_split": _counted(stored_documents(files, blocks), "split"),
        "by_source": _counted(stored_documents(files, blocks), "source"),
        "skipped": dict(Counter(str(record["reason"]) for record in records_of(files, "skips"))),
        "topk_mass": _weighted(records, lambda detail: detail.get("topk_mass")),
        "relative_error": _errors(records),
        **_work(records),
    }


def bytes_by_array(identity: Mapping[str, Any], records: Iterable[Record]) -> dict[str, int]:
    """Bytes of each array's files over all blocks: the layout gives them from tokens and documents alone."""
    hidden, taps, k = int(identity["hidden_size"]), len(identity["target_layer_ids"]), int(identity["topk"])
    row_shapes = {
        "hidden_states": (taps, hidden), "hidden_states_q": (taps, hidden), "hidden_states_scale": (taps,),
        "last_hidden_state": (hidden,), "last_hidden_state_q": (hidden,),
        "topk_ids": (k,), "topk_logits": (k,),
    }  # fmt: skip
    whole = {"hidden_states_channel": (taps, hidden), "last_hidden_state_channel": (hidden,)}
    sizes: defaultdict[str, int] = defaultdict(int)
    for record in records:
        rows = {"tokens": int(record["tokens"]), "documents": int(record["documents"])}
        rows["offsets"] = rows["documents"] + 1
        for name in arrays_of(identity["precision"], identity["last_hidden"]):
            if k == 0 and name in _TOPK:
                continue
            shape = whole.get(name) or (rows[ARRAYS[name].rows], *row_shapes.get(name, ()))
            grid = ShardGrid.of("", name, shape)
            sizes[name] += sum(map(grid.file_bytes, range(grid.num_shards())))
            sizes[name] += len(document(array_metadata(name, grid.shape)))
    return dict(sizes)


def _planned(files: StoreFiles) -> int | None:
    try:
        plan = parse_object(files.read_bytes("plan.json"), files.show("plan.json"), "")
        require_sealed(plan, files.show("plan.json"), "")
        return len(plan["blocks"])
    except (FileNotFoundError, StoreDamaged, KeyError, TypeError):
        return None


def _counted(documents: Iterable[Record], by: str) -> dict[str, dict[str, int]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in documents:
        counts[str(record[by])].update(
            documents=1, tokens=int(record["n_tokens"]), supervised=int(record["n_supervised"])
        )
    return {name: dict(counts[name]) for name in sorted(counts)}


def _weighted(records: Iterable[Record], of: Any) -> float | None:
    """Mean over tokens of a number that some records' details have."""
    found = [(float(value), int(record["tokens"])) for record in records if (value := of(record["detail"])) is not None]
    tokens = sum(count for _, count in found)
    return sum(value * count for value, count in found) / tokens if tokens else None


def _errors(records: list[Record]) -> dict[str, dict[str, float | None]]:
    """By tapped layer, and "last_hidden": mean relative L2 error of a token, and the worst token's where recorded."""
    layers = {layer for record in records for layer in record["detail"].get("relative_error", {})}
    errors: dict[str, dict[str, float | None]] = {}
    for layer in sorted(layers, key=int):
        worst = [record["detail"].get("relative_error_worst", {}).get(layer) for record in records]
        mean = _weighted(records, lambda detail, layer=layer: detail.get("relative_error", {}).get(layer))
        errors[layer] = {"mean": mean, "worst": _largest(worst)}
    last = _weighted(records, lambda detail: detail.get("relative_error_last_hidden"))
    if last is not None:
        worst = [record["detail"].get("relative_error_last_hidden_worst") for record in records]
        errors["last_hidden"] = {"mean": last, "worst": _largest(worst)}
    return errors


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _work(records: list[Record]) -> dict[str, Any]:
    """Who made it, when, and how fast: the seconds are those from a block's begin to its commit."""
    writers: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("blocks", *_SUMMED), 0))
    for record in records:
        work = writers[str(record["writer"])]
        work["blocks"] += 1
        for name in _SUMMED:
            work[name] += record[name]
    begun = min((float(record["time"]) - float(record["seconds"]) for record in records), default=None)
    ended = max((float(record["time"]) for record in records), default=None)
    seconds = ended - begun if begun is not None and ended is not None else 0.0
    tokens = sum(int(record["tokens"]) for record in records)
    return {
        "writers": {name: writers[name] for name in sorted(writers)},
        "begun": begun,
        "ended": ended,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
    }
