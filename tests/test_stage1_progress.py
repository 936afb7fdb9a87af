"""What extraction says of itself, and that a worker which starts again goes on behind its earlier attempts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import run, workers_in_process
from safetensors.torch import load_file
from tiny_target import save_target
from told import keep_beats, phases_of

import stage1_extract.extract as extract_module
from manifests.commit import read
from shared.errors import DiskFull
from shared.reporter import Ticks
from shared.rows import PreparedRows
from shared.store_layout import block_name
from shared.target import load_target
from stage1_extract import worker
from stage1_extract.plan import committed_among, load_plan

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and rows of ten documents."""
    root = tmp_path_factory.mktemp("extract")
    save_target(root / "target", "qwen3")
    turns = [[" ".join(WORDS[: 1 + i]), " ".join(WORDS[i:])] for i in range(10)]
    rows = [
        {"id": i, "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for i, (a, b) in enumerate(turns)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("prepare", root / "data.jsonl", "--target", root / "target", "--out", root / "rows")
    assert done.exit_code == 0, done.output
    return root


def extract(root: Path, out: Path, *more: object) -> None:
    options = [
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
    ]
    done = run("extract", "--target", root / "target", "--data", root / "rows", "--out", out, *options, *more)
    assert done.exit_code == 0, (done.output, done.exception)


def test_extraction_goes_through_its_phases(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers_in_process(monkeypatch, extract_module, worker)
    beats = keep_beats(monkeypatch)
    extract(root, tmp_path / "x.zarr")
    assert phases_of([beat for beat in beats if beat.phase]) == ["load", "warm-up", "step", "drain", "done"]
    warm_up = [beat.done for beat in beats if beat.phase == "warm-up"]
    assert set(warm_up) == {0}  # first the target's own first forward; the first batch that the target has done ends it
    lengths = PreparedRows.open(root / "rows").lengths
    done = [beat.done for beat in beats if beat.phase in ("warm-up", "step")]
    assert done == sorted(done)
    assert (done[0], beats[-1].done, beats[-1].total) == (0, lengths.sum(), lengths.sum())
    blocks = len(read(tmp_path / "x.zarr", "shards"))
    assert [beat.saved for beat in beats][-1] == blocks
    assert {beat.saved for beat in beats if beat.phase in ("warm-up", "step", "drain")} == set(range(blocks + 1))
    written = [beat.inner for beat in beats if beat.phase == "step" and beat.inner is not None]
    assert len(set(written)) > blocks  # pieces of a block count: writing one may take longer than a step may be silent


def test_a_worker_that_starts_again_skips_what_is_committed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """work.json lists what was to do at the first start; a restarted worker asks the records what is left of it."""
    workers_in_process(monkeypatch, extract_module, worker)
    store = tmp_path / "x.zarr"
    extract(root, store, "--shards", 2)
    plan = load_plan(store)
    assert plan is not None
    remaining = json.loads((store / "work.json").read_text())["remaining"]
    mine = remaining[0::2]
    assert len(mine) >= 2
    lost = mine[-1]
    shutil.rmtree(store / block_name(lost))
    assert committed_among(store, mine) == set(mine) - {lost}
    before = len(read(store, "shards"))
    beats = keep_beats(monkeypatch)
    worker.main(store, 0, 2)
    assert [record["block"] for record in read(store, "shards")[before:]] == [lost]
    lengths = PreparedRows.open(root / "rows").lengths
    tokens = {block: int(lengths[plan.documents_of(block)].sum()) for block in mine}
    first = next(beat for beat in beats if (beat.phase, beat.unit) == ("warm-up", "tokens"))
    assert (first.saved, first.done, first.total) == (
        len(mine) - 1,
        sum(tokens.values()) - tokens[lost],
        sum(tokens.values()),
    )
    assert (beats[-1].saved, beats[-1].done) == (len(mine), beats[-1].total)


def test_a_forward_that_takes_long_is_no_silence(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a 135M target took 50 s on two cores, ten seconds before a step counts as a hang."""
    monkeypatch.setattr(Ticks, "every_s", 0.0)
    workers_in_process(monkeypatch, extract_module, worker)
    beats = keep_beats(monkeypatch)
    extract(root, tmp_path / "x.zarr", "--batch-tokens", 10_000)
    warm_up = [beat.inner for beat in beats if (beat.phase, beat.unit) == ("warm-up", "tokens")]
    assert len(set(warm_up)) >= 1 + 4 + 1  # of a batch: its beginning, four layers, the head


def test_a_worker_whose_share_is_done_says_so_and_leaves(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_in_process(monkeypatch, extract_module, worker)
    extract(root, tmp_path / "x.zarr")
    beats = keep_beats(monkeypatch)
    worker.main(tmp_path / "x.zarr", 0, 1)
    assert [beat.saved for beat in beats] == [len(read(tmp_path / "x.zarr", "shards"))]


def test_a_disk_without_room_says_how_much_is_needed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_in_process(monkeypatch, extract_module, worker)
    extract(root, tmp_path / "x.zarr")
    work = json.loads((tmp_path / "x.zarr" / "work.json").read_text())
    work["config"]["disk_reserve_gb"] = 1e6
    (tmp_path / "x.zarr" / "work.json").write_text(json.dumps(work))
    shutil.rmtree(tmp_path / "x.zarr" / block_name(0))
    with pytest.raises(DiskFull) as caught:
        worker.main(tmp_path / "x.zarr", 0, 1)
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 1e15


def test_the_bytes_of_a_target_are_counted_as_they_are_loaded(root: Path) -> None:
    told: list[tuple[str, float, float | None, str]] = []

    def report(
        phase: str, done: float, total: float | None, unit: str, inner: float | None = None, **numbers: object
    ) -> None:
        told.append((phase, done, total, unit))

    load_target(str(root / "target"), device="cpu", report=report)
    size = sum(tensor.nbytes for tensor in load_file(root / "target" / "model.safetensors").values())
    assert told[0] == ("load", 0, size, "bytes")
    assert told[-2:] == [("load", size, size, "bytes"), ("warm-up", 0, 1, "passes")]  # kernels are tuned now
    done = [done for phase, done, _, _ in told if phase == "load"]
    assert done == sorted(done)
    assert len(set(done)) > 10  # tensor by tensor
    assert done[-2] == size  # the names in the file are those of the model
