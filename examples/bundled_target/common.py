"""Small helpers shared by the recipe's scripts: JSON-lines files and the target's ChatML rendering."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read_rows(path: Path) -> list[Row]:
    """Reads a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Writes rows as JSON lines and returns how many there were."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def render_prompt(question: str) -> str:
    """The text before the answer; the same text that the tokenizer's chat template gives with a generation prompt."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def render_answer(answer: str) -> str:
    """The answer as the model must write it: with the end mark, so that it learns to stop."""
    return answer + TURN_END
