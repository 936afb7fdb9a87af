"""The comparison of two precisions: counting, intervals, and the table, on reports with known answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stage2_train.benchmarks.comparison import bootstrap_ratio, counts_of, pooled, read_counts, seed_interval
from stage2_train.benchmarks.precision import report


def fake_report(kept: list[list[int]]) -> dict[str, object]:
    return {"results": [{"kept": text} for text in kept]}


def test_counts_are_tokens_and_cycles_pooled_over_prompts() -> None:
    counts = counts_of(fake_report([[3, 1], [16]]))
    assert counts.tolist() == [[4, 2], [16, 1]]
    assert pooled(counts) == pytest.approx(20 / 3)


def test_the_bootstrap_covers_the_true_ratio_and_narrows_with_prompts() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for prompts in (40, 640):
        cycles = rng.integers(20, 60, prompts)
        first = np.stack([cycles * 3.0 + rng.normal(0, 4, prompts), cycles], axis=1)
        second = np.stack([first[:, 0] * 0.98 + rng.normal(0, 4, prompts), cycles], axis=1)
        low, high = bootstrap_ratio([(first, second)] * 3, draws=500)
        assert low < 0.98 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_the_seed_interval_is_students() -> None:
    low, high = seed_interval([0.99, 1.0, 1.01])
    assert (low, high) == pytest.approx((1 - 4.303 * 0.01 / 3**0.5, 1 + 4.303 * 0.01 / 3**0.5), abs=1e-6)
    assert seed_interval([1.0]) == (float("-inf"), float("inf"))


def test_the_table_names_every_seed_the_ratio_and_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for seed in (0, 1):
        pair = []
        for precision, extra in (("bfloat16", 0), ("int8", 1)):
            folder = tmp_path / f"{precision}-seed{seed}" / "evaluations"
            folder.mkdir(parents=True)
            for name in ("a", "b"):
                (folder / f"{name}.json").write_text(json.dumps(fake_report([[4, 4 + extra, 4], [2, 2]])))
            pair.append(folder.parent)
        runs[seed] = (pair[0], pair[1])
    for precision, size in (("bfloat16", 100), ("int8", 52)):
        block = tmp_path / f"{precision}.zarr" / "blocks" / "000000"
        block.mkdir(parents=True)
        (block / "data").write_bytes(bytes(size))
    assert len(read_counts(runs[0][0])) == 4
    report(tmp_path, runs)
    shown = capsys.readouterr().out
    for part in ("3.2000  3.4000  1.0625", "mean ratio 1.0625 over 2 seeds and 4 prompts", "ratio 0.5200"):
        assert part in shown
    assert json.loads((tmp_path / "precision.json").read_text())["ratios"] == pytest.approx([1.0625, 1.0625])
