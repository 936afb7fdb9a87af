"""`prepare --regenerate`: which answers are asked for, the processes that write them, and rows made of them.

The parent plans threads and assembles rows; workers (stage1_extract/regenerate_worker.py) hold the target.
An answer's tokens are kept as written: decoding to text and tokenising again would teach the drafter tokens
that its target never chose.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests.launch import LaunchSpec, run_workers
from shared.atomic import disk_faults, write_bytes, write_json
from shared.chat import Messages
from shared.config import to_dict
from shared.conversations import RowFault, Unusable
from shared.errors import AllMasked, BadRow
from shared.progress import progress, say
from shared.rows import Document
from stage1_extract.collect import Named
from stage1_extract.config import PrepareConfig
from stage1_extract.tokenise import Tokeniser


@dataclass(frozen=True, slots=True)
class Thread:
    """A conversation as turns to answer: messages before the first answer, then those before each further one."""

    doc_id: str
    chunks: list[Messages]
    tools: list[Any] | None
    named: Named | None = None

    def turn_name(self, turn: int) -> int | None:
        """What distinguishes this turn's row, None for a conversation with one answer."""
        return turn if len(self.chunks) > 1 else None


@dataclass(frozen=True, slots=True)
class Stored:
    """One answer on disk."""

    prompt_sha: str
    ids: list[int]
    finished: bool


@dataclass(slots=True)
class Answers:
    """All answers of these settings in a prepared folder, by (doc_id, turn)."""

    folder: Path
    settings: str
    found: dict[tuple[str, int], Stored] = field(default_factory=dict)

    def load(self) -> Answers:
        """Read what all workers, also earlier ones, have written; a torn last line is passed over."""
        for path in sorted(self.folder.glob(f"answers-{self.settings}-*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    row = json.loads(line)
                    self.found[row["doc"], row["turn"]] = Stored(row["prompt"], row["ids"], row["finished"])
                except (ValueError, KeyError, TypeError):
                    continue
        return self

    def get(self, doc_id: str, turn: int, prompt: Sequence[int]) -> Stored | None:
        """The answer to exactly this prompt."""
        stored = self.found.get((doc_id, turn))
        return stored if stored is not None and stored.prompt_sha == prompt_sha(prompt) else None

    def remove(self) -> None:
        """Forget the working files once the rows are written."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(slots=True)
class Made:
    """Rows made of answers, and turns that gave none."""

    documents: list[Document] = field(default_factory=list)
    skipped: list[RowFault] = field(default_factory=list)


def prompt_sha(prompt: Sequence[int]) -> str:
    """A short hash of a prompt's ids."""
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()[:16]


def split_turns(messages: Messages) -> list[Messages]:
    """Cut a conversation where the target shall speak: after every user or tool turn.

    The data's own answers are dropped, the target writes them anew. Kept is an assistant turn that a tool turn follows:
    the tool's result belongs to that very call.
    """
    following_roles = [message["role"] for message in messages[1:]] + ["nobody"]
    messages = [
        message
        for message, following in zip(messages, following_roles, strict=True)
        if message["role"] != "assistant" or following == "tool"
    ]
    chunks: list[Messages] = []
    current: Messages = []
    for place, message in enumerate(messages):
        current.append(message)
        following = messages[place + 1]["role"] if place + 1 < len(messages) else "nobody"
        if message["role"] in ("user", "tool") and following in ("user", "nobody"):
            chunks.append(current)
            current = []
    return chunks


def plan_threads(used: Iterable[Named], tokeniser: Tokeniser) -> tuple[list[Thread], list[RowFault]]:
    """The threads to answer, and the rows that give none (no user turn, ready rows, a first prompt too long)."""
    renderer = tokeniser.renderer
    assert renderer is not None
    threads: list[Thread] = []
    faults: list[RowFault] = []
    for named in used:
        row = named.conversation
        try:
            if row.messages is None:
                raise Unusable(
                    "ready_row", BadRow, "a row of input_ids has no messages to answer; leave --regenerate out for it"
                )
            thread = Thread(named.doc_id, split_turns(row.messages), row.tools, named)
            if not thread.chunks:
                raise Unusable("no_prompt", BadRow, "no user turn that the target could answer")
            _require_room(renderer.prompt_ids(thread.chunks[0], row.tools), tokeniser.max_length)
        except Unusable as verdict:
            faults.append(verdict.at(row.source_file, row.line_number, named.doc_id))
        else:
            threads.append(thread)
    return threads, faults


def _require_room(prompt: Sequence[int], max_length: int) -> None:
    if len(prompt) >= max_length:
        raise Unusable(
            "prompt_fills_max_length",
            AllMasked,
            f"a prompt of {len(prompt)} tokens leaves no room for an answer in max_length {max_length}",
        )


def write_answers(config: PrepareConfig, threads: Sequence[Thread], identity: dict[str, Any]) -> Answers:
    """Have workers answer all threads; answers that an earlier run wrote with the same settings are kept."""
    folder = config.out / "regenerate"
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # Other data may be added without losing answers: the key of an answer is its prompt and these settings.
    relevant = {
        key: identity[key]
        for key in (
            "weights_sha256",
            "tokenizer_sha256",
            "chat_template_sha256",
            "chat_template_kwargs",
            "seed",
            "max_new_tokens",
            "temperature",
            "dtype",
            "max_length",
        )
    }
    settings = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:12]
    lines = [json.dumps({"doc": t.doc_id, "chunks": t.chunks, "tools": t.tools}, ensure_ascii=False) for t in threads]
    write_bytes(folder / "threads.jsonl", ("\n".join(lines) + "\n").encode())
    write_json(folder / "work.json", {"config": to_dict(config), "settings": settings})
    if already := len(Answers(folder, settings).load().found):
        say(f"prepare: {already:,} answers of an earlier run are kept")
    run_workers(
        LaunchSpec(
            run_dir=config.out,
            role="regenerate",
            entry="stage1_extract.regenerate_worker:main",
            num_workers=min(config.shards, len(threads)),
            summed_progress=True,
            hang_limit_scale=0.0,  # someone looks on, and what an answer may take depends on --max-new-tokens
        )
    )
    return Answers(folder, settings).load()


def answer_text(tokenizer: Any, ids: Sequence[int], finished: bool) -> str:
    """The words of an answer, without its end token."""
    return str(tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True))


def assemble(threads: Sequence[Thread], answers: Answers, tokeniser: Tokeniser, out: Path) -> Made:
    """One row per answer: prompt ids and the answer's ids as written. Also writes conversations.jsonl."""
    assert tokeniser.renderer is not None
    made = Made()
    lines: list[str] = []
    with progress("make rows", len(threads), "conversations", "prepare") as bar:
        for thread in threads:
            history = _assemble_thread(thread, answers, tokeniser, made)
            named = thread.named
            assert named is not None
            extra = {"source": named.conversation.extra.get("source", named.conversation.source_file)}
            lines.append(json.dumps({"id": thread.doc_id, **extra, "messages": history}, ensure_ascii=False))
            bar.advance()
    write_bytes(out / "conversations.jsonl", ("\n".join(lines) + "\n").encode())
    return made


def _assemble_thread(thread: Thread, answers: Answers, tokeniser: Tokeniser, made: Made) -> Messages:
    renderer, named = tokeniser.renderer, thread.named
    assert renderer is not None
    assert named is not None
    history: Messages = []
    for turn, chunk in enumerate(thread.chunks):
        history = history + chunk
        try:
            prompt = renderer.prompt_ids(history, thread.tools)
            _require_room(prompt, tokeniser.max_length)
            stored = answers.get(thread.doc_id, turn, prompt)
            assert stored is not None, f"no answer to turn {turn} of {thread.doc_id}, though all workers ended well"
            text = answer_text(renderer.tokenizer, stored.ids, stored.finished)
            if not text.strip():
                raise Unusable("empty_answer", AllMasked, "the target answered with nothing")
        except Unusable as verdict:
            made.skipped.append(
                verdict.at(named.conversation.source_file, named.conversation.line_number, thread.doc_id)
            )
            return history
        tokeniser.counts["answers"] += 1
        tokeniser.counts["unfinished"] += not stored.finished
        result = tokeniser.finish(
            named, [*prompt, *stored.ids], [0] * len(prompt) + [1] * len(stored.ids), thread.turn_name(turn)
        )
        if isinstance(result, Document):
            made.documents.append(result)
        else:
            made.skipped.append(result)
        history = [*history, {"role": "assistant", "content": text}]
    return history
