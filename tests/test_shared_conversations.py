"""What a data file may hold, and how a line that cannot be used is named: no row is lost without a word."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared.conversations import Conversation, RowFault, read_conversations, scan_conversations
from shared.errors import BadRow, DataEmpty, DataMissing, DataSyntax

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def one(tmp_path: Path, row: Any) -> Conversation | RowFault:
    (found,) = scan_conversations([write(tmp_path / "one.jsonl", row)])
    return found


def test_bom_crlf_blank_line_broken_line_and_no_final_newline(tmp_path: Path) -> None:
    good = json.dumps({"id": "a", "messages": TURNS}).encode()
    path = tmp_path / "noise.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\r\n" + good + b"\r\n{broken\r\n" + good + b"\r\n" + good)
    counts: Counter[str] = Counter()
    found = list(scan_conversations([path], counts))
    assert [type(item) for item in found] == [Conversation, Conversation, RowFault, Conversation, Conversation]
    fault = found[2]
    assert isinstance(fault, RowFault)
    assert (fault.where, fault.error, fault.reason) == (f"{path}:4", DataSyntax, "broken_line")
    assert counts == {"lines": 6, "rows": 5, "blank_lines": 1, "crlf_lines": 5, "bom": 1}


def test_a_line_separator_inside_a_string_does_not_shift_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "u2028.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False)
    path.write_text(row + "\n{broken\n", encoding="utf-8")
    first, second = scan_conversations([path])
    assert isinstance(first, Conversation)
    assert second.line_number == 2


def test_refusing_raises_with_file_and_line_and_skipping_reports(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n{broken\n")
    with pytest.raises(DataSyntax, match=r"bad\.jsonl:2") as caught:
        list(read_conversations([path]))
    assert caught.value.exit_code == 12
    skipped: list[RowFault] = []
    assert len(list(read_conversations([path], "skip", skipped.append))) == 1
    assert [fault.line_number for fault in skipped] == [2]


def test_not_utf8_is_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"messages": "caf\xe9"}\n')
    (fault,) = scan_conversations([path])
    assert isinstance(fault, RowFault)
    assert fault.error is DataSyntax


def test_missing_folder_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"none\.jsonl does not exist"):
        list(scan_conversations([tmp_path / "none.jsonl"]))
    with pytest.raises(DataMissing, match="is a folder"):
        list(scan_conversations([tmp_path]))
    for content in ("", "\n\r\n  \n"):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(DataEmpty, match=r"empty\.jsonl"):
            list(scan_conversations([tmp_path / "empty.jsonl"]))


def test_both_key_styles_give_the_same_messages(tmp_path: Path) -> None:
    plain = one(tmp_path, {"messages": [{"role": "system", "content": "s"}, *TURNS]})
    sharegpt = one(
        tmp_path,
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
            ]
        },
    )
    assert isinstance(plain, Conversation)
    assert isinstance(sharegpt, Conversation)
    assert plain.messages == sharegpt.messages
    assert plain.content_hash == sharegpt.content_hash


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not_an_object"),
        ({"text": "hi"}, "unknown_keys"),
        ({"messages": []}, "no_messages"),
        ({"messages": "hi"}, "no_messages"),
        ({"messages": ["hi"]}, "bad_message"),
        ({"messages": [{"role": "my_model", "content": "x"}]}, "unknown_role:my_model"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role:['user']"),
        ({"messages": [{"role": "user"}]}, "no_content"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}]}, "not_text"),
        ({"messages": TURNS, "tools": "{"}, "bad_tools"),
        ({"messages": TURNS, "tools": {"a": 1}}, "bad_tools"),
        ({"messages": TURNS, "id": {"a": 1}}, "bad_id"),
        ({"input_ids": [1, 2]}, "bad_ready_row"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_ready_row"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "bad_ready_row"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "bad_ready_row"),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, "bad_ready_row"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_ready_row"),
        ({"input_ids": "1 2", "loss_mask": [1, 2]}, "bad_ready_row"),
    ],
)
def test_rows_of_another_shape_are_refused_by_name(tmp_path: Path, row: Any, reason: str) -> None:
    fault = one(tmp_path, row)
    assert isinstance(fault, RowFault), fault
    assert (fault.reason, fault.error) == (reason, BadRow)
    assert fault.error.exit_code == 16


def test_tools_as_list_as_text_null_and_absent(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [
        {"messages": TURNS, "tools": tools},
        {"messages": TURNS, "tools": json.dumps(tools)},
        {"messages": TURNS, "tools": None},
        {"messages": TURNS},
    ]
    found = list(read_conversations([write(tmp_path / "tools.jsonl", *rows)]))
    assert [item.tools for item in found] == [tools, tools, None, None]


def test_a_tool_call_needs_no_content_and_keeps_its_fields(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    found = one(tmp_path, {"messages": [TURNS[0], call, {"role": "tool", "content": "3"}, TURNS[1]]})
    assert isinstance(found, Conversation)
    assert found.messages is not None
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": call["tool_calls"]}


def test_ragged_rows_mean_the_same_in_every_order(tmp_path: Path) -> None:
    rows = [
        {
            "id": "a",
            "messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"x": 1}}]}],
        },
        {
            "id": "b",
            "messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [{"arguments": '{"x": 1}'}]}],
            "late": 1,
        },
        {"id": "c", "messages": TURNS, "conversations": None, "tools": None},
    ]
    hashes = set()
    for order in itertools.permutations(rows):
        found = read_conversations([write(tmp_path / "ragged.jsonl", *order)])
        hashes.add(tuple(sorted((str(item.id), item.content_hash) for item in found)))
    assert len(hashes) == 1


def test_text_parts_are_joined_and_other_keys_kept(tmp_path: Path) -> None:
    found = one(
        tmp_path,
        {
            "id": 7,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "license": "MIT",
        },
    )
    assert isinstance(found, Conversation)
    assert found.messages == [{"role": "user", "content": "ab"}]
    assert (found.id, found.extra) == ("7", {"license": "MIT"})


def test_a_ready_row_is_taken_as_it_is(tmp_path: Path) -> None:
    found = one(tmp_path, {"input_ids": [5, 6, 7], "loss_mask": [0, True, 1], "messages": TURNS})
    assert isinstance(found, Conversation)
    assert (found.input_ids, found.loss_mask, found.messages) == ([5, 6, 7], [0, 1, 1], None)


def test_half_a_character_and_endless_nesting_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    whole = '{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    half = '{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    path.write_text(f"{whole}\n{half}\n{'[' * 200_000}\n", encoding="utf-8")
    good, *faults = scan_conversations([path])
    assert isinstance(good, Conversation)
    assert good.messages is not None
    assert good.messages[0]["content"] == "\U0001f600"
    assert all(isinstance(fault, RowFault) and fault.error is DataSyntax for fault in faults)
    assert [fault.line_number for fault in faults] == [2, 3]
    assert "\\ud83d is half a character" in getattr(faults[0], "detail", "")


def test_a_pipe_is_said_to_be_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataMissing, match="is a pipe or device"):
        list(scan_conversations([tmp_path / "pipe"]))
