"""The documented queries on folders that the commands themselves wrote: rows, an 8-bit store, a training run."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from commands import workers_in_process
from tiny_target import save_target
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

import stage1_extract.extract as extract_module
from manifests.blocks import recorded_blocks
from manifests.commit import Ledger, files_of, read
from manifests.lines import line_of
from manifests.query import ask, named_queries
from manifests.records import EvaluationRecord, MetricRecord, ShardRecord
from shared.cli import cli
from shared.store import TeacherStore
from stage1_extract import worker

Rows = list[dict[str, Any]]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def conversation(number: int, words: int) -> dict[str, Any]:
    question, answer = " ".join(WORDS[:words]), " ".join(WORDS[words - 1 :])
    return {
        "id": f"c{number}",
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }


def run(*arguments: object) -> None:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared rows of two files, with repeated texts and two rows without an answer, and their store, as int8."""
    root = tmp_path_factory.mktemp("queries")
    silent = {"id": "silent", "messages": [{"role": "user", "content": "one two"}]}
    files = {
        "a.jsonl": [*(conversation(n, 1 + n) for n in range(6)), silent, silent | {"id": "mute"}],
        "b.jsonl": [*(conversation(n, 1 + n) for n in range(6, 10)), conversation(9, 10), conversation(11, 10)],
    }
    for name, rows in files.items():
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_target(root / "target", "qwen3")
    target = ("--target", root / "target")
    run(
        "prepare",
        root / "a.jsonl",
        root / "b.jsonl",
        *target,
        "--out",
        root / "runs/rows",
        "--heldout-rows",
        2,
        "--on-bad-row",
        "skip",
    )
    with pytest.MonkeyPatch.context() as patch:
        workers_in_process(patch, extract_module, worker)
        store = ("--data", root / "runs/rows", "--out", root / "runs/x.zarr", "--target-layer-ids", "0,2", "--topk", 8)
        sizes = ("--block-tokens", 150, "--batch-tokens", 200, "--shards", 2, "--device", "cpu")
        run("extract", *target, *store, *sizes, "--precision", "int8")
    return root


def rows_of(folder: Path, name: str) -> Rows:
    answer = ask([folder], f"SELECT * FROM {name}")
    return [dict(zip(answer.names, row, strict=True)) for row in answer.rows]


@pytest.fixture
def store(root: Path) -> Path:
    return root / "runs" / "x.zarr"


def test_every_named_query_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in named_queries() if f'"{name}"' not in text] == []


def test_progress(root: Path, store: Path) -> None:
    (row,) = rows_of(root, "progress")
    records = recorded_blocks(store)
    assert row["folder"] == str(store)
    assert row["blocks"] == row["planned_blocks"] == len(records) >= 2
    for name in ("documents", "tokens"):
        assert row[name] == sum(record[name] for record in records.values())
    assert row["gigabytes"] == round(sum(record["bytes"] for record in records.values()) / 1e9, 3)
    assert row["tokens_per_second"] > 0
    assert row["tokens_per_second_per_worker"] > 0
    last = max(record["time"] for record in records.values())
    assert row["last_block"].replace(tzinfo=UTC).timestamp() == pytest.approx(last, abs=0.01)


def test_stored_blocks(root: Path, store: Path) -> None:
    assert {row["block"]: row["seal"] for row in rows_of(root, "stored_blocks")} == {
        block: record["seal"] for block, record in recorded_blocks(store).items()
    }


def test_stored_documents(root: Path, store: Path) -> None:
    opened = TeacherStore(store, {block: record["seal"] for block, record in recorded_blocks(store).items()})
    prepared = [json.loads(line) for line in (root / "runs/rows/documents.jsonl").read_text().splitlines()]
    found = {row["document_index"]: row for row in rows_of(root, "stored_documents")}
    assert sorted(found) == sorted(ref.index for ref in opened.documents) == list(range(len(prepared)))
    for ref in opened.documents:
        row, line = found[ref.index], prepared[ref.index]
        assert (row["block"], row["split"], row["n_tokens"]) == (ref.block, ref.split, ref.length)
        assert row["n_supervised"] == ref.n_supervised
        assert {name: row[name] for name in ("doc_id", "source", "line", "truncated")} == {
            name: line[name] for name in ("doc_id", "source", "line", "truncated")
        }
        assert line["sha"].startswith(row["token_sha"])
        kept = opened.read_document(ref, ("topk_logits", "logsumexp"))
        logits = (kept["topk_logits"].astype(np.uint32) << 16).view(np.float32)
        mass = np.exp(logits - kept["logsumexp"][:, None]).sum(axis=1).mean()
        assert row["topk_mass"] == pytest.approx(float(mass), rel=1e-5)


def test_documents_by_source(root: Path) -> None:
    found = {(Path(row["source"]).name, row["split"]): row for row in rows_of(root, "documents_by_source")}
    documents = rows_of(root, "stored_documents")
    expected = Counter((Path(row["source"]).name, row["split"]) for row in documents)
    assert {key: row["documents"] for key, row in found.items()} == expected
    assert sum(row["tokens"] for row in found.values()) == sum(row["n_tokens"] for row in documents)
    assert sum(count for (_, split), count in expected.items() if split == "heldout") == 2


def test_skip_reasons(root: Path) -> None:
    rows = rows_of(root, "skip_reasons")
    assert sum(row["rows"] for row in rows) >= 2
    assert {Path(row["folder"]).name for row in rows} == {"rows"}
    silent = next(row for row in rows if row["rows"] == 2)
    assert silent["example"].endswith("a.jsonl:7")


def test_skips_said_again_by_a_rerun_count_once(root: Path, tmp_path: Path) -> None:
    for path in files_of(root / "runs/rows", "skips"):
        for name in ("first", "again"):
            target = tmp_path / "rows" / "manifest" / f"skips.{name}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    counted = [(row["reason"], row["rows"]) for row in rows_of(tmp_path, "skip_reasons")]
    assert counted == [(row["reason"], row["rows"]) for row in rows_of(root, "skip_reasons")]


def test_duplicates(root: Path) -> None:
    documents = rows_of(root, "stored_documents")
    for same, column in (("doc_id", "doc_id"), ("tokens", "token_sha")):
        groups: dict[str, list[int]] = {}
        for row in documents:
            groups.setdefault(row[column], []).append(row["document_index"])
        expected = {value: sorted(rows) for value, rows in groups.items() if len(rows) > 1}
        found = {row["value"]: row["rows"] for row in rows_of(root, "duplicates") if row["same"] == same}
        assert found == expected
    assert any(row["same"] == "tokens" and row["times"] >= 2 for row in rows_of(root, "duplicates"))


def test_topk_mass(root: Path) -> None:
    documents = rows_of(root, "stored_documents")
    for row in rows_of(root, "topk_mass"):
        mine = [each for each in documents if each["source"] == row["source"]]
        tokens = sum(each["n_tokens"] for each in mine)
        mean = sum(each["topk_mass"] * each["n_tokens"] for each in mine) / tokens
        assert row["topk_mass"] == pytest.approx(mean, abs=1e-4)
        assert row["lowest"] == pytest.approx(min(each["topk_mass"] for each in mine), abs=1e-4)
        assert 0 < row["lowest"] <= row["lowest_percent"] <= row["topk_mass"] < 1
    assert len(rows_of(root, "topk_mass")) == 2


def test_relative_error(root: Path, store: Path) -> None:
    records = list(recorded_blocks(store).values())
    tokens = sum(record["tokens"] for record in records)
    rows = rows_of(root, "relative_error")
    assert [row["tap"] for row in rows] == list(records[0]["detail"]["relative_error"])
    assert {"0", "2"} <= {row["tap"] for row in rows}
    for row in rows:
        errors = [record["detail"]["relative_error"][row["tap"]] for record in records]
        mean = sum(e * record["tokens"] for e, record in zip(errors, records, strict=True)) / tokens
        assert row["relative_error"] == pytest.approx(mean, abs=1e-5)
        assert row["worst_block"] == pytest.approx(max(errors), abs=1e-5)
        assert 0 < row["relative_error"] < 0.05


def test_relative_error_has_no_row_for_a_store_that_is_not_quantised(tmp_path: Path) -> None:
    make_store(tmp_path / "x.zarr", counting_texts(4))
    assert rows_of(tmp_path, "relative_error") == []
    assert len(rows_of(tmp_path, "progress")) == 1


def test_run_states(root: Path) -> None:
    states = {(Path(row["folder"]).name, row["command"]): row["state"] for row in rows_of(root, "run_states")}
    assert states == {("rows", "prepare"): "finished", ("x.zarr", "extract"): "finished"}


def test_loss_curve_of_a_real_run_and_after_a_resume(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(12))
    run_here(config_of(store, tmp_path / "run", steps=3))
    rows = rows_of(tmp_path, "loss_curve")
    assert [row["global_step"] for row in rows] == [1, 2, 3]
    losses = {r["global_step"]: r["value"] for r in read(tmp_path / "run", "metrics") if r["name"] == "loss"}
    assert {row["global_step"]: row["loss"] for row in rows}.items() <= losses.items()
    Ledger(tmp_path / "run", "later").append(
        MetricRecord(run_id="b", global_step=2, split="train", name="loss", value=9.0)
    )
    assert [row["loss"] for row in rows_of(tmp_path, "loss_curve")][1] == 9.0


def test_acceptance_shows_the_newest_of_each_name_and_step(tmp_path: Path) -> None:
    for step, value in ((10, 1.0), (10, 3.0), (20, 4.0)):
        Ledger(tmp_path, f"eval-{value}").append(
            EvaluationRecord(
                run_id="a",
                name="gsm8k",
                global_step=step,
                prompts=4,
                acceptance_length=value,
                acceptance_length_low=value - 0.5,
                acceptance_length_high=value + 0.5,
                tokens_per_second=20.0,
                plain_tokens_per_second=10.0,
                mismatches=0,
                ties=0,
                path="e.json",
            )
        )
    rows = rows_of(tmp_path, "acceptance")
    assert [(row["global_step"], row["acceptance_length"], row["speedup"]) for row in rows] == [
        (10, 3.0, 2.0),
        (20, 4.0, 2.0),
    ]


def by_index(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: int(row["document_index"]))


def copy_manifest(store: Path, out: Path) -> Path:
    (out / "manifest").mkdir(parents=True)
    for path in (store / "manifest").iterdir():
        (out / "manifest" / path.name).write_bytes(path.read_bytes())
    return out


def withdraw(store: Path, block: int, state: str) -> dict[str, Any]:
    record = recorded_blocks(store)[block] if state == "withdrawn" else read(store, "shards")[-1]
    kept = {name: record[name] for name in ("rank", "documents", "tokens", "bytes", "seconds", "seal")}
    detail = {"reason": "chunk 3 flipped"} if state == "withdrawn" else {}
    Ledger(store, "verify").append(ShardRecord(block=block, state=state, detail=detail, **kept))
    return record


def test_withdrawn_blocks_and_their_documents_do_not_count(root: Path, store: Path, tmp_path: Path) -> None:
    copy = copy_manifest(store, tmp_path / "x.zarr")
    whole = rows_of(tmp_path, "stored_documents")
    record = withdraw(copy, 1, "withdrawn")
    ((row),) = rows_of(tmp_path, "withdrawn_blocks")
    assert (row["block"], row["writer"], row["reason"], row["made_again"]) == (1, "verify", "chunk 3 flipped", False)
    left = rows_of(tmp_path, "stored_documents")
    assert len(whole) - len(left) == record["documents"] > 0
    assert {each["block"] for each in left} == {each["block"] for each in whole} - {1}
    (progress,) = rows_of(tmp_path, "progress")
    assert progress["tokens"] == sum(each["n_tokens"] for each in left)
    withdraw(copy, 1, "done")
    assert [row["made_again"] for row in rows_of(tmp_path, "withdrawn_blocks")] == [True]
    assert by_index(rows_of(tmp_path, "stored_documents")) == by_index(whole)
    assert rows_of(root, "withdrawn_blocks") == []


def test_documents_written_before_a_crash_and_again_after_it_are_not_doubled(store: Path, tmp_path: Path) -> None:
    copy = copy_manifest(store, tmp_path / "x.zarr")
    whole = rows_of(tmp_path, "stored_documents")
    path = files_of(copy, "documents")[0]
    lines = path.read_bytes().splitlines(keepends=True)
    # A worker died in the middle of its documents; the block was made again, by another worker.
    (path.parent / "documents.before-the-crash.jsonl").write_bytes(b"".join(lines)[:-20])
    assert len(rows_of(tmp_path, "stored_documents")) == len(whole)
    assert sum(row["documents"] for row in rows_of(tmp_path, "documents_by_source")) == len(whole)
    # A first attempt with another content (a document that was skipped since) has another seal.
    stale = [json.loads(line) | {"seal": "f" * 32, "document_index": 999} for line in lines[:2]]
    stale_lines = b"".join(line_of({k: v for k, v in record.items() if k != "crc"}) for record in stale)
    (path.parent / "documents.stale.jsonl").write_bytes(stale_lines)
    assert len(rows_of(tmp_path, "documents")) > len(whole)
    assert len(rows_of(tmp_path, "stored_documents")) == len(whole)
