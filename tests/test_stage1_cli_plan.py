"""`dflash plan` says what `dflash extract` then does, from a config alone, and refuses what contradicts itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import fault, plan, report
from tiny_target import make_model, save_target

from shared.rows import Document, write_rows
from stage1_extract.config import ExtractConfig, PlanConfig
from stage1_extract.disk_room import PROBE_BYTES
from stage1_extract.plan_inputs import rough_parameters, working_parameters

SIZES = ["--hidden-size", "5120", "--num-hidden-layers", "64", "--vocab-size", "248320"]
WORK = ["--tokens", "1.6e9", "--documents", "8e5"]


def save_rows(folder: Path, lengths: list[int]) -> Path:
    documents = [
        Document(
            doc_id=f"d{i}",
            source="made.jsonl",
            line=i + 1,
            input_ids=np.full(length, 7, np.int32),
            loss_mask=np.ones(length, np.uint8),
        )
        for i, length in enumerate(lengths)
    ]
    write_rows(folder, documents, {})
    return folder


def test_the_27b_shape_without_rows_or_target() -> None:
    found = report(*WORK, *SIZES, "--shards", 8, "--disk-gbps", 5)
    assert (found["tokens"], found["documents"]) == (1_600_000_000, 800_000)
    assert found["target_layer_ids"] == [1, 16, 31, 46, 61]
    bf16, int8 = found["precisions"]["bfloat16"], found["precisions"]["int8"]
    assert bf16["bytes_per_token"] == pytest.approx(61_833, rel=0.005)
    assert bf16["bytes"] == pytest.approx(99.1e12, rel=0.005)
    assert int8["bytes"] < 0.55 * bf16["bytes"]
    assert "hidden_states_q" in int8["arrays"]
    assert "hidden_states_q" not in bf16["arrays"]
    assert (bf16["last_hidden"], int8["last_hidden"]) == ("bfloat16", "int8")
    rate = found["tokens_per_second"]["per_process"]
    assert rate == pytest.approx(300e12 / 2 / rough_parameters(5120, 64, 248320))
    assert "estimated" in found["tokens_per_second"]["source"]
    assert bf16["compute_hours"] == pytest.approx(1.6e9 / (8 * rate) / 3600)
    assert bf16["write_gbps_needed"] == pytest.approx(bf16["bytes"] * 8 * rate / 1.6e18)
    assert bf16["hours"]["store"] == pytest.approx(bf16["extract_hours"] + 6 * bf16["read_hours_per_epoch"])
    assert bf16["hours"]["recompute"] == pytest.approx(6 * bf16["compute_hours"])
    assert (bf16["hours"]["cheaper_from_epochs"], int8["hours"]["cheaper_from_epochs"]) == (3, 2)
    assert found["verdict"].startswith("The store pays at 6 epochs (bfloat16): ")
    assert "disk costs more" in report(*WORK, *SIZES, "--shards", 8, "--disk-gbps", 5, "--epochs", 1)["verdict"]
    assert found["room"] is None


def test_rates_and_prices_as_given() -> None:
    found = report(
        *(*WORK, *SIZES, "--shards", 8, "--disk-gbps", 5, "--tokens-per-second", 9000),
        *("--gpu-price-per-hour", 3, "--disk-price-per-tb-month", 20, "--train-tokens-per-second", 15000),
        *("--last-hidden", "none", "--topk", 16, "--precision", "int8"),
    )
    assert found["tokens_per_second"] == {"per_process": 9000.0, "source": "as given"}
    int8 = found["precisions"]["int8"]
    assert int8["last_hidden"] == "none"
    train = 1.6e9 / 15000 / 8 / 3600
    assert int8["hours"]["store"] == pytest.approx(int8["extract_hours"] + 6 * train)
    assert int8["hours"]["recompute"] == pytest.approx(6 * (int8["compute_hours"] + train))
    held = int8["bytes"] / 1e12 * (int8["extract_hours"] / 2 + 6 * train)
    assert int8["terabyte_hours"] == pytest.approx(held)
    assert int8["money"]["store"] == pytest.approx(int8["hours"]["store"] * 8 * 3 + held * 20 / 730)
    assert "in money" in found["verdict"]


def test_an_unknown_disk_is_said_to_be_unknown() -> None:
    found = report(*WORK, *SIZES)
    figures = found["precisions"]["bfloat16"]
    assert (figures["extract_hours"], figures["read_hours_per_epoch"], figures["hours"]) == (None, None, None)
    assert "unknown" in found["disk_gbps"]["source"]
    assert f"more than {figures['disk_gbps_needed_to_pay']:.3g} GB/s" in found["verdict"]
    text = plan(*WORK, *SIZES).output
    assert "unknown: give --disk-gbps" in text
    assert "hidden_states_channel" in text
    assert all(len(line) <= 120 for line in text.splitlines() if line.startswith("│"))


def test_the_tables_say_what_the_json_says() -> None:
    given = [*WORK, *SIZES, "--shards", 8, "--disk-gbps", 1, "--gpu-price-per-hour", 3, "--disk-price-per-tb-month", 20]
    text, found = plan(*given).output, report(*given)
    int8 = found["precisions"]["int8"]
    for title, value in (
        ("hours to extract", f"{int8['extract_hours']:.3g} (disk-bound)"),
        ("hours, 6 epochs: recompute", f"{int8['recompute_hours']:.3g}"),
        ("money, 6 epochs: store", f"{int8['money']['store']:,.0f}"),
        ("store cheaper in money", "never"),
        ("files", f"{int8['files']:,}"),
    ):
        line = next(line for line in text.splitlines() if f"│ {title} " in line)
        assert line.rstrip(" │").endswith(value), line
    assert text.rstrip().endswith(found["verdict"])
    assert found["verdict"].startswith("The disk costs more than recomputing at 6 epochs (bfloat16): ")


def test_the_same_size_knobs_as_extract() -> None:
    asked, made = PlanConfig.__dataclass_fields__, ExtractConfig.__dataclass_fields__
    for name in ("num_taps", "target_layer_ids", "topk", "precision", "last_hidden", "block_tokens", "shards", "dtype"):
        assert asked[name].default == made[name].default
        assert asked[name].type == made[name].type


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_target_is_read_by_its_config_alone(tmp_path: Path, nested: bool) -> None:
    text = make_model("qwen3_5").config
    config = text.to_dict()
    if nested:
        names = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
        config = {**names, "hidden_size": 7, "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))  # no weights, no tokenizer
    found = report(*WORK, "--target", tmp_path, "--target-layer-ids", "0,2", "--last-hidden", "none")
    assert found["target_layer_ids"] == [0, 2]
    rate = found["tokens_per_second"]
    assert "counted from its config" in rate["source"]
    assert rate["per_process"] == pytest.approx(300e12 / 2 / working_parameters(text))
    taps = found["precisions"]["bfloat16"]["arrays"]["hidden_states"]["bytes_per_token"]
    assert taps == pytest.approx(2 * 64 * 2, rel=0.04)


def test_parameters_at_work_are_those_that_are_multiplied() -> None:
    tied = make_model("qwen3")
    total = sum(parameter.numel() for parameter in tied.parameters())
    assert working_parameters(tied.config) == total  # the embedding is the head
    untied = make_model("llama", tied=False)
    total = sum(parameter.numel() for parameter in untied.parameters())
    assert working_parameters(untied.config) == total - untied.get_input_embeddings().weight.numel()
    experts = make_model("gpt_oss")  # 2 of 4 experts see a token
    idle = sum(p.numel() for name, p in experts.named_parameters() if ".experts." in name) / 2
    assert idle > 0
    assert working_parameters(experts.config) == sum(p.numel() for p in experts.parameters()) - idle


def test_rows_are_counted_in_the_blocks_that_extract_would_make(tmp_path: Path) -> None:
    rows = save_rows(tmp_path / "rows", [40, 60, 30, 100, 20])
    found = report("--data", rows, *SIZES, "--block-tokens", 90)
    assert (found["tokens"], found["documents"], found["blocks"], found["blocks_left"]) == (250, 5, 3, 3)


def test_what_does_not_fit_ends_with_41_after_the_numbers(tmp_path: Path) -> None:
    result = plan("--tokens", 1.6e14, "--documents", 8e10, *SIZES, "--out", tmp_path / "runs" / "x.zarr")
    error = fault(result)
    assert error.exit_code == 41
    assert " TB are needed, " in str(error)
    assert re.search(r" are free \(with [0-9.]+ .?B in reserve\); make room", str(error)), str(error)
    assert "does not fit" in result.output
    assert not list(tmp_path.iterdir())
    small = report("--tokens", 1000, "--documents", 10, *SIZES, "--vocab-size", 300, "--out", tmp_path / "x.zarr")
    assert small["room"]["fits"]
    assert small["room"]["needed_bytes"] > small["precisions"]["bfloat16"]["bytes"]
    assert small["room"]["free_bytes"] > 0


def test_the_disk_is_measured_when_asked(tmp_path: Path) -> None:
    found = report(
        "--tokens", 1000, "--documents", 10, *SIZES, "--vocab-size", 300, "--out", tmp_path, "--measure-disk"
    )
    assert found["disk_gbps"]["value"] > 0.001
    assert f"{PROBE_BYTES >> 20} MB written and fsynced" in found["disk_gbps"]["source"]
    assert not list(tmp_path.iterdir())


REFUSED: dict[str, tuple[list[object], int, str]] = {
    "nothing": ([], 43, "--data is not given, so --tokens and --documents must be"),
    "no documents": (["--tokens", 5, *SIZES], 43, "so --documents must be"),
    "no target": (WORK, 43, "--target is not given, so --hidden-size and --num-hidden-layers and --vocab-size"),
    "two sizes": ([*WORK, *SIZES, "--target", "x"], 43, "--target says what --hidden-size"),
    "two rows": ([*WORK, *SIZES, "--data", "x"], 43, "--data says what --tokens and --documents would"),
    "part of a token": (["--tokens", 2.5, "--documents", 1, *SIZES], 43, "--tokens 2.5 must be a whole number"),
    "no token": (["--tokens", 0, "--documents", 1, *SIZES], 43, "--tokens 0.0 must be"),
    "too many tokens": (["--tokens", 1e30, "--documents", 1, *SIZES], 43, "--tokens 1e+30 must be"),
    "empty documents": (["--tokens", 5, "--documents", 6, *SIZES], 43, "--documents 6 is more than --tokens 5"),
    "topk": ([*WORK, *SIZES, "--topk", 248321], 43, "--topk 248321 is more than --vocab-size 248320"),
    "rate twice": ([*WORK, *SIZES, "--tokens-per-second", 9, "--parameters", 9], 43, "leave one of them out"),
    "rate": ([*WORK, *SIZES, "--tokens-per-second", -1], 43, "--tokens-per-second -1.0 must be above 0"),
    "disk": ([*WORK, *SIZES, "--disk-gbps", 0], 43, "--disk-gbps 0.0 must be above 0"),
    "not a number": ([*WORK, *SIZES, "--disk-gbps", "nan"], 43, "must be a finite number"),
    "disk twice": ([*WORK, *SIZES, "--disk-gbps", 1, "--measure-disk", "--out", "x"], 43, "leave one of them out"),
    "no place": ([*WORK, *SIZES, "--measure-disk"], 43, "--measure-disk needs --out"),
    "one price": ([*WORK, *SIZES, "--gpu-price-per-hour", 1], 43, "must be given together"),
    "price": (
        [*WORK, *SIZES, "--gpu-price-per-hour", 1, "--disk-price-per-tb-month", -1],
        43,
        "--disk-price-per-tb-month -1.0 must not be negative",
    ),
    "epochs": ([*WORK, *SIZES, "--epochs", 0], 43, "--epochs 0 must be"),
    "shards": (["--tokens", 9, "--documents", 2, *SIZES, "--shards", 3], 42, "--shards 3 but --documents has 2 rows"),
    "layers": ([*WORK, *SIZES, "--target-layer-ids", "1,63"], 22, "ids must lie in 0..62"),
    "no such rows": (["--data", "not/there", *SIZES], 31, "no prepared rows at not/there"),
    "no such target": ([*WORK, "--target", "./not/there"], 20, "./not/there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    arguments, code, words = REFUSED[name]
    error = fault(plan(*arguments))
    assert (error.exit_code, words in str(error)) == (code, True), str(error)


def test_the_top_k_of_a_target_is_checked(tmp_path: Path) -> None:
    error = fault(plan(*WORK, "--target", save_target(tmp_path / "t"), "--topk", 321))
    assert (error.exit_code, "320 tokens" in str(error)) == (43, True)


def test_help_and_sizes_need_no_torch() -> None:
    code = (
        "import sys; from shared.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'zarr', 'duckdb'} & set(sys.modules); assert not heavy, heavy"
    )
    for arguments in (["plan", "--help"], ["plan", *WORK, *SIZES, "--disk-gbps", "5"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ, timeout=60
        )
        assert done.returncode == 0, done.stderr
