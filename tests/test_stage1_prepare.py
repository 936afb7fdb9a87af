"""`dflash prepare`: every row ends up as a document or under a named reason, and refusing writes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from commands import fault
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_target import ALTERNATING, THINKING, make_tokenizer, save_target

from manifests.commit import read
from shared.cli import cli
from shared.rows import PreparedRows
from stage1_extract.collect import collect, heldout_ids

LONG = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


def chat(text: str = LONG, answer: str = LONG, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def prepare(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["prepare", *(str(argument) for argument in arguments)])


def test_rows_in_are_documents_plus_skips_plus_duplicates(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"{LONG} {i}", id=i) for i in range(8)]
    data = write(
        tmp_path / "d.jsonl",
        [
            *rows,
            rows[3],
            "{broken",
            {"messages": [{"role": "wizard", "content": "x"}]},
            {"messages": [{"role": "user", "content": LONG}]},
        ],
    )
    result = prepare(data, "--target", target, "--out", tmp_path / "r", "--on-bad-row", "skip")
    assert result.exit_code == 0, result.output
    info = PreparedRows.open(tmp_path / "r", verify=True).info
    assert info["skipped"] == {"broken_line": 1, "unknown_role:wizard": 1, "no_assistant_turn": 1}
    assert (
        info["counts"]["rows"] == info["documents"] + sum(info["skipped"].values()) + info["counts"]["duplicates"] == 12
    )
    skips = read(tmp_path / "r", "skips")
    assert sorted((skip["reason"], skip["line"]) for skip in skips) == [
        ("broken_line", 10),
        ("duplicate", 9),
        ("no_assistant_turn", 12),
        ("unknown_role:wizard", 11),
    ]
    assert "skipped: unknown_role:wizard" in result.output


def test_refusing_reads_everything_counts_by_reason_and_writes_nothing(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "d.jsonl", [chat(), {"messages": []}, "{broken", {"messages": []}])
    error = fault(prepare(data, "--target", target, "--out", tmp_path / "r"))
    assert error.exit_code == 16
    for words in ("3 of 4 rows", "2 no_messages", "1 broken_line", f"{data}:2", "--on-bad-row skip"):
        assert words in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl"]


READY = {"input_ids": list(range(5, 25)), "loss_mask": [0] * 10 + [1] * 10}
BAD: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "missing file": (lambda p: p / "none.jsonl", 10, "does not exist"),
    "empty file": (lambda p: write(p / "d.jsonl", []), 11, "holds no row"),
    "broken line": (lambda p: write(p / "d.jsonl", [chat(), '{"messages": ']), 12, "d.jsonl:2"),
    "no assistant turn": (
        lambda p: write(p / "d.jsonl", [{"messages": [{"role": "user", "content": LONG}]}]),
        13,
        "--regenerate",
    ),
    "all masked": (lambda p: write(p / "d.jsonl", [READY | {"loss_mask": [0] * 20}]), 14, "none of its 20 tokens"),
    "answer cut away": (
        lambda p: write(p / "d.jsonl", [READY | {"input_ids": [5] * 200, "loss_mask": [0] * 150 + [1] * 50}]),
        14,
        "number 150",
    ),
    "only the first token": (
        lambda p: write(p / "d.jsonl", [READY | {"loss_mask": [1] + [0] * 19}]),
        14,
        "only the first",
    ),
    "short row": (lambda p: write(p / "d.jsonl", [{"input_ids": [5] * 15, "loss_mask": [1] * 15}]), 15, "15 tokens"),
    "ids out of range": (lambda p: write(p / "d.jsonl", [READY | {"input_ids": [320] * 20}]), 16, "token id 320"),
    "unknown role": (
        lambda p: write(p / "d.jsonl", [{"messages": [{"role": "my_model", "content": "x"}]}]),
        16,
        "my_model",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_has_its_exit_code_one_line_and_leaves_nothing(tmp_path: Path, target: Path, name: str) -> None:
    make, code, words = BAD[name]
    error = fault(prepare(make(tmp_path), "--target", target, "--out", tmp_path / "r", "--max-length", "100"))
    assert (error.exit_code, words in str(error)) == (code, True), str(error)
    assert not (tmp_path / "r").exists()


def test_everything_skipped_is_a_failure_not_an_empty_folder(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "d.jsonl", ["{broken", {"messages": []}])
    error = fault(prepare(data, "--target", target, "--out", tmp_path / "r", "--on-bad-row", "skip"))
    assert error.exit_code == 17
    assert "1 broken_line" in str(error)
    assert not (tmp_path / "r").exists()


def test_a_target_without_template_is_refused_for_messages_and_taken_for_ready_rows(tmp_path: Path) -> None:
    bare = save_target(tmp_path / "bare", template=None)
    error = fault(prepare(write(tmp_path / "m.jsonl", [chat()]), "--target", bare, "--out", tmp_path / "r"))
    assert error.exit_code == 21
    assert prepare(write(tmp_path / "i.jsonl", [READY]), "--target", bare, "--out", tmp_path / "r").exit_code == 0
    ids, mask = PreparedRows.open(tmp_path / "r").document(0)
    assert (ids.tolist(), mask.tolist()) == (READY["input_ids"], READY["loss_mask"])


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_path_that_cannot_be_a_folder_is_refused_first(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" if where == "a file" else tmp_path / "file" / "rows"
    error = fault(prepare(write(tmp_path / "d.jsonl", [chat()]), "--target", tmp_path / "nowhere", "--out", out))
    assert error.exit_code == 40


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-length", 8),
        ("--block-size", 1),
        ("--heldout", 1.0),
        ("--heldout-rows", -1),
        ("--max-rows", 0),
        ("--temperature", -1),
        ("--chat-template-kwargs", "{"),
        ("--chat-template-kwargs", "[]"),
        ("--max-new-tokens", 0),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, target: Path, option: str, value: object) -> None:
    data = write(tmp_path / "d.jsonl", [chat()])
    assert fault(prepare(data, "--target", target, "--out", tmp_path / "r", option, value)).exit_code == 43


def test_more_heldout_rows_than_can_be_are_said(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "d.jsonl", [chat(str(i)) for i in range(3)])
    done = prepare(data, "--target", target, "--out", tmp_path / "r", "--heldout-rows", 3)
    assert done.exit_code == 0, done.output
    assert "--heldout-rows 3: held out 2, one conversation stays for training" in done.output
    assert PreparedRows.open(tmp_path / "r").splits.count("heldout") == 2
    quiet = prepare(data, "--target", target, "--out", tmp_path / "q", "--heldout-rows", 2)
    assert "--heldout-rows" not in quiet.output


def test_block_size_is_the_border_of_too_short(tmp_path: Path, target: Path) -> None:
    rows = [{"input_ids": [5] * n, "loss_mask": [0] + [1] * (n - 1)} for n in (15, 16, 17)]
    data = write(tmp_path / "d.jsonl", rows)
    assert prepare(data, "--target", target, "--out", tmp_path / "r", "--on-bad-row", "skip").exit_code == 0
    opened = PreparedRows.open(tmp_path / "r")
    assert opened.lengths.tolist() == [16, 17]
    assert opened.info["skipped"] == {"row_too_short": 1}


@pytest.mark.parametrize(("max_length", "kept"), [(60, 60), (40, None), (500, None)])
def test_truncation_cuts_ids_and_mask_alike_and_is_counted(
    tmp_path: Path, target: Path, max_length: int, kept: int | None
) -> None:
    data = write(tmp_path / "d.jsonl", [chat(f"{LONG}{i}") for i in range(10)])
    prompt = len(
        make_tokenizer().apply_chat_template(chat(f"{LONG}0")["messages"][:1], add_generation_prompt=True)["input_ids"]
    )
    result = prepare(data, "--target", target, "--out", tmp_path / "r", "--max-length", max_length)
    if max_length <= prompt:
        assert fault(result).exit_code == 14
        return
    opened = PreparedRows.open(tmp_path / "r")
    assert opened.info["counts"].get("truncated", 0) == (10 if kept else 0)
    for i in range(10):
        ids, mask = opened.document(i)
        assert len(ids) == len(mask) <= max_length
        assert mask[:prompt].sum() == 0
        assert mask[prompt] == 1
        assert opened.documents[i]["truncated"] is bool(kept)


def test_truncation_ignores_the_tokenizers_own_side(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "left")
    tokenizer = make_tokenizer()
    tokenizer.truncation_side = "left"
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(folder)
    data = write(tmp_path / "d.jsonl", [chat()])
    assert prepare(data, "--target", folder, "--out", tmp_path / "r", "--max-length", 70).exit_code == 0
    ids, mask = PreparedRows.open(tmp_path / "r").document(0)
    assert tokenizer.decode(ids).startswith("<|im_start|>user\none two")
    assert (len(ids), mask[0], mask[-1]) == (70, 0, 1)


def test_the_second_run_says_done_and_another_setting_is_named_with_both_values(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "d.jsonl", [chat(f"{LONG}{i}") for i in range(4)])
    assert prepare(data, "--target", target, "--out", tmp_path / "r").exit_code == 0
    before = (tmp_path / "r" / "input_ids.npy").stat().st_mtime_ns
    again = prepare(data, "--target", target, "--out", tmp_path / "r")
    assert again.exit_code == 0
    assert "already prepared" in again.output
    assert (tmp_path / "r" / "input_ids.npy").stat().st_mtime_ns == before
    error = fault(prepare(data, "--target", target, "--out", tmp_path / "r", "--max-length", 100))
    assert error.exit_code == 30
    assert "max_length = 2048" in str(error)
    assert "asks 100" in str(error)
    write(data, [chat()])
    assert "data_sha256" in str(fault(prepare(data, "--target", target, "--out", tmp_path / "r")))


def test_another_template_is_another_identity(tmp_path: Path, target: Path) -> None:
    data = write(tmp_path / "d.jsonl", [chat()])
    assert prepare(data, "--target", target, "--out", tmp_path / "r").exit_code == 0
    other = save_target(tmp_path / "other", template=THINKING)
    assert "chat_template_sha256" in str(fault(prepare(data, "--target", other, "--out", tmp_path / "r")))


def test_the_same_id_with_other_content_is_kept_under_another_id(tmp_path: Path, target: Path) -> None:
    data = write(
        tmp_path / "d.jsonl",
        [chat("a " + LONG, id="x"), chat("b " + LONG, id="x"), chat("a " + LONG, id="x"), chat("c " + LONG)],
    )
    result = prepare(data, "--target", target, "--out", tmp_path / "r")
    assert "same id, other content (kept)  1" in result.output
    opened = PreparedRows.open(tmp_path / "r")
    ids = [line["doc_id"] for line in opened.documents]
    assert len(set(ids)) == 3
    assert ids[0] == "x"
    assert ids[1].startswith("x@")
    assert opened.info["counts"]["duplicates"] == 1


def test_the_order_of_rows_and_files_changes_no_split_and_no_draw(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"{LONG}{i}") for i in range(40)]
    chosen = []
    for name, order in (("a", rows), ("b", random.Random(1).sample(rows, len(rows)))):
        data = [write(tmp_path / f"{name}{k}.jsonl", order[k * 20 : k * 20 + 20]) for k in range(2)]
        assert (
            prepare(*data, "--target", target, "--out", tmp_path / name, "--max-rows", 20, "--heldout", 0.25).exit_code
            == 0
        )
        opened = PreparedRows.open(tmp_path / name)
        assert {Path(line["source"]).name for line in opened.documents} == {f"{name}0.jsonl", f"{name}1.jsonl"}
        chosen.append({(line["doc_id"], line["split"]) for line in opened.documents})
    assert chosen[0] == chosen[1]
    assert sum(split == "heldout" for _, split in chosen[0]) == 5


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9, 0.99]), st.integers(0, 5))
def test_heldout_is_one_count_and_never_everything(n: int, fraction: float, seed: int) -> None:
    ids = [f"doc-{i}" for i in range(n)]
    held = heldout_ids(ids, fraction, None, seed)
    assert held == heldout_ids(list(reversed(ids)), fraction, None, seed)
    assert len(held) == (0 if fraction == 0 else min(n - 1, max(1, round(fraction * n))))
    assert held < set(ids)
    assert len(heldout_ids(ids, fraction, n + 5, seed)) == n - 1


def test_turns_of_one_conversation_stay_on_one_side(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "thinking", template=THINKING)
    turns = [
        m
        for i in range(3)
        for m in ({"role": "user", "content": LONG}, {"role": "assistant", "content": f"<think>{i}</think>\n{LONG}"})
    ]
    data = write(
        tmp_path / "d.jsonl",
        [{"id": i, "messages": [{"role": "user", "content": f"{i}"}, *turns[1:]]} for i in range(6)],
    )
    result = prepare(data, "--target", folder, "--out", tmp_path / "r", "--heldout", 0.5)
    assert "taken apart, one row per turn  6" in result.output
    opened = PreparedRows.open(tmp_path / "r")
    assert opened.n_documents == 18
    sides: dict[str, set[str]] = {}
    for line in opened.documents:
        sides.setdefault(line["detail"]["conversation"], set()).add(line["split"])
    assert all(len(side) == 1 for side in sides.values())
    assert sorted(side.pop() for side in sides.values()) == ["heldout"] * 3 + ["train"] * 3


def test_one_conversation_the_template_rejects_costs_one_row(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "strict", template=ALTERNATING)
    bad = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": LONG},
        ]
    }
    data = write(tmp_path / "d.jsonl", [*(chat(f"{LONG}{i}") for i in range(9)), bad])
    assert prepare(data, "--target", folder, "--out", tmp_path / "r", "--on-bad-row", "skip").exit_code == 0
    info = PreparedRows.open(tmp_path / "r").info
    assert (info["documents"], info["skipped"]) == (9, {"template_refused": 1})


def test_tool_results_are_context_and_never_supervised(tmp_path: Path, target: Path) -> None:
    turns = [
        {"role": "user", "content": "use the tool"},
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "RESULT 42"},
        {"role": "assistant", "content": "it says 42"},
    ]
    assert (
        prepare(
            write(tmp_path / "d.jsonl", [{"messages": turns}]), "--target", target, "--out", tmp_path / "r"
        ).exit_code
        == 0
    )
    ids, mask = PreparedRows.open(tmp_path / "r").document(0)
    tokenizer = make_tokenizer()
    assert "RESULT 42" in tokenizer.decode(ids)
    assert tokenizer.decode(ids[mask == 1]) == "calling<|im_end|>it says 42<|im_end|>"


def test_a_killed_run_leaves_nothing_that_counts_as_finished(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shared.rows

    data = write(tmp_path / "d.jsonl", [chat()])
    real = shared.rows.write_json

    def full(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared.rows, "write_json", full)
    assert prepare(data, "--target", target, "--out", tmp_path / "r").exit_code != 0
    assert not (tmp_path / "r" / "prepare.json").exists()
    assert read(tmp_path / "r", "runs")[-1]["state"] == "interrupted"
    monkeypatch.setattr(shared.rows, "write_json", real)
    assert prepare(data, "--target", target, "--out", tmp_path / "r").exit_code == 0


def test_collect_counts_what_it_saw(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [chat(id="a"), chat(id="a"), chat("b", id="b"), "{"])
    found = collect([data], None, 0)
    assert [named.doc_id for named in found.used] == ["a", "b"]
    assert (found.counts["rows"], found.counts["duplicates"], len(found.faults)) == (4, 1, 1)
