"""The kinds of records and their columns, declared once: writers fill them, DuckDB views are made from them.

Every record also carries `time` (seconds since 1970) and `writer` (who appended it), every line a checksum
(manifests/lines.py). Extra facts go into `detail`, a JSON object, so that a new fact never changes a column.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

# In a ShardRecord's detail: the bucket where the block's large arrays lie that `store push --free-local` removed here.
MOVED = "moved_to"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A command began or ended on a folder: state started, finished, failed, interrupted or refused."""

    run_id: str
    command: str
    state: str
    exit_code: int | None = None
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something worth knowing that happened once: an ignored checkpoint, a compile, a truncated row count."""

    run_id: str
    event: str
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DocumentRecord:
    """One document stored in a block, appended before the block's ShardRecord: it counts only if that one came.

    The view `stored_documents` says which do. `topk_mass` is the teacher's probability that the stored top k hold,
    mean over the document's tokens; `token_sha` the first 16 hex digits of a sha256 over ids and loss mask; `seal`
    that of the block, so that what an earlier attempt left is told apart.
    """

    document_index: int
    doc_id: str
    source: str
    line: int
    n_tokens: int
    n_supervised: int
    split: str
    truncated: bool = False
    block: int = -1
    topk_mass: float | None = None
    token_sha: str = ""
    seal: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SkipRecord:
    """One row that was left out, and why."""

    doc_id: str
    source: str
    line: int
    reason: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One block of a store that is complete: the only proof that it is. A later one with state withdrawn revokes it.

    `seal` vouches for every byte of the block (shared/seal.py).
    """

    block: int
    rank: int
    documents: int
    tokens: int
    bytes: int
    seconds: float
    seal: str
    state: str = "done"
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MetricRecord:
    """One number at one step: split is train, heldout, speed or memory."""

    run_id: str
    global_step: int
    split: str
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One complete checkpoint folder, relative to the run folder."""

    run_id: str
    global_step: int
    path: str
    bytes: int
    acceptance_length_estimate: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One data file evaluated by real decoding; acceptance_length as defined in stage2_train/acceptance.py."""

    run_id: str
    name: str
    global_step: int
    prompts: int
    acceptance_length: float
    acceptance_length_low: float | None
    acceptance_length_high: float | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    mismatches: int | None
    ties: int | None
    path: str
    detail: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, type] = {
    "runs": RunRecord,
    "events": EventRecord,
    "documents": DocumentRecord,
    "skips": SkipRecord,
    "shards": ShardRecord,
    "metrics": MetricRecord,
    "checkpoints": CheckpointRecord,
    "evaluations": EvaluationRecord,
}

_SQL = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", dict: "JSON"}


def kind_of(record: object) -> str:
    """The manifest kind of a record instance."""
    return next(kind for kind, cls in KINDS.items() if cls is type(record))


def columns_of(kind: str) -> dict[str, str]:
    """Column name to DuckDB type of a kind, in order, with `folder`, `writer` and `time` in front."""
    columns = {"folder": "VARCHAR", "writer": "VARCHAR", "time": "DOUBLE"}
    hints = get_type_hints(KINDS[kind])
    for item in dataclasses.fields(KINDS[kind]):
        hint = hints[item.name]
        optional = (
            next((part for part in get_args(hint) if part in _SQL), None) if type(None) in get_args(hint) else hint
        )
        columns[item.name] = _SQL.get(optional, "JSON") if isinstance(optional, type) else "JSON"
    return columns
