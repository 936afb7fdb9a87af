"""What a check of a store found, one line each: where, which rows of which array, whose documents, and why.

Made by manifests/store_checks.py and store_block_checks.py; printed and acted upon by store_verify.py and
store_repair.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

_SHOWN_DOCUMENTS = 3

Part = Literal["identity", "groups", "plan", "target", "manifest", "documents", "block", "index", "folder"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as recorded.

    `kind`: "damage"; "missing", which the same extraction makes; or "note", which harms nobody. `part` says what
    `--repair` would act on. Rows are [first, last) of the array; documents are ids, or row numbers of the prepared
    data ("#12") where no record names them.
    """

    kind: Literal["damage", "missing", "note"]
    part: Part
    file: str
    reason: str
    block: int | None = None
    array: str = ""
    rows: tuple[int, int] | None = None
    line: int | None = None
    documents: tuple[str, ...] = ()

    def text(self) -> str:
        """One line for people."""
        where = [f"block {self.block}"] if self.block is not None else []
        if self.array:
            where.append(self.array)
        if self.rows is not None:
            where.append(f"rows {self.rows[0]}..{self.rows[1]}")
        if self.line is not None:
            where.append(f"line {self.line}")
        if self.documents:
            more = len(self.documents) - _SHOWN_DOCUMENTS
            named = ", ".join(self.documents[:_SHOWN_DOCUMENTS])
            where.append(f"documents {named}{f' and {more:,} more' if more > 0 else ''}")
        where.append(self.file)
        return " ".join(f"{self.kind}: {', '.join(where)}: {self.reason}".split())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "rows": list(self.rows) if self.rows else None, "documents": list(self.documents)}


def joined(findings: Sequence[Finding]) -> list[Finding]:
    """For people: neighbouring blocks that lack, or were moved to, the same are one line, not thousands."""
    told: list[Finding] = []
    counts: list[int] = []
    for finding in findings:
        plain = finding.kind != "damage" and finding.part == "block"
        if plain and told and told[-1].block is not None:
            after = replace(told[-1], block=told[-1].block + counts[-1], file=finding.file)
            if after == finding:
                counts[-1] += 1
                continue
        told.append(finding)
        counts.append(1)
    return [
        replace(finding, file=f"{finding.file} and the {count - 1:,} after it") if count > 1 else finding
        for finding, count in zip(told, counts, strict=True)
    ]


def damages(findings: list[Finding]) -> list[Finding]:
    """Those that mean lost or wrong bytes."""
    return [finding for finding in findings if finding.kind == "damage"]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What to check: `sample` documents or blocks recorded `since` (seconds since 1970), with so many threads."""

    sample: int | None = None
    since: float | None = None
    threads: int = 4
    engine: Literal["direct", "zarr"] = "direct"


@dataclass
class Checked:
    """What a verification looked at and found."""

    findings: list[Finding] = field(default_factory=list)
    blocks: int = 0
    documents: int = 0
    bytes: int = 0
    seconds: float = 0.0
