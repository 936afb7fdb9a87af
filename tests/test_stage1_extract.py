"""A store holds what the target alone gives for each document, whoever made it and however often it was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from commands import fault, workers_in_process
from tiny_target import save_target

import stage1_extract.extract as extract_module
from manifests.blocks import open_store as open_blocks
from manifests.commit import read
from manifests.launch import LaunchSpec
from manifests.runs import Recording
from shared.cli import cli
from shared.errors import (
    ConfigRefused,
    NonFinite,
    StoreDamaged,
    StoreMismatch,
    TargetNotFound,
    TargetUnsupported,
    WorkerKilled,
)
from shared.rows import PreparedRows
from shared.store import TeacherStore
from shared.store_layout import block_name
from shared.target import Target, load_target
from stage1_extract import worker
from stage1_extract.plan import done_blocks, load_plan
from stage1_extract.teacher import Teacher

TAPS = (0, 2)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of three families with rows of ten documents of different lengths prepared for each."""
    root = tmp_path_factory.mktemp("extract")
    rows = [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": " ".join(WORDS[: 1 + i])},
                {"role": "assistant", "content": " ".join(WORDS[i:])},
            ],
        }
        for i in range(10)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("llama", "qwen3", "qwen3_5"):
        save_target(root / kind, kind)
        done = CliRunner().invoke(
            cli,
            [
                "prepare",
                str(root / "data.jsonl"),
                "--target",
                str(root / kind),
                "--out",
                str(root / f"rows-{kind}"),
                "--heldout-rows",
                "2",
            ],
        )
        assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the real worker function rank by rank in this process; the processes themselves are tested below."""

    workers_in_process(monkeypatch, extract_module, worker)


def extract(root: Path, out: Path, *more: object, kind: str = "qwen3") -> Result:
    arguments = [
        "extract",
        "--target",
        root / kind,
        "--data",
        root / f"rows-{kind}",
        "--out",
        out,
        "--target-layer-ids",
        "0,2",
        "--topk",
        8,
        "--block-tokens",
        150,
        "--batch-tokens",
        200,
        "--device",
        "cpu",
        *more,
    ]
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def ok(result: Result) -> Result:
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def words(result: Result) -> str:
    return " ".join(result.output.split())


def bf16(bits: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def open_store(store: Path) -> TeacherStore:
    return open_blocks(store, partial=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_every_document_is_what_the_target_gives_for_it_alone(
    tmp_path: Path, root: Path, in_process: None, kind: str
) -> None:
    result = ok(extract(root, tmp_path / "x.zarr", kind=kind))
    assert "documents 10 of 10" in words(result)
    rows, store = PreparedRows.open(root / f"rows-{kind}"), open_store(tmp_path / "x.zarr")
    target = load_target(str(root / kind), device="cpu", dtype="float32")
    assert sorted(ref.index for ref in store.documents) == list(range(10))
    assert [ref.split for ref in sorted(store.documents, key=lambda ref: ref.index)] == rows.splits
    names = ("input_ids", "loss_mask", "hidden_states", "last_hidden_state", "topk_ids", "topk_logits", "logsumexp")
    for ref in store.documents:
        stored = store.read_document(ref, names)
        ids, mask = rows.document(ref.index)
        assert np.array_equal(stored["input_ids"], ids)
        assert np.array_equal(stored["loss_mask"], mask)
        with torch.inference_mode():
            states = target.model(torch.from_numpy(ids).long()[None], output_hidden_states=True, use_cache=False)
        for tap, layer_id in enumerate(TAPS):
            torch.testing.assert_close(
                bf16(stored["hidden_states"])[:, tap].float(),
                states.hidden_states[layer_id + 1][0],
                atol=0.05,
                rtol=0.02,
            )
        torch.testing.assert_close(
            bf16(stored["last_hidden_state"]).float(), states.hidden_states[-1][0], atol=0.05, rtol=0.02
        )
        logits = states.logits[0]
        torch.testing.assert_close(
            torch.from_numpy(stored["logsumexp"]), torch.logsumexp(logits, -1), atol=1e-4, rtol=1e-4
        )
        top = logits.topk(8)
        torch.testing.assert_close(bf16(stored["topk_logits"]).float(), top.values, atol=0.1, rtol=0.01)
        assert (torch.from_numpy(stored["topk_ids"]) == top.indices).float().mean() > 0.99


def test_the_teacher_is_exact_in_float32_for_a_batch_with_a_shared_prefix(root: Path) -> None:
    target = load_target(str(root / "qwen3"), device="cpu", dtype="float32")
    prefix = np.arange(5, 69, dtype=np.int32)
    documents = [np.concatenate([prefix, np.array(tail, np.int32)]) for tail in ([7], [8, 9, 10, 11, 12], [7, 7])] + [
        prefix[:3]
    ]
    teacher = Teacher(target, TAPS, 8)
    teacher._rows = 7  # several chunks of positions
    batch = teacher(documents)
    start = 0
    for document in documents:
        alone, where = teacher([document]), slice(start, start + len(document))
        start += len(document)
        assert torch.equal(batch.topk_ids[where], alone.topk_ids)
        torch.testing.assert_close(batch.logsumexp[where], alone.logsumexp, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            batch.hidden_states[where].float(), alone.hidden_states.float(), atol=1e-5, rtol=0.01
        )
    assert start == len(batch.logsumexp)


def files_of(store: Path) -> dict[str, bytes]:
    """Everything that two stores made by the same command agree on: all bytes but the store's own random name."""
    kept = [path for part in ("blocks", "target") for path in sorted((store / part).rglob("*")) if path.is_file()]
    identity = json.loads((store / "store.json").read_text())
    same = {key: value for key, value in identity.items() if key not in ("store_uuid", "crc32c")}
    found = {str(path.relative_to(store)): path.read_bytes() for path in [*kept, store / "plan.json"]}
    return found | {"store.json": json.dumps(same).encode()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_one_and_three_shards_give_the_same_bytes(tmp_path: Path, root: Path, in_process: None, kind: str) -> None:
    ok(extract(root, tmp_path / "one", kind=kind))
    ok(extract(root, tmp_path / "three", "--shards", 3, kind=kind))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "three")
    assert {record["rank"] for record in done_blocks(tmp_path / "three").values()} == {0, 1, 2}


def test_only_what_is_missing_is_made_again(tmp_path: Path, root: Path, in_process: None) -> None:
    store = tmp_path / "x"
    ok(extract(root, store))
    before, plan = files_of(store), load_plan(store)
    assert plan is not None
    assert plan.num_blocks > 3
    shutil.rmtree(store / block_name(2))
    kept = {path: path.stat().st_mtime_ns for path in (store / "blocks").rglob("*") if path.is_file()}
    ok(extract(root, store, "--shards", 2))
    assert files_of(store) == before
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())
    assert [record["block"] for record in read(store, "shards")].count(2) == 2
    assert len(read(store, "shards")) == plan.num_blocks + 1
    assert "nothing to do" in ok(extract(root, store)).output


def test_a_block_without_its_record_is_not_done(tmp_path: Path, root: Path, in_process: None) -> None:
    store = tmp_path / "x"
    ok(extract(root, store))
    before = files_of(store)
    ledger = next((store / "manifest").glob("shards.*.jsonl"))
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed between the rename and the record: a torn line
    (store / "blocks" / ".000009.dead.partial").mkdir()
    ok(extract(root, store))
    assert files_of(store) == before
    assert not list((store / "blocks").glob(".*"))


CHANGED: dict[str, tuple[list[object], str]] = {
    "layers": (["--target-layer-ids", "0,1"], "target_layer_ids = [0, 2]"),
    "topk": (["--topk", 4], "topk = 8"),
    "dtype": (["--dtype", "bfloat16"], "dtype = 'float32'"),
    "mask token": (["--mask-token-id", 310], "mask_token_id = 300"),
    "last hidden": (["--last-hidden", "none"], "last_hidden = 'bfloat16'"),
    "precision": (["--precision", "int8"], "precision = 'bfloat16'"),
    "block tokens": (["--block-tokens", 99], "block_tokens = 150"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_store_of_other_settings_is_refused_naming_both_values(
    tmp_path: Path, root: Path, in_process: None, name: str
) -> None:
    shutil.copytree(root / "qwen3", tmp_path / "target")
    ok(extract(root, tmp_path / "x", "--shards", 1))
    before = files_of(tmp_path / "x")
    more, words = CHANGED[name]
    error = fault(extract(root, tmp_path / "x", *more))
    assert (error.exit_code, words in str(error)) == (30, True), str(error)
    assert files_of(tmp_path / "x") == before


def test_another_target_or_other_rows_are_refused(tmp_path: Path, root: Path, in_process: None) -> None:
    ok(extract(root, tmp_path / "x"))
    other = save_target(tmp_path / "other", seed=5)
    result = CliRunner().invoke(
        cli,
        [
            "extract",
            "--target",
            str(other),
            "--data",
            str(root / "rows-qwen3"),
            "--out",
            str(tmp_path / "x"),
            "--target-layer-ids",
            "0,2",
            "--topk",
            "8",
            "--block-tokens",
            "150",
            "--device",
            "cpu",
        ],
    )
    assert "target.weights_sha256" in str(fault(result))
    foreign = save_target(tmp_path / "foreign", template="{{ messages[0]['content'] }}")
    result = CliRunner().invoke(
        cli, ["extract", "--target", str(foreign), "--data", str(root / "rows-qwen3"), "--out", str(tmp_path / "y")]
    )
    assert fault(result).exit_code == 30
    assert "chat_template_sha256" in str(fault(result))
    assert not (tmp_path / "y").exists()


def test_a_renamed_folder_is_the_same_target(tmp_path: Path, root: Path, in_process: None) -> None:
    ok(extract(root, tmp_path / "x"))
    moved = shutil.copytree(root / "qwen3", tmp_path / "moved")
    result = CliRunner().invoke(
        cli,
        [
            "extract",
            "--target",
            str(moved),
            "--data",
            str(root / "rows-qwen3"),
            "--out",
            str(tmp_path / "x"),
            "--target-layer-ids",
            "0,2",
            "--topk",
            "8",
            "--block-tokens",
            "150",
            "--device",
            "cpu",
        ],
    )
    assert "nothing to do" in ok(result).output


REFUSED: dict[str, tuple[list[object], int, str]] = {
    "layer N": (["--target-layer-ids", "1,4"], 22, "0..2"),
    "layer -1": (["--target-layer-ids", "-1"], 22, "0..2"),
    "repeated layer": (["--target-layer-ids", "1,1"], 22, "without repeats"),
    "unsorted layers": (["--target-layer-ids", "2,1"], 22, "ascending"),
    "mask out of range": (["--mask-token-id", 320], 24, "0..319"),
    "mask negative": (["--mask-token-id", -1], 24, "0..319"),
    "mask is eos": (["--mask-token-id", 2], 25, "eos"),
    "mask is bos": (["--mask-token-id", 1], 25, "bos"),
    "mask in rows": (["--mask-token-id", 203], 25, "times in the prepared rows"),
    "too many shards": (["--shards", 11], 42, "10 rows"),
    "no shards": (["--shards", 0], 43, "shards 0"),
    "topk beyond vocabulary": (["--topk", 321], 43, "320"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path: Path, root: Path, name: str) -> None:
    more, code, words = REFUSED[name]
    error = fault(extract(root, tmp_path / "x", *more))
    assert (error.exit_code, words in str(error)) == (code, True), str(error)
    assert not (tmp_path / "x").exists()


def test_paths_that_are_wrong_are_refused_first(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert fault(extract(root, tmp_path / "file" / "x")).exit_code == 40
    result = CliRunner().invoke(
        cli,
        ["extract", "--target", str(root / "qwen3"), "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")],
    )
    assert fault(result).exit_code == 31
    result = CliRunner().invoke(
        cli,
        [
            "extract",
            "--target",
            str(tmp_path / "none"),
            "--data",
            str(root / "rows-qwen3"),
            "--out",
            str(tmp_path / "x"),
        ],
    )
    assert fault(result).exit_code == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_document_with_bad_features_is_left_out_with_a_record(
    tmp_path: Path, root: Path, in_process: None, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    poisoned = PreparedRows.open(root / "rows-qwen3").document(4)[0]
    monkeypatch.setattr(
        worker, "load_target", _loader_with(lambda ids, out: torch.where(_rows_equal(ids, poisoned), value, out))
    )
    result = ok(extract(root, tmp_path / "x"))
    assert "skipped: nonfinite 1" in words(result)
    assert sorted(ref.index for ref in open_store(tmp_path / "x").documents) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    (skip,) = read(tmp_path / "x", "skips")
    assert (skip["doc_id"], skip["reason"]) == ("4", "nonfinite")


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "every document of block 0"), (0.0, "all zero")])
def test_a_target_that_gives_nothing_usable_ends_the_run(
    tmp_path: Path, root: Path, in_process: None, monkeypatch: pytest.MonkeyPatch, value: float, words: str
) -> None:
    monkeypatch.setattr(worker, "load_target", _loader_with(lambda _ids, out: torch.full_like(out, value)))
    error = fault(extract(root, tmp_path / "x"))
    assert isinstance(error, NonFinite)
    assert words in str(error)
    assert done_blocks(tmp_path / "x") == {}


def test_batch_rows_that_are_mixed_up_are_noticed_after_the_first_block(
    tmp_path: Path, root: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "load_target", _loader_with(lambda _ids, out: out.roll(1, 0)))
    error = fault(extract(root, tmp_path / "x"))
    assert isinstance(error, StoreDamaged)
    assert "features of layer 0" in str(error)


def _rows_equal(ids: torch.Tensor, document: np.ndarray[Any, Any]) -> torch.Tensor:
    padded = torch.zeros(ids.shape[1], dtype=torch.long)
    padded[: min(len(document), ids.shape[1])] = torch.from_numpy(document[: ids.shape[1]].astype(np.int64))
    return (ids == padded).all(-1)[:, None, None]


def _loader_with(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Target]:
    """A loader whose model's first layer output is changed, given the batch's ids: a target with one wrong kernel."""

    def load(target: str, **options: Any) -> Target:
        loaded = load_target(target, **options)
        seen: list[torch.Tensor] = []
        loaded.decoder.register_forward_pre_hook(
            lambda _m, _a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
        )
        loaded.layers[0].register_forward_hook(lambda _m, _a, out: change(seen[-1], out))
        return loaded

    return load


def test_the_store_takes_what_stage_2_needs(tmp_path: Path, root: Path, in_process: None) -> None:
    from transformers import AutoConfig, AutoTokenizer

    ok(extract(root, tmp_path / "x"))
    store, target = open_store(tmp_path / "x"), load_target(str(root / "qwen3"), device="cpu", dtype="float32")
    head = store.load_head()
    assert torch.equal(head["embed_tokens"], target.embed_tokens_weight)
    assert torch.equal(head["lm_head"], target.lm_head_weight)
    assert torch.equal(head["norm"], target.norm_weight)
    assert AutoConfig.from_pretrained(store.target_dir).num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(store.target_dir).chat_template == target.tokenizer.chat_template
    identity = store.identity
    assert (identity["mask_token_id"], identity["target_layer_ids"], identity["vocab_size"]) == (300, [0, 2], 320)


KILLED_AFTER_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from stage1_extract import block_writer, worker

real, published = block_writer._publish, []


def publish(*arguments):
    published.append(real(*arguments))
    if len(published) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return published[-1]


block_writer._publish = publish
worker.main(Path(sys.argv[1]), 0, 1)
"""


@pytest.mark.crash
@pytest.mark.slow
def test_a_kill_between_block_and_record_is_repaired_by_the_same_command(
    tmp_path: Path, root: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok(extract(root, tmp_path / "whole"))
    store = tmp_path / "x"

    def start(_command: Recording, spec: LaunchSpec) -> None:
        ended = subprocess.run(
            [sys.executable, "-c", KILLED_AFTER_THE_RENAME, str(spec.run_dir)], check=False, timeout=120
        )
        assert ended.returncode == -signal.SIGKILL
        raise WorkerKilled("killed")

    with monkeypatch.context() as patch:
        patch.setattr(extract_module, "start_supervisor", start)
        assert isinstance(extract(root, store).exception, WorkerKilled)
    assert sorted(done_blocks(store)) == [0, 1]
    assert (store / block_name(2)).exists()
    ok(extract(root, store, "--shards", 2))
    assert files_of(store) == files_of(tmp_path / "whole")


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from shared.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
    )


def command(root: Path, store: Path, shards: int) -> list[str]:
    return [
        "extract",
        "--target",
        str(root / "qwen3"),
        "--data",
        str(root / "rows-qwen3"),
        "--out",
        str(store),
        "--target-layer-ids",
        "0,2",
        "--topk",
        "8",
        "--block-tokens",
        "150",
        "--batch-tokens",
        "200",
        "--device",
        "cpu",
        "--shards",
        str(shards),
    ]


@pytest.mark.crash
# SIGKILL hundreds of times: test_stage1_kills.py.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_killed_and_stopped_workers_leave_a_store_that_the_same_command_completes(
    tmp_path: Path, root: Path, in_process: None, number: signal.Signals
) -> None:
    ok(extract(root, tmp_path / "whole"))
    store = tmp_path / "x"
    running = start([*command(root, store, 2), "--restarts", "0"])
    try:
        # SIGTERM goes to the command, which asks the run to stop; SIGKILL hits one worker as the kernel would.
        worker_pid = _worker_pid(store, running)
        pid = running.pid if number is signal.SIGTERM else worker_pid
        os.kill(pid, number)
        output = running.communicate(timeout=120)[0].decode()
    finally:
        running.kill()
    assert running.returncode == (75 if number is signal.SIGTERM else WorkerKilled.exit_code), output
    assert read(store, "runs")[-1]["state"] == ("interrupted" if number is signal.SIGTERM else "failed")
    ok(extract(root, store, "--shards", 1))
    assert files_of(store) == files_of(tmp_path / "whole")


def _worker_pid(store: Path, running: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"shared.worker" in words and str(store).encode() in words:
                return int(process.name)
        time.sleep(0.05)
    raise AssertionError("no worker started")


def test_a_cut_weights_file_is_refused_before_anything_is_made(root: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(root / "qwen3", cut)
    weights = cut / "model.safetensors"
    for size in (0, 4, 5000, weights.stat().st_size - 1):
        os.truncate(weights, size)
        result = extract(root, tmp_path / "x.zarr", "--target", cut)
        assert isinstance(result.exception, TargetNotFound), result.exception
        assert str(weights) in str(result.exception)
        assert not (tmp_path / "x.zarr").exists()
        shutil.copy(root / "qwen3" / "model.safetensors", weights)


def test_a_target_without_tokenizer_files_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "qwen3", tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "special*"))
    result = extract(root, tmp_path / "x.zarr", "--target", tmp_path / "bare")
    assert isinstance(result.exception, TargetNotFound)
    assert "tokenizer" in str(result.exception)


@pytest.mark.usefixtures("in_process")
def test_an_attempt_without_a_block_binds_nobody(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker, "main", lambda *_: (_ for _ in ()).throw(NonFinite("at once")))
        assert isinstance(extract(root, tmp_path / "x.zarr", "--topk", 4).exception, NonFinite)
    ok(extract(root, tmp_path / "x.zarr", "--topk", 16))
    assert open_store(tmp_path / "x.zarr").identity["topk"] == 16
    assert isinstance(extract(root, tmp_path / "x.zarr", "--topk", 4).exception, StoreMismatch)


def test_rows_and_stores_keep_apart(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "rows-qwen3", tmp_path / "rows")
    before = sorted(tmp_path.rglob("*"))
    result = extract(root, tmp_path / "rows")
    assert isinstance(result.exception, ConfigRefused)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_named_target_that_is_not_ours_is_left_alone(root: Path, tmp_path: Path) -> None:
    """`--target ./target --out .` once deleted the model it was to load."""
    shutil.copytree(root / "qwen3", tmp_path / "target")
    before = sorted(tmp_path.rglob("*"))
    result = extract(root, tmp_path)
    assert isinstance(result.exception, ConfigRefused)
    assert "target is no part of a store" in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_one_line(root: Path, tmp_path: Path) -> None:
    result = extract(root, tmp_path / "x.zarr", "--device", "cuda:3")
    assert isinstance(result.exception, TargetUnsupported)
    assert "sees no CUDA device" in str(result.exception)


@pytest.mark.usefixtures("in_process")
def test_the_head_follows_the_umask_and_the_store_knows_the_templates_switches(root: Path, tmp_path: Path) -> None:
    ok(extract(root, tmp_path / "x.zarr"))
    store = tmp_path / "x.zarr"
    assert (store / "target" / "head.safetensors").stat().st_mode == (store / "store.json").stat().st_mode
    assert json.loads((store / "store.json").read_text())["chat_template_kwargs"] == {}
