"""A whole check of a store: everything beside the blocks, then the blocks in threads, with bytes per second shown.

Called by manifests/store_verify.py and store_repair.py. The single checks are in store_checks.py and
store_block_checks.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import numpy as np

from manifests.blocks import MOVED, recorded_blocks
from manifests.store_block_checks import Blocks, check, check_document, second_opinion
from manifests.store_checks import (
    check_index,
    check_manifest,
    check_plan,
    check_target,
    document_ids,
    folders_without_record,
)
from manifests.store_findings import Checked, Finding, VerifyOptions
from manifests.store_identity import check_identity
from shared.documents import index_name
from shared.errors import ConfigRefused, StoreDamaged
from shared.progress import progress
from shared.store import TeacherStore
from shared.store_files import StoreFiles, is_remote, open_files
from shared.store_layout import block_name


def check_store(location: str, options: VerifyOptions) -> Checked:
    """Check what the options ask for. Raises StoreMissing or StoreMismatch when there is no store of ours."""
    if options.engine == "zarr" and is_remote(location):
        raise ConfigRefused(f"--engine zarr reads local stores, {location} is in a bucket; use --engine direct")
    started = time.monotonic()
    files = open_files(location)
    checked = Checked(check_identity(files))
    store = None
    records = recorded_blocks(location)
    if not any(finding.part == "identity" for finding in checked.findings):
        store = TeacherStore(location, {block: str(record["seal"]) for block, record in records.items()})
    planned, of_plan = check_plan(files, store.identity if store else None)
    checked.findings += of_plan
    checked.findings += check_target(files)
    checked.findings += _check_records(files, records, planned)
    if store is None:
        reason = "not checked, because store.json is damaged; --repair restores it first"
        checked.findings.append(Finding(kind="note", part="block", file="blocks", reason=reason))
    elif options.sample is not None:
        _check_sample(Blocks(store, records, planned), options, checked)
    else:
        _check_blocks(Blocks(store, records, planned), options, checked)
    checked.findings = _named(files, checked.findings)
    checked.seconds = time.monotonic() - started
    return checked


def _check_records(
    files: StoreFiles, records: Mapping[int, dict[str, Any]], planned: list[tuple[int, int]]
) -> Iterator[Finding]:
    manifest = check_manifest(files)
    yield from manifest.findings
    for block, record in records.items():
        if lost := manifest.missing_documents(block, record):
            reason = f"{lost:,} of its {record['documents']:,} documents have no whole record"
            yield Finding(kind="damage", part="documents", block=block, file="manifest", reason=reason)
        if planned and block >= len(planned):
            reason = f"ends with block {len(planned) - 1}, but block {block} is recorded; it belongs to another store"
            yield Finding(kind="damage", part="plan", file="plan.json", reason=reason)
    for block in range(len(planned)):
        if block not in records:
            reason = "planned, no record says that it is done"
            yield Finding(kind="missing", part="block", block=block, file=block_name(block), reason=reason)
    yield from folders_without_record(files, records)


def _check_blocks(blocks: Blocks, options: VerifyOptions, checked: Checked) -> None:
    chosen = [b for b, record in blocks.records.items() if options.since is None or record["time"] >= options.since]
    total = sum(int(blocks.records[block]["bytes"]) for block in chosen)

    def look(block: int) -> list[Finding]:
        found = check(blocks, block)
        return found or (second_opinion(blocks, block) if options.engine == "zarr" else [])

    with (
        ThreadPoolExecutor(options.threads, thread_name_prefix="verify") as pool,
        progress("verify", total / 1e6, "MB", "store") as bar,
    ):
        asked = {pool.submit(look, block): block for block in chosen}
        whole = len(chosen) == len(blocks.records)
        for future in as_completed(asked):
            found, record = future.result(), blocks.records[asked[future]]
            whole = whole and not any(finding.kind == "damage" for finding in found)
            checked.findings += found
            checked.blocks += 1
            checked.documents += int(record["documents"])
            checked.bytes += 0 if record["detail"].get(MOVED) else int(record["bytes"])
            bar.advance(record["bytes"] / 1e6, blocks=f"{checked.blocks}/{len(chosen)}")
    # Of a store in a bucket its own checksum must do: each block would cost a dozen requests.
    compared = whole and not is_remote(blocks.store.location) and blocks.files.exists(index_name(blocks.store.snapshot))
    actual = blocks.store.documents_in_blocks() if compared else None
    checked.findings += check_index(blocks.files, blocks.store.snapshot, actual)


def _check_sample(blocks: Blocks, options: VerifyOptions, checked: Checked) -> None:
    checked.findings += check_index(blocks.files, blocks.store.snapshot, None)
    try:
        documents = blocks.store.documents
    except StoreDamaged as error:
        checked.findings.append(Finding(kind="damage", part="block", file="blocks", reason=str(error)))
        return
    picked = np.random.default_rng().permutation(len(documents))[: options.sample]
    with (
        ThreadPoolExecutor(options.threads, thread_name_prefix="verify") as pool,
        progress("verify", len(picked), "documents", "store") as bar,
    ):
        for found, size in pool.map(lambda position: check_document(blocks, documents[int(position)]), picked):
            checked.findings += found
            checked.bytes += size
            bar.advance()
    refs = documents.take(picked)
    checked.blocks, checked.documents = len(np.unique(refs.block)), len(refs)


def _named(files: StoreFiles, findings: list[Finding]) -> list[Finding]:
    """The findings with document ids where records name them, in the order of the blocks."""
    wanted = {int(name[1:]) for finding in findings for name in finding.documents}
    ids = document_ids(files, wanted) if wanted else {}
    named = [
        replace(finding, documents=tuple(ids.get(int(name[1:]), name) for name in finding.documents))
        for finding in findings
    ]
    return sorted(named, key=lambda f: (f.kind, -1 if f.block is None else f.block, f.array, f.rows or (0, 0), f.file))
