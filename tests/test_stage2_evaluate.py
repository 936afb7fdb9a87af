"""`dflash eval` end to end on a tiny real target: what it reports, records, refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_run import save_run
from tiny_target import make_model, make_tokenizer, save_target

from manifests.commit import Ledger, read
from manifests.records import RunRecord
from shared import progress
from shared.errors import ConfigRefused, NotLossless, StoreMismatch
from shared.target import load_target, wrap
from stage2_train import evaluate as evaluate_module
from stage2_train.cli_eval import evaluate as command
from stage2_train.config_eval import EvalConfig, ExportConfig
from stage2_train.decode import DecodedBatch, speculative_decode
from stage2_train.evaluate import batches, eos_token_ids, evaluate
from stage2_train.export import export
from stage2_train.lossless import NOISE_FACTOR, first_difference, next_token_logits, rounding, tie_tolerance
from stage2_train.prompts import Prompt

QUESTIONS = ["Hello, how are you?", "Count to 10.", "What is the capital of France?", "add a and b", "Paris"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(QUESTIONS)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path, target: Path) -> Path:
    return save_run(tmp_path / "run", target, seed=3)


def config(run: Path, data: Path, target: Path | None, **changes: Any) -> EvalConfig:
    values: dict[str, Any] = {"max_new_tokens": 12, "timed_prompts": 2, "device": "cpu", **changes}
    return EvalConfig(run=run, data=(data,), target=None if target is None else str(target), **values)


def test_report_record_and_screen_agree(
    run: Path, data: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (report,) = evaluate(config(run, data, target))
    assert json.loads((run / "evaluations" / "questions-step-00000007.json").read_text()) == report
    assert report["prompts"] == len(report["results"]) == len(QUESTIONS)
    kept = [n for result in report["results"] for n in result["kept"]]
    assert report["acceptance_length"] == sum(kept) / len(kept)
    assert 1.0 <= report["acceptance_length"] < 2.0
    assert all(sum(result["kept"]) == result["new_tokens"] - 1 for result in report["results"])
    assert report["check"] == {"prompts": 5, "equal": 5, "ties": [], "mismatches": [], "tie_tolerance": 1e-3}
    assert report["tokens_per_second"] > 0
    assert report["speedup"] == report["tokens_per_second"] / report["plain_tokens_per_second"]
    (record,) = read(run, "evaluations")
    assert record["acceptance_length"] == report["acceptance_length"]
    assert (record["mismatches"], record["ties"], record["global_step"]) == (0, 0, 7)
    assert run / record["path"] == run / "evaluations" / "questions-step-00000007.json"
    assert [(r["command"], r["state"]) for r in read(run, "runs")] == [("eval", "started"), ("eval", "finished")]
    screen = capsys.readouterr().out
    assert "5 of 5 equal" in screen
    assert f"{report['acceptance_length']:.3f}" in screen


def test_rows_together_count_like_rows_alone(run: Path, data: Path, target: Path, tmp_path: Path) -> None:
    reports = [evaluate(config(run, data, target, batch_size=n, out=tmp_path / f"by-{n}"))[0] for n in (5, 1)]
    assert reports[0]["results"] == reports[1]["results"]
    assert not (run / "evaluations").exists()


def test_a_batch_shows_how_far_it_is(
    run: Path, data: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU the first batch of eight long answers takes minutes, in which nothing was shown."""
    monkeypatch.setattr(progress, "DRAW_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    (report,) = evaluate(config(run, data, target, batch_size=5, timed_prompts=2))
    shown = capsys.readouterr().err
    for writer in ("the drafter", "the target alone"):
        counts = [
            int(n.replace(",", "")) for n in re.findall(rf"0/5 prompts .*now ([0-9,]+) tokens by {writer}", shown)
        ]
        assert counts[:2] == [0, 5]
        assert counts == sorted(counts)
        assert counts[-1] < sum(result["new_tokens"] for result in report["results"])
    assert "time at batch 1  0/2 prompts" in shown


def test_the_command_prints_json_without_the_prompts(run: Path, data: Path, target: Path) -> None:
    options = ["--limit", "2", "--max-new-tokens", "4", "--timed-prompts", "0", "--no-check", "--json"]
    arguments = ["--run", str(run), "--data", str(data), "--target", str(target), *options]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    (report,) = json.loads(done.stdout)
    assert report["prompts"] == 2
    assert "results" not in report
    assert report["check"] is None
    assert report["tokens_per_second"] is None


def test_untrained_is_the_runs_first_weights_at_step_zero(run: Path, data: Path, target: Path, tmp_path: Path) -> None:
    (report,) = evaluate(config(run, data, target, untrained=True))
    (record,) = read(run, "evaluations")
    assert report["untrained"] is record["detail"]["untrained"] is True
    assert record["global_step"] == 0
    fresh = save_run(tmp_path / "fresh", target, seed=0)
    assert evaluate(config(fresh, data, target))[0]["results"] == report["results"]


def test_another_target_is_refused_with_both_hashes(run: Path, data: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(StoreMismatch, match=r"tiny with weights_sha256 \w{64}, but .*other has \w{64}") as caught:
        evaluate(config(run, data, other))
    assert caught.value.exit_code == 30
    assert not read(run, "evaluations")


def test_the_target_is_found_where_the_store_was_made(run: Path, data: Path, target: Path) -> None:
    with pytest.raises(ConfigRefused, match="pass --target"):
        evaluate(config(run, data, None))
    detail = {"config": {"target": target.name}, "provenance": {"cwd": str(target.parent)}}
    Ledger(run.parent / "gone.zarr", "extract-1").append(
        RunRecord(run_id="1", command="extract", state="started", detail=detail)
    )
    assert evaluate(config(run, data, None, limit=1))[0]["prompts"] == 1


def test_a_larger_block_than_trained_is_refused(run: Path, data: Path, target: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"--block-size 5 but the drafter was trained with 4"):
        evaluate(config(run, data, target, block_size=5))
    (report,) = evaluate(config(run, data, target, block_size=2, limit=1))
    assert report["name"] == "questions-b2"
    assert len(report["acceptance_per_position"]) == 1


def test_sampling_is_not_compared_and_keeps_its_seed(run: Path, data: Path, target: Path) -> None:
    first, again, other = (
        evaluate(config(run, data, target, temperature=0.9, seed=seed))[0] for seed in (1, 1, 2)
    )  # fmt: skip
    assert first["check"] is None
    assert first["name"] == "questions-t0.9"
    assert first["results"] == again["results"] != other["results"]


def test_another_text_than_the_targets_ends_with_62_after_the_report(
    run: Path, data: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> DecodedBatch:
        batch = speculative_decode(*arguments)
        batch.texts[0].tokens[3] ^= 1
        return batch

    monkeypatch.setattr(evaluate_module, "speculative_decode", wrong)
    with pytest.raises(NotLossless, match=r"1 greedy texts are not the target's own; .* new token 3: ") as caught:
        evaluate(config(run, data, target))
    assert caught.value.exit_code == 62
    (path,) = (run / "evaluations").glob("*.json")
    check = json.loads(path.read_text())["check"]
    assert (check["equal"], len(check["mismatches"])) == (4, 1)
    assert read(run, "evaluations")[0]["mismatches"] == 1
    assert read(run, "runs")[-1]["exit_code"] == 62


def test_only_equal_logits_make_a_tie() -> None:
    model, prompt = make_model("qwen3", tied=False), [5, 7]
    with torch.no_grad():
        order = model(torch.tensor([prompt])).logits[0, -1].argsort(descending=True).tolist()
        best, twin, worse, worst = order[0], order[1], order[2], order[3]
        model.lm_head.weight[twin] = model.lm_head.weight[best]
        logits = model(torch.tensor([prompt])).logits[0, -1]
    target = wrap(model, None, "tiny")
    tie = first_difference(target, "p", prompt, ([best, 4], [twin, 4]), 1e-3)
    assert tie is not None
    assert (tie.tie, tie.gap, tie.position) == (True, 0.0, 0)
    wrong = first_difference(target, "p", prompt, ([best], [worse]), 1e-3)
    assert wrong is not None
    assert not wrong.tie
    assert wrong.gap == pytest.approx(float(logits[best] - logits[worse]), rel=1e-4)
    # Two runners-up are no tie, however near: the target prefers another token.
    runners = first_difference(target, "p", prompt, ([worse], [worst]), float(logits[worse] - logits[worst]) + 1e-3)
    assert runners is not None
    assert not runners.tie
    shorter = first_difference(target, "p", prompt, ([best], [best, 11]), 1e-3)
    assert shorter is not None
    assert (shorter.tie, shorter.gap, shorter.position) == (False, None, 1)
    assert first_difference(target, "p", prompt, ([best, 4], [best, 4]), 1e-3) is None


def test_tolerance_follows_the_dtype_unless_asked() -> None:
    assert tie_tolerance(torch.bfloat16, None) == 0.25
    assert tie_tolerance(torch.float32, None) == 1e-3
    assert tie_tolerance(torch.float32, 0.5) == 0.5


def test_every_end_token_of_the_target_counts(target: Path) -> None:
    loaded = load_target(str(target), dtype="float32", device="cpu")
    loaded.model.generation_config.eos_token_id = [2, 0]
    loaded.text_config.eos_token_id = 4
    assert eos_token_ids(loaded) == {0, 2, 4}
    assert make_tokenizer().eos_token_id == 2


def test_batches_are_alike_in_length_and_cover_all() -> None:
    prompts = [Prompt(str(i), [0] * length) for i, length in enumerate([9, 1, 5, 2, 7])]
    assert batches(prompts, 2) == [[1, 3], [2, 4], [0]]
    assert batches(prompts, 1) == [[0], [1], [2], [3], [4]]


def test_an_exported_folder_evaluates_like_its_checkpoint(run: Path, data: Path, target: Path, tmp_path: Path) -> None:
    out = export(ExportConfig(run=run, out=tmp_path / "drafter", dtype="float32"))
    before = sorted(path.name for path in out.iterdir())
    exported, own = (evaluate(config(folder, data, target))[0] for folder in (out, run))
    assert exported["results"] == own["results"]
    assert exported["global_step"] == 7
    assert (tmp_path / "drafter-eval" / "evaluations").is_dir()
    assert sorted(path.name for path in out.iterdir()) == before


def test_a_tie_is_judged_by_the_rounding_that_is_measured_there() -> None:
    model, prompt = make_model("qwen3", tied=False), [5, 7, 11, 13]
    target = wrap(model.to(torch.bfloat16), None, "tiny")
    logits = next_token_logits(target, prompt)
    noise = rounding(target, prompt, [17] * 16, logits)
    assert 0 <= noise < float(logits.std()), "rounding is far below the differences between tokens"
    exact = wrap(make_model("qwen3", tied=False), None, "tiny")
    assert rounding(exact, prompt, [17] * 16, next_token_logits(exact, prompt)) < 1e-4
    order = logits.argsort(descending=True).tolist()
    for token in order[1:]:
        found = first_difference(target, "p", prompt, ([order[0]], [token]), 0.0)
        assert found is not None
        assert found.gap is not None
        assert found.noise is not None
        assert found.tie == (found.gap <= NOISE_FACTOR * found.noise)
