"""Verdicts over the answers of devices: numbers that are wrong, slow, or never came."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manifests import doctor_devices as judge
from manifests.doctor_ask import Answer, Question
from manifests.doctor_finding import Finding, worst

ASKED = Question("stage2_train.device_check:attention", ("cuda:0",))
APART = {"out": 3e-3, "dq": 4e-3, "dk": 4e-3, "dv": 5e-3}
ATTENTION = {"backend": "flex", "dtype": "bfloat16", "first_s": 20.0, "ms": 0.8, "apart": APART}
STEP = {
    "attention": "flex", "dtype": "bfloat16", "graphs": 3, "compile_s": 30.0, "losses": [7.9, 7.4, 7.0], "ms": 5.0,
    "reference": 7.92,
}  # fmt: skip
TORCH = {"torch": "2.11.0", "cuda": "12.8", "threads": 16, "no_cuda": "", "nccl": "2.27.5", "gpus": []}
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "total": 1 << 37}


def answer(value: Any) -> Answer:
    return Answer(seconds=3.0, value=value)


def attention(**changes: Any) -> Finding:
    return judge.judge_attention("cuda:0", answer(ATTENTION | changes), ASKED)


def step(**changes: Any) -> Finding:
    return judge.judge_step("cuda:0", answer(STEP | changes), ASKED)


def matmuls(*rates: float, name: str = "NVIDIA H200") -> list[str]:
    values = {f"cuda:{n}": {"tflops": rate, "dtype": "bfloat16", "free": 1, "total": 2} for n, rate in enumerate(rates)}
    answers = {device: answer(value) for device, value in values.items()}
    questions = dict.fromkeys(answers, ASKED)
    return [one.verdict for one in judge.judge_matmuls(answers, questions, dict.fromkeys(answers, name))]


def test_right_numbers_are_ok() -> None:
    assert worst([attention(), step()]) == "ok"
    assert "3 graphs compiled in 30.0 s" in step().found


@pytest.mark.parametrize("wrong", [{"out": 0.02}, {"dk": 0.05}, {"dv": math.nan}, {"out": math.nan}])
def test_wrong_numbers_of_attention_are_broken(wrong: dict[str, float]) -> None:
    assert attention(apart=APART | wrong).verdict == "broken"
    assert attention(dtype="float32").verdict == "broken"


@pytest.mark.parametrize(
    "wrong",
    [{"reference": 8.3}, {"reference": math.nan}, {"losses": [7.9, 7.95]}, {"losses": [7.9, math.nan]}],
)
def test_a_step_that_does_not_learn_or_begins_elsewhere_is_broken(wrong: dict[str, Any]) -> None:
    assert step(**wrong).verdict == "broken"


def test_a_slow_gpu_is_found_by_its_data_sheet_and_by_its_neighbours() -> None:
    assert matmuls(680, 675, 690) == ["ok", "ok", "ok"]
    assert matmuls(680, 500, 690) == ["ok", "limited", "ok"]
    assert matmuls(300) == ["limited"]
    assert matmuls(3, name="Some GPU") == ["ok"]


def test_a_cpu_is_compared_to_nobody() -> None:
    answers = {"cpu": answer({"tflops": 0.1, "dtype": "float32"}), "cuda:0": Answer(300.0, ending="late")}
    found = judge.judge_matmuls(answers, dict.fromkeys(answers, ASKED), {"cuda:0": "NVIDIA H200"})
    assert [finding.verdict for finding in found] == ["ok", "broken"]
    slow = {"cpu": answer({"tflops": 1e-3, "dtype": "float32"})}
    assert judge.judge_matmuls(slow, {"cpu": ASKED}, {})[0].verdict == "limited"


@pytest.mark.parametrize(
    ("value", "devices", "visible", "verdict", "says"),
    [
        ({}, 0, None, "ok", "no CUDA device"),
        ({"gpus": [H200 | {"device": "cuda:0"}]}, 1, None, "ok", "NCCL 2.27.5"),
        ({"gpus": [H200 | {"device": "cuda:0"}]}, 8, None, "limited", "1 of 8 GPUs"),
        ({"gpus": [H200 | {"device": "cuda:0"}]}, 8, "3", "ok", "CUDA 12.8"),
        ({"gpus": [H200 | {"device": "cuda:0", "capability": [7, 0]}]}, 1, None, "limited", "no bfloat16 on cuda:0"),
        ({"cuda": None}, 8, None, "broken", "a build without CUDA"),
        ({"no_cuda": "the driver is too old"}, 8, None, "broken", "the driver is too old"),
        ({}, 8, "", "ok", "no CUDA device"),
    ],
)
def test_torch_and_the_gpus_it_sees(
    value: dict[str, Any], devices: int, visible: str | None, verdict: str, says: str
) -> None:
    (found,) = judge.judge_torch(answer(TORCH | value), ASKED, devices, visible)
    assert (found.verdict, says in found.found) == (verdict, True)


def test_a_target_is_judged_by_its_features_and_its_kernels() -> None:
    value = {
        "parameters": 4_723_968, "bytes": 18_895_872, "dtype": "float32", "load_s": 1.0, "tokens": 1024,
        "tokens_per_s": 5000.0, "finite": True, "linear_attention": True, "peak": None,
    }  # fmt: skip

    def load(device: str, missing: tuple[str, ...], **changes: Any) -> Finding:
        return judge.judge_load("T", device, answer(value | changes), ASKED, missing)

    assert load("cuda:0", ()).found.startswith("T: 4.72 M parameters, 18 MiB in float32, loaded in 1.0 s")
    assert load("cuda:0", ("causal-conv1d",)).verdict == "limited"
    assert load("cpu", ("causal-conv1d",)).verdict == "ok"
    assert load("cuda:0", (), finite=False).verdict == "broken"


def test_all_gpus_must_get_the_same_sum() -> None:
    value = {"ranks": 8, "backend": "NCCL", "bytes": 1 << 26, "gb_per_s": 300.0, "right": True}
    assert judge.judge_together("cuda:0,cuda:1", answer(value), ASKED).verdict == "ok"
    assert judge.judge_together("cuda:0,cuda:1", answer(value | {"right": False}), ASKED).verdict == "broken"


def test_what_never_came_says_how_to_see_it_alone() -> None:
    killed = Answer(2.0, ending="killed", name="SIGSEGV", where="torch/cuda/__init__.py:312 in _lazy_init")
    found = judge.judge_step("cuda:0", killed, ASKED)
    assert found.verdict == "broken"
    assert found.found == "killed by SIGSEGV in torch/cuda/__init__.py:312 in _lazy_init"
    assert found.advice.endswith("python -m manifests.doctor_child stage2_train.device_check:attention 600 cuda:0")
    full = Answer(2.0, ending="raised", name="OutOfMemoryError", message="CUDA out of memory")
    assert judge.failed("cuda:0 load", full, ASKED).advice.startswith("end what holds the GPU's memory")


def test_extra_kernels_are_tried_not_only_listed() -> None:
    assert judge.judge_fast_paths(answer({"einops": ""}), ASKED).verdict == "ok"
    found = judge.judge_fast_paths(answer({"einops": "", "causal-conv1d": "ImportError: undefined symbol"}), ASKED)
    assert (found.verdict, found.found) == ("limited", "causal-conv1d: ImportError: undefined symbol")
