"""Held-out prompts for decoding: from JSON lines of conversations or from a prepared folder, as token ids.

Called by stage2_train.evaluate. What cannot be asked is counted by reason, never dropped in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shared.chat import ChatRenderer
from shared.conversations import Conversation, Unusable, read_conversations
from shared.errors import ConfigRefused, DataMissing, NothingLeft
from shared.rows import PreparedRows


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that the target is to continue."""

    id: str
    ids: list[int]


@dataclass(slots=True)
class PromptSet:
    """The prompts of one data file; `skipped` by reason, `notes` count what was changed."""

    name: str
    path: Path
    prompts: list[Prompt] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """`limit` usable prompts per file (None: all), none longer than `max_prompt_tokens`, ids below `vocab_size`."""

    limit: int | None
    max_prompt_tokens: int
    vocab_size: int | None = None


def data_files(paths: Sequence[Path]) -> list[Path]:
    """JSON lines files and prepared folders behind what was asked; a plain folder stands for its *.jsonl.

    Raises DataMissing, and ConfigRefused for two of one name: results are filed by it.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir() and not (path / "prepare.json").is_file():
            inside = sorted(path.glob("*.jsonl"))
            if not inside:
                raise DataMissing(
                    f"data folder {path} has neither prepare.json nor a .jsonl file; pass files or a prepared folder"
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise DataMissing(f"data file {path} does not exist; pass JSON lines or a folder made by `dflash prepare`")
    by_name: dict[str, Path] = {}
    for path in found:
        other = by_name.setdefault(path.stem, path)
        if other is not path:
            raise ConfigRefused(f"{other} and {path} have one name, and results are filed by name; rename one")
    return found


def read_prompts(path: Path, renderer: ChatRenderer, limits: PromptLimits) -> PromptSet:
    """The prompts of one file or prepared folder, in its order.

    Raises DataMissing, DataEmpty, DataSyntax and BadRow as shared.conversations does, and NothingLeft naming the
    reasons when no prompt is usable.
    """
    found = PromptSet(path.stem, path)
    rows = _from_prepared(path, found) if path.is_dir() else _from_conversations(path, renderer, found)
    for prompt in rows:
        if not prompt.ids:
            found.skipped["empty_prompt"] += 1
        elif limits.vocab_size is not None and max(prompt.ids) >= limits.vocab_size:
            found.skipped["ids_out_of_range"] += 1
        elif len(prompt.ids) > limits.max_prompt_tokens:
            found.skipped["too_long"] += 1
        else:
            found.prompts.append(prompt)
            if len(found.prompts) == limits.limit:
                break
    if not found.prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.skipped.items()) or "no held-out row"
        raise NothingLeft(f"{path} has no prompt to decode: {reasons}")
    return found


def _from_conversations(path: Path, renderer: ChatRenderer, found: PromptSet) -> Iterator[Prompt]:
    for number, conversation in enumerate(read_conversations([path]), 1):
        identity = conversation.id or f"line-{conversation.line_number or number}"
        try:
            ids = _prompt_ids(conversation, renderer, found.notes)
        except Unusable as verdict:
            found.skipped[verdict.reason] += 1
            continue
        if ids is None:
            found.skipped["no_user_turn"] += 1
        else:
            yield Prompt(identity, ids)


def _prompt_ids(conversation: Conversation, renderer: ChatRenderer, notes: Counter[str]) -> list[int] | None:
    if conversation.input_ids is not None and conversation.loss_mask is not None:
        return _before_answer(conversation.input_ids, conversation.loss_mask)
    messages = question(conversation.messages or [], notes)
    return renderer.prompt_ids(messages, conversation.tools) if messages else None


def question(messages: list[dict[str, Any]], notes: Counter[str]) -> list[dict[str, Any]] | None:
    """The turns up to and with the last user turn; None without one.

    A benchmark's follow-up question stands directly behind the first, with the answer left out: then the
    conversation ends at the first of the two (noted as first_question_only).
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return None
    for first, second in pairwise(users):
        if second == first + 1:
            notes["first_question_only"] += 1
            return messages[: first + 1]
    return messages[: users[-1] + 1]


def _from_prepared(path: Path, found: PromptSet) -> Iterator[Prompt]:
    rows = PreparedRows.open(path)
    for index, document in enumerate(rows.documents):
        if document["split"] == "heldout":
            ids, mask = rows.document(index)
            prompt = _before_answer(ids.tolist(), mask)
            if prompt is None:
                found.skipped["no_supervised_token"] += 1
            else:
                yield Prompt(str(document["doc_id"]), prompt)


def _before_answer(ids: list[int], mask: Any) -> list[int] | None:
    """The tokens before the first supervised one; None when nothing is supervised."""
    supervised = np.flatnonzero(np.asarray(mask))
    return ids[: int(supervised[0])] if len(supervised) else None
