"""The benchmarks run through, and their arithmetic is right; what they measure is for people to judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from manifests.benchmarks import open_store
from shared.benchmarks import flat_cost, measure, store_io, store_open
from shared.benchmarks.made_block import Shape, usual_lengths
from shared.benchmarks.measure import Case, Sample
from shared.benchmarks.store_bench import StoreBench
from shared.documents import DocumentRef
from stage2_train.benchmarks import reading


def run(command: Any, folder: Path, *arguments: str) -> dict[str, Any]:
    found = folder / "found.json"
    result = CliRunner().invoke(command, ["--dir", str(folder), "--json", str(found), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    assert [path.name for path in folder.iterdir()] == ["found.json"]  # nothing is left on the disk
    return dict(json.loads(found.read_text()))


def test_cases_take_turns_and_only_the_work_is_timed() -> None:
    seen: list[str] = []

    def case(name: str, rounds: int | None = None) -> Case:
        def work() -> int:
            seen.append(name)
            return 10

        return Case(name, work, lambda: seen.append("before"), lambda: seen.append("after"), rounds)

    samples = measure.interleaved([case("a"), case("b", 1), case("c")], 2)
    assert [name for name in seen if len(name) == 1] == ["a", "b", "c", "c", "a"]
    assert seen[:3] == ["before", "a", "after"]
    assert {name: len(found) for name, found in samples.items()} == {"a": 2, "b": 1, "c": 2}


def test_ratios_are_medians_of_ratios_within_a_round() -> None:
    samples = {"a": [Sample(1, 1, 10), Sample(2, 1, 10), Sample(4, 1, 10)], "b": [Sample(2, 4, 10), Sample(1, 1, 10)]}
    assert measure.ratio(samples, "b", "a") == pytest.approx((0.5 + 2) / 2)
    row = measure.rows_of(samples, ["a"])[0]
    assert row["GB/s"] == pytest.approx(5e-9)
    assert row["/ a"] == 1
    assert "GB/s" in measure.table("title", measure.rows_of(samples, ["a"]))


def test_dropped_files_are_no_longer_in_memory(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    (tmp_path / "x").read_bytes()
    assert measure.cached_share(tmp_path) == 1
    measure.drop_cache(tmp_path)
    shares = [measure.cached_share(tmp_path) for _ in range(3)]  # asking brings nothing in
    assert max(shares) < 0.1, shares


def test_lengths_fill_the_tokens() -> None:
    for tokens in (1, 100, 5000):
        lengths = usual_lengths(tokens, 50, np.random.default_rng(0))
        assert sum(lengths) == tokens
        assert min(lengths) > 0


def test_what_was_read_is_compared_with_what_was_written(tmp_path: Path) -> None:
    bench = StoreBench(tmp_path, Shape(2, 16), "bfloat16", [40, 70])
    for case in bench.write_cases(2, with_zarr=False)[-1:]:
        case.run()
        case.after()
    bench.check(bench.refs())
    raw = np.memmap(bench.raw / "0.bin", np.uint16, "r+")
    raw[5] ^= 1
    raw.flush()
    with pytest.raises(AssertionError):
        bench.check([DocumentRef(0, 0, 0, 40, "train", 1)])


def test_store_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_cost, "_GROWTH", (1, 2))
    found = run(store_io.main, tmp_path, "--hidden", "40", "--taps", "2", "--tokens", "900", "--rounds", "1")
    tables = found["tables"]
    assert len(tables) == 2 * 6
    cases = [[row["case"] for row in rows] for title, rows in tables.items() if "read" in title and "warm" in title]
    assert (
        cases
        == [["memmap", "preadv", "read_document", "memmap x2", "preadv x2", "read_document x2", "zarr-python"]] * 2
    )
    sizes = [rows[0]["bytes/token"] for title, rows in tables.items() if "on disk" in title]
    assert sizes[1] < sizes[0]


def test_store_open(tmp_path: Path) -> None:
    rows = run(store_open.main, tmp_path, "--documents", "50", "--rounds", "1", "--block-documents", "20")["rows"]
    assert [(row["documents"], row["blocks"], row["from"]) for row in rows] == [
        (50, 3, "cache"),
        (50, 3, "blocks"),
        (50, 2, "cache"),
    ]


def test_open_store(tmp_path: Path) -> None:
    rows = run(open_store.main, tmp_path, "--documents", "50", "--rounds", "1")["rows"]
    assert [(row["documents"], row["blocks"]) for row in rows] == [(50, 2)]


def test_reading(tmp_path: Path) -> None:
    sizes = ("--hidden", "40", "--taps", "2", "--tokens", "900", "--length", "50", "--max-length", "128")
    found = run(reading.main, tmp_path, *sizes, "--rounds", "1", "--readers", "1,3")
    names = [row["case"] for row in next(iter(found["tables"].values()))]
    assert names == [
        "memmap copy",
        "build, 1 readers",
        "build, 3 readers",
        "prefetch, 2 readers",
        "prefetch, 2, busy Python",
    ]
