"""`dflash store verify --repair`: what is damaged is set aside, never deleted, and its records are withdrawn.

Called by manifests/store_verify.py. After the extraction command that it names has run again, the store has the bytes
it had before the damage: blocks, plan and target are functions of the store's identity.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from manifests.blocks import recorded_blocks
from manifests.commit import Ledger
from manifests.making_command import making_command
from manifests.records import EventRecord, ShardRecord
from manifests.store_findings import Checked, Finding, VerifyOptions, damages
from manifests.store_identity import check_identity, files_of, json_bytes, true_identity
from manifests.store_verification import check_store
from manifests.store_verify import report
from shared.atomic import disk_faults, fsync_dir, make_dir, owned, write_bytes
from shared.errors import ConfigRefused, StoreDamaged, StoreIncomplete, StoreMissing
from shared.store_files import LocalFiles, is_remote
from shared.store_layout import block_name
from shared.store_write import BLOCKS_METADATA


def repair_store(location: str, options: VerifyOptions, *, as_json: bool) -> None:
    """Check all and repair what can be.

    Raises RunBusy while an extraction owns the store, StoreIncomplete naming the command that makes the rest again,
    StoreDamaged when something is left that nothing here can restore.
    """
    if is_remote(location):
        raise ConfigRefused(
            f"--repair works on local stores, {location} is in a bucket; repair the original and push it"
        )
    store = Path(location)
    if not store.is_dir():
        raise StoreMissing(f"no teacher store at {location}; give the folder that `dflash extract` made")
    first = check_identity(LocalFiles(store))  # raises where there is no store at all
    with owned(store):
        repair = _Repair(store)
        repair.restore_identity(first)
        checked = check_store(location, options)
        left = repair.repair(checked.findings)
        command = making_command(store) if repair.remade else None
        if repair.actions:
            detail = {"actions": repair.actions, "findings": [f.text() for f in [*first, *checked.findings]]}
            repair.ledger.append(EventRecord(run_id="", event="repaired", detail=detail))
    everything = Checked(
        [*repair.restored, *checked.findings], checked.blocks, checked.documents, checked.bytes, checked.seconds
    )
    report(location, everything, as_json=as_json, actions=repair.actions, command=command)
    if repair.remade and not left:
        raise StoreIncomplete(
            f"{location} lacks {len(repair.remade)} parts, the first is {repair.remade[0]}; make them with: "
            f"{command or 'the command that made the store (no record of it is whole)'}"
        )
    if left:
        raise StoreDamaged(
            f"{location} has {len(left)} damages that nothing here can repair, the first: {left[0].text()}; restore "
            "that file from a copy of the store, or extract to another --out"
        )


class _Repair:
    """The actions of one repair on an owned store; `remade` names what the extraction must make again."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.actions: list[str] = []
        self.remade: list[str] = []
        self.restored: list[Finding] = []
        self._stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """Made when the first record is due: a store without damage gets no files."""
        if self._ledger is None:
            self._ledger = Ledger(self.store, f"repair-{uuid.uuid4().hex[:12]}")
        return self._ledger

    def restore_identity(self, findings: Sequence[Finding]) -> None:
        """store.json and the two group files from what they say of each other, where that decides it."""
        identity = true_identity(LocalFiles(self.store))
        restorable = files_of(identity) if identity is not None else {"blocks/zarr.json": json_bytes(BLOCKS_METADATA)}
        for finding in findings:
            if finding.file not in restorable:
                continue
            self._set_aside(finding.file, finding.file.replace("/", "-"))
            make_dir((self.store / finding.file).parent)
            write_bytes(self.store / finding.file, restorable[finding.file])
            self._did(f"wrote {finding.file} again from what the store's other files say")
            self.restored.append(finding)

    def repair(self, findings: Sequence[Finding]) -> list[Finding]:
        """Act on all damages; returns what is left."""
        parts: defaultdict[str, list[Finding]] = defaultdict(list)
        for finding in damages(list(findings)):
            parts[finding.part].append(finding)
        self._mend_manifest(parts.pop("manifest", []))
        for block, reason in _blocks_in([*parts.pop("block", []), *parts.pop("documents", [])]):
            self._withdraw(block, reason)
        if parts.pop("plan", []):
            self._set_aside("plan.json", "plan.json")
            self.remade.append("plan.json")
        if parts.pop("target", []):
            self._set_aside("target", "target")
            self.remade.append("target")
        for finding in parts.pop("index", []):
            (self.store / finding.file).unlink(missing_ok=True)
            self._did(f"removed {finding.file}, a cache")
        self.remade += [finding.file for finding in findings if finding.kind == "missing"]
        return [finding for left in parts.values() for finding in left]

    def _withdraw(self, block: int, reason: str) -> None:
        record = recorded_blocks(self.store).get(block)
        if record is None:
            return
        if record["time"] >= time.time():
            raise ConfigRefused(
                f"block {block} of {self.store} was recorded at {record['time']:.0f}, this machine's clock says "
                f"{time.time():.0f}: a withdrawal now would count as the older record; set the clock first"
            )
        self._set_aside(block_name(block), f"{block:06d}")
        kept = {name: record[name] for name in ("rank", "documents", "tokens", "bytes", "seconds", "seal")}
        self.ledger.append(ShardRecord(block=block, **kept, state="withdrawn", detail={"reason": reason}))
        self._did(f"withdrew block {block}: {reason}")
        self.remade.append(block_name(block))

    def _mend_manifest(self, findings: Sequence[Finding]) -> None:
        """Manifest files without their void lines; the files as they were go to quarantine."""
        lines: defaultdict[str, set[int]] = defaultdict(set)
        for finding in findings:
            assert finding.line is not None
            lines[finding.file].add(finding.line)
        for file, void in lines.items():
            data = (self.store / file).read_bytes()
            self._keep(file, data)
            kept = [line for number, line in enumerate(io.BytesIO(data), 1) if number not in void]
            write_bytes(self.store / file, b"".join(kept))
            self._did(f"took {len(void)} void lines out of {file}")

    def _keep(self, name: str, data: bytes) -> None:
        place = self._place(name.replace("/", "-"))
        write_bytes(place, data)

    def _set_aside(self, name: str, label: str) -> None:
        source = self.store / name
        if not os.path.lexists(source):
            return
        place = self._place(label)
        with disk_faults(place):
            source.rename(place)
            fsync_dir(source.parent)
            fsync_dir(place.parent)
        self._did(f"moved {name} to quarantine/{place.name}")

    def _place(self, label: str) -> Path:
        folder = self.store / "quarantine"
        with disk_faults(folder):
            make_dir(folder)
        names = (f"{label}-{self._stamp}{f'-{number}' if number else ''}" for number in range(10_000))
        return next(folder / name for name in names if not os.path.lexists(folder / name))

    def _did(self, action: str) -> None:
        self.actions.append(action)


def _blocks_in(findings: Sequence[Finding]) -> Iterator[tuple[int, str]]:
    """Each damaged block once, with its first reason and how many more there are."""
    reasons: defaultdict[int, list[str]] = defaultdict(list)
    for finding in findings:
        if finding.block is not None:
            reasons[finding.block].append(" ".join(f"{finding.array} {finding.reason}".split()))
    for block in sorted(reasons):
        more = len(reasons[block]) - 1
        yield block, reasons[block][0] + (f" (and {more} more)" if more else "")
