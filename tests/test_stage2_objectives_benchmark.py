"""The comparison of objectives: arms, places, commands that are done, and the table on reports with known answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_store import counting_texts, make_store

from manifests.commit import Ledger
from manifests.records import MetricRecord
from shared.errors import ConfigRefused
from stage2_train.benchmarks.comparison import places, run_all
from stage2_train.benchmarks.objectives import options_of_arm, report, require_same_prompts, winner


def test_arms_are_options_of_train() -> None:
    assert options_of_arm("kl-dpace-teacher") == (
        "kl-dpace-teacher",
        ["--loss", "kl", "--weighting", "dpace", "--labels", "teacher"],
    )
    assert options_of_arm("slow=--loss ce --gamma=9") == ("slow", ["--loss", "ce", "--gamma=9"])
    for text in ("ce", "ce-decay-pupil", "ce-decay-teacher-x"):
        with pytest.raises(ConfigRefused):
            options_of_arm(text)


def test_places_deal_out_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert places(0, 2) == [{}, {}]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(2, 2)] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(2, 1)] == ["5", "7"]


def test_a_command_is_run_once_and_again_when_its_basis_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "help.log"
    shown = []
    for basis in ("a", "a", "b"):
        run_all({log: ["--help"]}, places(0, 1), {log: basis})
        shown.append("done before" in capsys.readouterr().out)
    assert shown == [False, True, False]
    with pytest.raises(SystemExit, match="1 commands failed"):
        run_all({log: ["--help"], tmp_path / "wrong.log": ["train", "--steps=0"]}, places(0, 2), {log: "c"})
    assert log.with_suffix(".done").exists()
    assert not (tmp_path / "wrong.done").exists()
    assert "wrong: exit 2" in capsys.readouterr().out
    assert (tmp_path / "wrong.first-try").read_text() == (tmp_path / "wrong.log").read_text() != ""


def test_a_command_is_asked_to_stop_when_time_is_up(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", counting_texts(8))
    sizes = "--max-length 48 --anchors 6 --batch-rows 4 --block-size 4 --num-layers 1 --device cpu --threads 1"
    command = ["train", "--store", str(store), "--run", str(tmp_path / "run"), "--steps", "100000", *sizes.split()]
    jobs = {tmp_path / "logs" / name: command for name in ("a.log", "never begun.log")}
    with pytest.raises(SystemExit, match="time is up with 2 commands unfinished"):
        run_all(jobs, places(0, 1), deadline=time.monotonic() + 4)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["a.log"]


def write_run(run: Path, kept: list[list[int]], estimate: float) -> Path:
    (run / "evaluations").mkdir(parents=True)
    results = [{"id": str(number), "kept": text} for number, text in enumerate(kept)]
    (run / "evaluations" / "a.json").write_text(json.dumps({"name": "a", "results": results}))
    Ledger(run, "train").append(
        *(
            MetricRecord(run_id="r", global_step=step, split="heldout", name="acceptance_length_estimate", value=value)
            for step, value in ((0, 1.0), (9, estimate))
        )
    )
    return run


def test_the_table_ranks_the_arms_and_names_the_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: dict[str, dict[int, Path]] = {}
    for arm, more in (("ce-decay", 0), ("kl-decay", 1), ("worse", -1)):
        runs[arm] = {
            seed: write_run(tmp_path / f"{arm}-{seed}", [[3 + more, 3], [3, 3 + more], [3 + seed]], 4.0 + more)
            for seed in (0, 1)
        }
    report(tmp_path, runs, {arm: ["--loss", arm] for arm in runs})
    lines = capsys.readouterr().out.splitlines()
    order = [line.split()[0] for line in lines if line.strip().startswith(("ce-", "kl-", "worse"))]
    assert order == ["kl-decay", "ce-decay", "worse"]
    assert "winner kl-decay, 3.5000; ce-decay 3.1000; ratio 1.1292" in lines[-1]
    kept = json.loads((tmp_path / "objectives.json").read_text())
    assert kept["lengths"]["ce-decay"] == pytest.approx([3.0, 3.2])
    assert kept["estimates"]["worse"] == [3.0, 3.0]


def test_a_lead_is_beyond_chance_only_when_it_is() -> None:
    rng = np.random.default_rng(0)
    cycles = rng.integers(20, 60, 200)

    def arm(factor: float, seed: int) -> np.ndarray[Any, Any]:
        noise = np.random.default_rng(seed).normal(0, 3, 200)
        return np.stack([cycles * 3.0 * factor + noise, cycles], axis=1)

    clear = winner({name: {seed: arm(f, seed) for seed in range(3)} for name, f in (("a", 1.0), ("b", 1.1))})
    assert clear["name"] == "b"
    assert "beyond chance over prompts and seeds" in clear["sentence"]
    close = winner({name: {s: arm(1.0, s + 10 * i) for s in range(3)} for i, name in enumerate("ab")})
    assert "not beyond chance" in close["sentence"]


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x", [[1], [2]], 1.0)
    second = write_run(tmp_path / "y", [[1]], 1.0)
    with pytest.raises(SystemExit, match="not those of"):
        require_same_prompts([first, second])
