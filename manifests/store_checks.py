"""Checks of what a store has beside its blocks and its identity: plan, target, records, the documents cache.

Called by manifests/store_verify.py. Each check yields what it found and goes on; blocks are checked in
store_block_checks.py. No torch.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from manifests.lines import scan
from manifests.store_facts import records_of
from manifests.store_findings import Finding
from manifests.store_identity import json_bytes
from shared.documents import Documents, index_name, read_index
from shared.errors import StoreDamaged
from shared.json_file import parse_object, require_sealed
from shared.object_head import PUBLISHED
from shared.store_files import LocalFiles, StoreFiles
from shared.target_files import damaged


def check_plan(files: StoreFiles, identity: dict[str, Any] | None) -> tuple[list[tuple[int, int]], list[Finding]]:
    """The document range of every planned block, and what is wrong with plan.json."""
    advice = "the same `dflash extract` command makes it again"

    def bad(reason: str) -> tuple[list[tuple[int, int]], list[Finding]]:
        return [], [Finding(kind="damage", part="plan", file="plan.json", reason=reason)]

    try:
        data = files.read_bytes("plan.json")
        plan = parse_object(data, files.show("plan.json"), advice)
        require_sealed(plan, files.show("plan.json"), advice)
        blocks = [(int(first), int(end)) for first, end in plan["blocks"]]
    except FileNotFoundError:
        return bad(f"is missing; {advice}")
    except (StoreDamaged, KeyError, TypeError, ValueError) as error:
        return bad(str(error))
    if data != json_bytes(plan):
        return bad("has other bytes than its values are written as")
    documents = (identity or {}).get("documents", blocks[-1][1] if blocks else 0)
    if blocks and blocks[-1][1] != documents:
        return bad(f"plans {blocks[-1][1]:,} documents, store.json says {documents:,}; it belongs to another store")
    return blocks, []


def folders_without_record(files: StoreFiles, records: Container[int]) -> Iterator[Finding]:
    """Block folders that no record vouches for: left by a kill between rename and record, or whose record is void.

    Of a store in a bucket nothing is said: there is no listing of folders.
    """
    if not isinstance(files, LocalFiles) or not (files.root / "blocks").is_dir():
        return
    for entry in sorted(os.scandir(files.root / "blocks"), key=lambda entry: entry.name):
        if entry.name.isdecimal() and int(entry.name) not in records:
            yield Finding(
                kind="note", part="folder", block=int(entry.name), file=f"blocks/{entry.name}",
                reason="no record says that it is done: it counts for nothing",
            )  # fmt: skip


def check_target(files: StoreFiles) -> Iterator[Finding]:
    """Every byte of target/; nothing at all there is only an export that is still to come."""
    if not files.list("target") and isinstance(files, LocalFiles) and not (files.root / "target").exists():
        yield Finding(kind="missing", part="target", file="target", reason="the target was not exported yet")
        return
    for name, reason in damaged(files, "target", strict=True):
        yield Finding(kind="damage", part="target", file=name, reason=reason)


@dataclass
class Recorded:
    """What the manifest's files hold: findings, and the row numbers of the documents recorded for each built block."""

    findings: list[Finding] = field(default_factory=list)
    documents: defaultdict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))

    def missing_documents(self, block: int, record: dict[str, Any]) -> int:
        """How many documents of a recorded block no record describes."""
        found = self.documents[block, str(record["seal"])] | self.documents[block, ""]
        return max(0, int(record["documents"]) - len(found))


def check_manifest(files: StoreFiles) -> Recorded:
    """Every line of every manifest file: checksums, lines written twice, and a last one that a kill cut short."""
    recorded = Recorded()
    for name in files.list("manifest"):
        if name.endswith(".jsonl"):
            _check_records(name, files.read_bytes(f"manifest/{name}"), recorded)
    return recorded


def _check_records(name: str, data: bytes, recorded: Recorded) -> None:
    file, last = f"manifest/{name}", data.count(b"\n") + 1
    found, writers = _repeated(data), set()
    for lines, void in scan(io.BytesIO(data)):
        found |= dict(void)
        for line in lines:
            record = json.loads(line)
            writers.add(str(record["writer"]))
            if name.startswith("documents."):
                recorded.documents[record["block"], record["seal"]].add(record["document_index"])
    recorded.findings += [
        Finding(kind="damage", part="manifest", file=file, line=number, reason=found[number])
        for number in sorted(found)
    ]
    if data and not data.endswith(b"\n") and last not in found:
        reason = "has no end: its writer was stopped in the middle of it, or the file was cut"
        recorded.findings.append(Finding(kind="note", part="manifest", file=file, line=last, reason=reason))
    own = name.split(".", 1)[1].removesuffix(".jsonl")
    if not own.startswith(PUBLISHED) and (foreign := writers - {own}):
        reason = f"holds records of {', '.join(sorted(foreign))}; they count all the same"
        recorded.findings.append(Finding(kind="note", part="manifest", file=file, reason=reason))


def _repeated(data: bytes) -> dict[int, str]:
    # Every record has its time, so no writer ever writes the same line twice.
    lines = data.split(b"\n")[:-1]
    if len(set(lines)) == len(lines):
        return {}
    first: dict[bytes, int] = {}
    found = {}
    for number, line in enumerate(lines, 1):
        if first.setdefault(line, number) != number and line:
            found[number] = f"is line {first[line]} again; it counts once"
    return found


def document_ids(files: StoreFiles, wanted: set[int]) -> dict[int, str]:
    """The ids of these prepared rows, as far as whole records name them."""
    documents = records_of(files, "documents")
    return {r["document_index"]: str(r["doc_id"]) for r in documents if r["document_index"] in wanted}


def check_index(files: StoreFiles, snapshot: str, actual: Documents | None) -> Iterator[Finding]:
    """The cache of this snapshot, if there is one: whole, and equal to the documents of the blocks when given."""
    name = index_name(snapshot)
    if not files.exists(name):
        return
    cached = read_index(files, snapshot)
    reason = "fails its checksum; readers pass it over and open the blocks instead" if cached is None else ""
    if cached is not None and actual is not None:
        for column, values in actual.columns.items():
            if len(values) != len(cached) or not (values == cached.columns[column]).all():
                reason = f"its column {column} is not that of the blocks"
    if reason:
        yield Finding(kind="damage", part="index", file=name, reason=reason)
