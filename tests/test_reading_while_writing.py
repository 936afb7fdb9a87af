"""Trainers and queries beside a living extraction: real processes on one store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_target import save_target
from toy_run import environment

from manifests.blocks import recorded_blocks
from manifests.commit import read
from stage2_train.checkpoint_folder import newest_complete, read_info


def rows_for(root: Path, count: int) -> Path:
    """A tiny target and `count` prepared documents for it."""
    save_target(root / "target")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    lines = []
    for i in range(count):
        answer = " ".join(words[(i + k) % 8] for k in range(6 + i % 7))
        messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"d{i}", "messages": messages}) + "\n")
    (root / "data.jsonl").write_text("".join(lines))
    command(root, "prepare", root / "data.jsonl", "--target", root / "target", "--out", root / "rows")
    return root / "rows"


def start(root: Path, name: str, *words: object) -> subprocess.Popen[bytes]:
    with (root / f"{name}.txt").open("ab") as file:
        line = [sys.executable, "-m", "shared", *map(str, words)]
        return subprocess.Popen(line, env=environment(), stdout=file, stderr=file, start_new_session=True)


def command(root: Path, *words: object) -> str:
    """A `dflash` command that must end well; returns what it said."""
    name = str(words[0])
    assert start(root, name, *words).wait(timeout=120) == 0, (root / f"{name}.txt").read_text()[-3000:]
    return (root / f"{name}.txt").read_text()


def until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait for something that a process does while it lives."""
    while not condition():
        assert process.poll() is None, f"{process.args} ended with {process.returncode} before"
        time.sleep(0.02)


SETTINGS = """
--partial --steps 6 --max-length 64 --anchors 6 --batch-rows 4 --block-size 4 --num-layers 1 --num-heads 2
--num-kv-heads 1 --head-dim 16 --log-every 1 --eval-every 3 --save-every 3 --device cpu --threads 1
"""


def hold_back(extraction: subprocess.Popen[bytes], store: Path, runs: list[Path]) -> None:
    """Let the extraction sleep half-way until both trainings have stepped: on a fast disk nothing would overlap."""
    held: list[int] = []
    while extraction.poll() is None and not all(read(run, "metrics") for run in runs):
        if not held and store.exists() and len(recorded_blocks(store)) > 150:
            held = [event["detail"]["pid"] for event in read(store, "events") if event["event"] == "worker spawned"]
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
    for pid in held:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """None of them outlives the test."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.slow
def test_two_trainers_and_queries_read_while_an_extraction_writes(tmp_path: Path) -> None:
    """Real processes: 300 blocks are written one by one while two runs train from what is there and SQL is asked."""
    rows, store, runs = rows_for(tmp_path, 300), tmp_path / "x.zarr", [tmp_path / "run-0", tmp_path / "run-1"]
    processes: list[subprocess.Popen[bytes]] = []
    with ended(processes):
        words = f"extract --target {tmp_path / 'target'} --data {rows} --out {store} --target-layer-ids 0,2 --topk 8"
        extraction = start(tmp_path, "extraction", *f"{words} --block-tokens 1 --batch-tokens 64 --device cpu".split())
        processes.append(extraction)
        holding = threading.Thread(target=hold_back, args=(extraction, store, runs))
        holding.start()
        until(extraction, lambda: store.exists() and len(recorded_blocks(store)) >= 8)
        for run in runs:
            processes.append(start(tmp_path, run.name, "train", "--store", store, "--run", run, *SETTINGS.split()))
            until(processes[-1], (run / "run.json").exists)
        answers = [asked(tmp_path, number) for number in range(10)]
        for process, name in zip(processes[::-1], ("run-1", "run-0", "extraction"), strict=True):
            assert process.wait(timeout=240) == 0, (tmp_path / f"{name}.txt").read_text()[-3000:]
        holding.join()
    blocks = recorded_blocks(store)
    assert len(blocks) == 300
    assert [answer["blocks"] for answer in answers] == sorted(answer["blocks"] for answer in answers)
    assert all(answer["blocks"] == answer["documents"] for answer in answers)
    assert answers[0]["blocks"] < 300
    for run in runs:
        pinned = json.loads((run / "run.json").read_text())["blocks"]
        assert 8 <= len(pinned) < 300
        assert pinned == {block: blocks[int(block)]["seal"] for block in pinned}
        folder, _ = newest_complete(run)
        assert folder is not None
        assert read_info(folder)["global_step"] == 6
        # It did read while blocks were still being written.
        stepped = min(record["time"] for record in read(run, "metrics") if record["name"] == "loss")
        assert stepped < max(record["time"] for record in blocks.values())
    assert "damages        0" in command(tmp_path, "store", "verify", store)


def asked(root: Path, number: int) -> dict[str, Any]:
    """One `dflash query` about the store below `root`."""
    answer = root / f"answer-{number}.txt"
    sql = "SELECT blocks, documents FROM progress WHERE folder LIKE '%x.zarr'"
    with answer.open("wb") as file:
        line = [sys.executable, "-m", "shared", "query", sql, "--in", str(root), "--json"]
        subprocess.run(line, env=environment(), stdout=file, check=True, timeout=60)
    return dict(json.loads(answer.read_text())[0])
