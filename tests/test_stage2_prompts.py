"""Which part of a row becomes a prompt, and how the rest is counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_target import make_tokenizer

from shared.chat import ChatRenderer
from shared.errors import ConfigRefused, DataEmpty, DataMissing, DataSyntax, NothingLeft
from shared.rows import Document, write_rows
from stage2_train.prompts import PromptLimits, data_files, question, read_prompts

ALL = PromptLimits(None, 1000)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("messages", "kept", "note"),
    [
        ([user("a")], 1, {}),
        ([SYSTEM, user("a"), assistant("b")], 2, {}),
        ([user("a"), assistant("b"), user("c"), assistant("d")], 3, {}),
        ([user("a"), user("b")], 1, {"first_question_only": 1}),
        ([SYSTEM, user("a"), assistant("b"), user("c"), user("d")], 4, {"first_question_only": 1}),
    ],
)
def test_a_question_ends_with_the_last_user_turn(messages: list[Any], kept: int, note: dict[str, int]) -> None:
    notes: Counter[str] = Counter()
    assert question(messages, notes) == messages[:kept]
    assert notes == note


def test_no_user_turn_is_no_question() -> None:
    assert question([SYSTEM, assistant("b")], Counter()) is None


def test_prompts_are_the_templates_own_with_the_generation_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    path = write(tmp_path / "mixed.jsonl", [
        {"id": "one", "messages": [user("Hello"), assistant("an answer that must not be shown")]},
        {"messages": [SYSTEM]},
        {"messages": [user("a"), user("b")]},
        {"id": "ready", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"id": "long", "messages": [user("word " * 400)]},
    ])  # fmt: skip
    found = read_prompts(path, ChatRenderer(tokenizer), PromptLimits(None, 200))
    assert [prompt.id for prompt in found.prompts] == ["one", "line-3", "ready"]
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(found.prompts[0].ids) == text
    assert found.prompts[2].ids == [5, 6]
    assert found.skipped == {"no_user_turn": 1, "too_long": 1}
    assert found.notes == {"first_question_only": 1}


def test_the_limit_counts_usable_prompts(tmp_path: Path) -> None:
    rows = [{"messages": [SYSTEM]}, *({"messages": [user(f"q{i}")]} for i in range(5))]
    found = read_prompts(write(tmp_path / "q.jsonl", rows), ChatRenderer(make_tokenizer()), PromptLimits(2, 100))
    assert [prompt.id for prompt in found.prompts] == ["line-2", "line-3"]


def test_a_prepared_folder_gives_its_heldout_rows(tmp_path: Path) -> None:
    ids, mask = np.arange(3, 11, dtype=np.int32), np.array([0, 0, 0, 1, 1, 0, 1, 1], np.uint8)
    documents = [
        Document(doc_id=f"d{i}", source="s", line=i, input_ids=ids + i, loss_mask=mask, split=split)  # type: ignore[arg-type]
        for i, split in enumerate(["train", "heldout", "train", "heldout"])
    ]
    write_rows(tmp_path / "rows", documents, {})
    found = read_prompts(tmp_path / "rows", ChatRenderer(make_tokenizer()), ALL)
    assert [(prompt.id, prompt.ids) for prompt in found.prompts] == [("d1", [4, 5, 6]), ("d3", [6, 7, 8])]


def test_a_folder_of_files_stands_for_its_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert data_files([tmp_path]) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text("{}")
    with pytest.raises(ConfigRefused, match="have one name"):
        data_files([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("content", "error"), [(None, DataMissing), ("", DataEmpty), ('{"messages": [}\n', DataSyntax)]
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: str | None, error: type[Exception]) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=r"bad\.jsonl"):
        read_prompts(data_files([path])[0], ChatRenderer(make_tokenizer()), ALL)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"neither prepare\.json nor a \.jsonl file"):
        data_files([tmp_path])


def test_nothing_to_ask_names_the_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"messages": [SYSTEM]}, {"messages": [user("long " * 50)]}])
    with pytest.raises(NothingLeft, match="1 no_user_turn, 1 too_long") as caught:
        read_prompts(path, ChatRenderer(make_tokenizer()), PromptLimits(None, 10))
    assert caught.value.exit_code == 17


def test_a_prompt_with_an_id_that_the_target_has_not_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "ready.jsonl"
    rows = [{"input_ids": [1, first, 3, 4], "loss_mask": [0, 0, 1, 1]} for first in (2, 99)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts(path, ChatRenderer(make_tokenizer()), PromptLimits(None, 100, vocab_size=99))
    assert [prompt.ids for prompt in found.prompts] == [[1, 2]]
    assert found.skipped == {"ids_out_of_range": 1}
