"""JSON lines of conversations to `Conversation` objects, with a named fault for every line that is not one.

Called by `dflash prepare` (which counts faults over all lines before it refuses) and by `dflash eval` (prompts).
Nothing is tokenised here: read shared/chat.py next.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.errors import BadRow, DataEmpty, DataError, DataMissing, DataSyntax

OnBadRow = Literal["refuse", "skip"]

# ShareGPT's words below. A role outside this table is refused by name: guessing would make foreign text trainable.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
}
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row of a data file: either `messages` or ready `input_ids` with `loss_mask` (same length, 0 or 1)."""

    id: str | None
    messages: list[dict[str, Any]] | None
    input_ids: list[int] | None
    loss_mask: list[int] | None
    source_file: str
    line_number: int
    tools: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.source_file}:{self.line_number}"

    @property
    def content_hash(self) -> str:
        """sha256 hex of what would be trained on; the same words in another file have the same hash."""
        content = [self.messages, self.tools, self.input_ids, self.loss_mask]
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFault:
    """Why a row cannot be used: the reason groups the counts, the error class carries the exit code."""

    reason: str
    error: type[DataError]
    detail: str
    source_file: str
    line_number: int
    id: str | None = None

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.source_file}:{self.line_number}"


class Unusable(Exception):
    """Raised while looking at one row; carries what a RowFault needs except the place."""

    def __init__(self, reason: str, error: type[DataError], detail: str) -> None:
        super().__init__(detail)
        self.reason, self.error, self.detail = reason, error, detail

    def at(self, source_file: str, line_number: int, id: str | None = None) -> RowFault:
        """The fault with its place."""
        return RowFault(
            reason=self.reason,
            error=self.error,
            detail=self.detail,
            source_file=source_file,
            line_number=line_number,
            id=id,
        )


def scan_conversations(paths: Sequence[Path], counts: Counter[str] | None = None) -> Iterator[Conversation | RowFault]:
    """Every non-blank line of the files, in order, as a Conversation or as the fault it has.

    `counts` receives lines, rows, blank_lines, crlf_lines and bom. All files are checked to exist and to hold
    something before the first row is given. Raises DataMissing, DataEmpty.
    """
    counts = Counter() if counts is None else counts
    for path in paths:
        require_data_file(path)
    for path in paths:
        rows = 0
        # Bytes, split at \n only: text mode would also split at U+2028 inside a string and shift the line numbers.
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                counts["lines"] += 1
                counts["crlf_lines"] += raw.endswith(b"\r\n")
                if number == 1 and raw.startswith(BOM):
                    counts["bom"] += 1
                    raw = raw[len(BOM) :]
                if not raw.strip():
                    counts["blank_lines"] += 1
                    continue
                rows += 1
                yield _parse_line(raw, str(path), number)
        counts["rows"] += rows
        if rows == 0:
            raise DataEmpty(
                f"data file {path} holds no row ({path.stat().st_size} bytes); remove it from the command or fill it"
            )


def read_conversations(
    paths: Sequence[Path], on_bad_row: OnBadRow = "refuse", on_skip: Callable[[RowFault], None] | None = None
) -> Iterator[Conversation]:
    """The usable conversations of the files.

    "refuse" raises the first fault's class (DataSyntax, BadRow) with file:line; "skip" gives faults to `on_skip`.
    Raises DataMissing, DataEmpty.
    """
    for item in scan_conversations(paths):
        if isinstance(item, Conversation):
            yield item
        elif on_bad_row == "refuse":
            raise item.error(f"{item.where}: {item.detail}")
        elif on_skip is not None:
            on_skip(item)


def require_data_file(path: Path) -> None:
    """Raise DataMissing unless `path` is a file that may be read, more than once."""
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_dir():
        what = "is a folder, not a JSON lines file"
    elif path.is_file():
        what = "cannot be read: permission denied"
    else:
        what = "is a pipe or device, and data is read more than once" if path.exists() else "does not exist"
    raise DataMissing(f"data file {path} {what}; pass JSON lines with messages, conversations or input_ids")


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataMissing(f"data file {path} cannot be opened: {error.strerror}") from error


def _parse_line(raw: bytes, source_file: str, number: int) -> Conversation | RowFault:
    try:
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Unusable("broken_line", DataSyntax, f"not UTF-8 at byte {error.start} of the line") from error
        except (ValueError, RecursionError) as error:
            raise Unusable("broken_line", DataSyntax, f"not JSON: {error}") from error
        _refuse_half_characters(row, raw)
        return parse_row(row, source_file, number)
    except Unusable as verdict:
        return verdict.at(source_file, number)


def _refuse_half_characters(row: Any, raw: bytes) -> None:
    """JSON can spell one half of a surrogate pair, which no tokenizer and no file can take. Raises Unusable."""
    if b"\\ud" not in raw.lower():
        return
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Unusable("broken_character", DataSyntax, f"{half} is half a character (a lone surrogate)") from error


def parse_row(row: Any, source_file: str, line_number: int) -> Conversation:
    """One decoded JSON value as a Conversation; a key holding null counts as absent. Raises Unusable."""
    if not isinstance(row, dict):
        raise Unusable("not_an_object", BadRow, f"a row must be a JSON object, this line is a {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}
    identity = row.pop("id", None)
    if isinstance(identity, (dict, list)):
        raise Unusable("bad_id", BadRow, "`id` must be a string or a number")
    tools = _parse_tools(row.pop("tools", None))
    messages = input_ids = loss_mask = None
    if "input_ids" in row:
        input_ids, loss_mask = _parse_ready(row.pop("input_ids"), row.pop("loss_mask", None))
        row = {key: value for key, value in row.items() if key not in ("messages", "conversations")}
    elif "messages" in row or "conversations" in row:
        messages = _parse_messages(row.pop("messages") if "messages" in row else row.pop("conversations"))
    else:
        raise Unusable(
            "unknown_keys", BadRow, f"no `messages`, `conversations` or `input_ids` among the keys {sorted(row)}"
        )
    return Conversation(
        id=None if identity is None else str(identity),
        messages=messages,
        tools=tools,
        input_ids=input_ids,
        loss_mask=loss_mask,
        source_file=source_file,
        line_number=line_number,
        extra=row,
    )


def _parse_ready(ids: Any, mask: Any) -> tuple[list[int], list[int]]:
    if mask is None:
        raise Unusable("bad_ready_row", BadRow, "`input_ids` without `loss_mask`: say which tokens are supervised")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise Unusable("bad_ready_row", BadRow, "`input_ids` and `loss_mask` must be lists")
    if len(ids) != len(mask):
        raise Unusable("bad_ready_row", BadRow, f"{len(ids)} input_ids but {len(mask)} loss_mask entries")
    if any(type(token) is not int or token < 0 for token in ids):
        raise Unusable("bad_ready_row", BadRow, "`input_ids` must be whole numbers >= 0")
    if any(flag not in (0, 1) for flag in mask):
        raise Unusable("bad_ready_row", BadRow, "`loss_mask` must hold only 0 and 1")
    return ids, [int(flag) for flag in mask]


def _parse_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise Unusable("bad_tools", BadRow, f"`tools` is text but not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise Unusable("bad_tools", BadRow, f"`tools` must be a list, not a {type(tools).__name__}")
    return tools or None


def _parse_messages(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise Unusable("no_messages", BadRow, "the conversation must be a non-empty list of messages")
    return [_parse_message(turn, position) for position, turn in enumerate(turns)]


def _parse_message(turn: Any, position: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Unusable("bad_message", BadRow, f"message {position} must be an object, not a {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable(
            f"unknown_role:{role}",
            BadRow,
            f"message {position} has the unknown role {role!r}; known: {', '.join(ROLES)}",
        )
    content = turn.get("content", turn.get("value"))
    rest = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    if isinstance(content, list):
        content = _join_text_parts(content, position)
    if content is None and not rest.get("tool_calls"):
        raise Unusable("no_content", BadRow, f"message {position} ({role}) has neither content nor tool_calls")
    if content is not None and not isinstance(content, str):
        raise Unusable(
            "bad_message", BadRow, f"message {position} ({role}): content must be text, not a {type(content).__name__}"
        )
    return {"role": ROLES[role], "content": content if content is not None else "", **rest}


def _join_text_parts(parts: list[Any], position: int) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Unusable(
                "not_text", BadRow, f"message {position} has a part of type {kind!r}; only text parts can be trained on"
            )
        texts.append(part["text"])
    return "".join(texts)
