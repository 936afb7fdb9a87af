"""What `dflash plan` says of a store is what `dflash extract` then makes and refuses by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from commands import fault, plan, report, workers_in_process
from tiny_target import save_target

import stage1_extract.extract as extract_module
from shared.cli import cli
from stage1_extract import worker
from stage1_extract.disk_room import Room, readable_bytes


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target `t` and its rows `rows`: 60 documents of 250-450 tokens."""
    folder = tmp_path_factory.mktemp("prepared")
    save_target(folder / "t")
    rng = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(60):
            ids = rng.integers(5, 290, int(rng.integers(250, 450))).tolist()
            file.write(json.dumps({"id": number, "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
    made = CliRunner().invoke(
        cli, ["prepare", str(folder / "data.jsonl"), "--target", str(folder / "t"), "--out", str(folder / "rows")]
    )
    assert made.exit_code == 0, (made.output, made.exception)
    return folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    workers_in_process(monkeypatch, extract_module, worker)


def knobs_of(prepared: Path, out: Path, *more: object) -> list[object]:
    """What both plan and extract take."""
    places = ["--target", prepared / "t", "--data", prepared / "rows", "--out", out]
    return [*places, "--target-layer-ids", "0,1,2", "--topk", 8, "--block-tokens", 5000, "--dtype", "float32", *more]


def extract(knobs: list[object]) -> Result:
    return CliRunner().invoke(cli, ["extract", *map(str, knobs), "--device", "cpu"])


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_extract_then_takes_the_planned_disk(tmp_path: Path, prepared: Path, in_process: None, precision: str) -> None:
    out = tmp_path / "x.zarr"
    knobs = knobs_of(prepared, out, "--precision", precision)
    before = report(*knobs)
    assert before["blocks_left"] == before["blocks"] == 5
    made = extract(knobs)
    assert made.exit_code == 0, (made.output, made.exception)
    figures = before["precisions"][precision]
    assert f"{figures['bytes_per_token']:,.0f} bytes a token, {precision}" in made.output
    in_blocks = sum(part["bytes"] for part in figures["arrays"].values()) + figures["metadata_bytes"]
    assert in_blocks == taken(out / "blocks") - (out / "blocks" / "zarr.json").stat().st_size
    assert figures["bytes"] == pytest.approx(taken(out), rel=0.01)

    after = report(*knobs)
    assert (after["blocks_left"], after["blocks"]) == (0, 5)
    assert after["precisions"][precision]["bytes_left"] < 50_000
    other = "int8" if precision == "bfloat16" else "bfloat16"
    error = fault(plan(*knobs, "--precision", other))
    assert (error.exit_code, f"precision = '{precision}'" in str(error)) == (30, True)
    error = fault(plan(*knobs, "--block-tokens", 4000))
    assert (error.exit_code, "block_tokens = 5000" in str(error)) == (30, True)


def test_extract_refuses_by_the_planned_numbers(
    tmp_path: Path, prepared: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = knobs_of(prepared, tmp_path / "x.zarr")
    needed = report(*knobs)["room"]["needed_bytes"]
    full = Room(bytes=needed - 1, inodes=None)
    monkeypatch.setattr(Room, "at", lambda _path: full)
    error = fault(extract(knobs))
    assert (error.exit_code, f"{readable_bytes(needed)} are needed" in str(error)) == (41, True), str(error)
    assert fault(plan(*knobs)).args == error.args
    monkeypatch.setattr(Room, "at", lambda _path: Room(bytes=needed, inodes=None))
    assert extract(knobs).exit_code == 0


def test_a_store_of_another_version_of_ours_is_refused_by_name(
    tmp_path: Path, prepared: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = knobs_of(prepared, tmp_path / "x.zarr", "--last-hidden", "none")
    assert extract(knobs).exit_code == 0
    version = extract_module.distribution_version()
    monkeypatch.setattr(extract_module, "distribution_version", lambda: "999.0")
    error = fault(extract(knobs))
    assert (error.exit_code, f"version = '{version}', this command asks '999.0'" in str(error)) == (30, True)
