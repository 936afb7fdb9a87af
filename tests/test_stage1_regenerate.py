"""Regenerated rows hold the target's own tokens; nothing written is written twice, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from commands import workers_in_process
from tiny_target import save_target

import stage1_extract.regenerate as regenerate_module
from shared.chat import render_prompt
from shared.cli import cli
from shared.errors import DflashError, Interrupted
from shared.rows import PreparedRows
from shared.target import load_target
from stage1_extract import regenerate_worker
from stage1_extract.regenerate import split_turns

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that ends an answer on any of several tokens, so that a random model stops now and then."""
    folder = save_target(tmp_path_factory.mktemp("regenerate") / "tiny", "llama", spread=0.4)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": list(range(8, 320, 9))}))
    return folder


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the real worker function rank by rank in this process (processes are tested with extract)."""

    workers_in_process(monkeypatch, regenerate_module, regenerate_worker)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def data_file(path: Path, count: int = 8) -> Path:
    rows: list[dict[str, Any]] = [
        {"id": f"p{i}", "source": "words", "messages": [user(" ".join(WORDS[: 1 + i]))]} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(data: Path, target: Path, out: Path, *more: object) -> Result:
    arguments = [
        "prepare",
        data,
        "--target",
        target,
        "--out",
        out,
        "--regenerate",
        "--max-new-tokens",
        12,
        "--device",
        "cpu",
        *more,
    ]
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def ok(result: Result) -> Result:
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def plain(model: Any, prompt: list[int], limit: int, eos: set[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) - len(prompt) < limit and not (len(ids) > len(prompt) and ids[-1] in eos):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_rows_are_prompt_ids_and_the_targets_greedy_tokens(tmp_path: Path, target: Path) -> None:
    data = data_file(tmp_path / "d.jsonl")
    result = ok(prepare(data, target, tmp_path / "r", "--batch-size", 3, "--shards", 2))
    loaded, rows = (
        load_target(str(target), device="cpu", dtype="float32"),
        PreparedRows.open(tmp_path / "r", verify=True),
    )
    eos = set(regenerate_worker.eos_ids(loaded))
    assert {2, 8, 17} <= eos
    unfinished = 0
    for line in rows.documents:
        ids, mask = rows.document(line["index"])
        prompt = render_prompt(loaded.tokenizer, [user(" ".join(WORDS[: 1 + int(line["doc_id"][1:])]))])
        answer = plain(loaded.model, prompt, 12, eos)
        assert ids.tolist() == prompt + answer
        assert mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        unfinished += answer[-1] not in eos
    counts = rows.info["counts"]
    assert counts["answers"] == rows.n_documents + sum(rows.info["skipped"].values()) - rows.info["skipped"].get(
        "empty_answer", 0
    )
    assert counts.get("unfinished", 0) == unfinished
    assert "answers written" in result.output
    assert not (tmp_path / "r" / "regenerate").exists()


def test_the_conversations_file_can_be_data_again(tmp_path: Path, target: Path) -> None:
    ok(prepare(data_file(tmp_path / "d.jsonl"), target, tmp_path / "r"))
    lines = [json.loads(line) for line in (tmp_path / "r" / "conversations.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(8)]
    assert lines[3]["messages"][0] == user(" ".join(WORDS[:4]))
    assert lines[3]["source"] == "words"
    again = CliRunner().invoke(
        cli,
        [
            "prepare",
            str(tmp_path / "r" / "conversations.jsonl"),
            "--target",
            str(target),
            "--out",
            str(tmp_path / "r2"),
            "--on-bad-row",
            "skip",
        ],
    )
    assert again.exit_code == 0, again.output


def test_user_turns_in_a_row_are_answered_one_after_the_other(tmp_path: Path, target: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"id": "m", "messages": [user("one two"), user("three four")]}) + "\n")
    ok(prepare(data, target, tmp_path / "r"))
    rows, loaded = PreparedRows.open(tmp_path / "r"), load_target(str(target), device="cpu", dtype="float32")
    assert [line["doc_id"] for line in rows.documents] == ["m#0", "m#1"]
    (line,) = (tmp_path / "r" / "conversations.jsonl").read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    ids, mask = rows.document(1)
    prompt = render_prompt(loaded.tokenizer, messages[:3])
    assert ids[: len(prompt)].tolist() == prompt
    assert mask[: len(prompt)].sum() == 0
    assert {line["split"] for line in rows.documents} == {"train"}


@pytest.mark.parametrize(
    ("messages", "chunks"),
    [
        ([user("a")], [[user("a")]]),
        ([user("a"), said("b")], [[user("a")]]),
        ([user("a"), user("b")], [[user("a")], [user("b")]]),
        ([user("a"), said("b"), user("c"), said("d")], [[user("a")], [user("c")]]),
        (
            [{"role": "system", "content": "s"}, user("a"), user("b")],
            [[{"role": "system", "content": "s"}, user("a")], [user("b")]],
        ),
        (
            [user("a"), said("b"), {"role": "tool", "content": "t"}],
            [[user("a"), said("b"), {"role": "tool", "content": "t"}]],
        ),
        ([said("b")], []),
        ([{"role": "system", "content": "s"}], []),
    ],
)
def test_where_the_target_speaks(messages: list[dict[str, str]], chunks: list[Any]) -> None:
    assert split_turns(messages) == chunks


def test_stopped_and_run_again_gives_the_same_rows_and_repeats_no_answer(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_file(tmp_path / "d.jsonl")
    sampling: list[object] = ["--temperature", 1.0, "--batch-size", 2]
    ok(prepare(data, target, tmp_path / "whole", *sampling))
    calls = {"looks": 0}

    def stop_after_five_looks() -> bool:
        calls["looks"] += 1
        return calls["looks"] >= 5

    monkeypatch.setattr(regenerate_worker, "stop_requested", stop_after_five_looks)
    result = prepare(data, target, tmp_path / "r", *sampling)
    assert isinstance(result.exception, Interrupted), result.output
    assert not (tmp_path / "r" / "prepare.json").exists()
    (kept,) = (tmp_path / "r" / "regenerate").glob("answers-*.jsonl")
    before = kept.read_text()
    asked: list[int] = []
    real = regenerate_worker.decode
    monkeypatch.setattr(regenerate_worker, "stop_requested", lambda: False)
    monkeypatch.setattr(
        regenerate_worker,
        "decode",
        lambda t, requests, *more: asked.extend(r.key for r in requests) or real(t, requests, *more),
    )
    with kept.open("a") as file:
        file.write('{"doc": "p0", "turn": 0, "ids": [1, 2')  # what a kill in the middle of a write leaves
    ok(prepare(data, target, tmp_path / "r", *sampling))
    assert len(asked) == 8 - len([line for line in before.splitlines() if line])
    assert 0 < len(asked) < 8
    first, second = PreparedRows.open(tmp_path / "whole"), PreparedRows.open(tmp_path / "r")
    assert first.info["rows_sha256"] == second.info["rows_sha256"]


def test_answers_of_other_settings_are_not_taken(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_file(tmp_path / "d.jsonl")
    monkeypatch.setattr(regenerate_worker, "stop_requested", lambda: True)
    assert isinstance(prepare(data, target, tmp_path / "r").exception, Interrupted)
    monkeypatch.setattr(regenerate_worker, "stop_requested", lambda: False)
    ok(prepare(data, target, tmp_path / "r", "--temperature", 0.7, "--seed", 3))
    ok(prepare(data, target, tmp_path / "fresh", "--temperature", 0.7, "--seed", 3))
    assert (
        PreparedRows.open(tmp_path / "r").info["rows_sha256"]
        == PreparedRows.open(tmp_path / "fresh").info["rows_sha256"]
    )
    ok(prepare(data, target, tmp_path / "other", "--temperature", 0.7, "--seed", 4))
    assert (
        PreparedRows.open(tmp_path / "other").info["rows_sha256"]
        != PreparedRows.open(tmp_path / "fresh").info["rows_sha256"]
    )


def test_prompts_without_room_and_rows_without_a_prompt_are_refused_before_decoding(
    tmp_path: Path, target: Path
) -> None:
    data = tmp_path / "d.jsonl"
    rows = [
        {"messages": [user("word " * 100)]},
        {"messages": [said("b")]},
        {"input_ids": [5] * 20, "loss_mask": [1] * 20},
        {"messages": [user("one two three four")]},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = prepare(data, target, tmp_path / "r", "--max-length", 60)
    assert isinstance(result.exception, DflashError)
    for words in ("3 of 4 rows", "prompt_fills_max_length", "no_prompt", "ready_row"):
        assert words in str(result.exception)
    assert not (tmp_path / "r").exists()
    ok(prepare(data, target, tmp_path / "r", "--max-length", 60, "--on-bad-row", "skip"))
    assert PreparedRows.open(tmp_path / "r").n_documents == 1


def test_an_answer_never_passes_max_length(tmp_path: Path, target: Path) -> None:
    data = data_file(tmp_path / "d.jsonl")
    ok(prepare(data, target, tmp_path / "r", "--max-length", 60, "--max-new-tokens", 500))
    rows = PreparedRows.open(tmp_path / "r")
    assert rows.lengths.max() <= 60
    assert rows.info["counts"].get("truncated", 0) == 0
