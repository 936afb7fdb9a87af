"""What a device is asked about training: true numbers on this CPU, wrong ones noticed; the same on GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manifests import doctor_devices as judge
from manifests.doctor_ask import Answer, Question, ask
from stage2_train import device_check
from stage2_train.attention import Mask, build_masks
from stage2_train.drafter_config import LayerKind

ASKED = Question("", ())


def test_torch_is_described() -> None:
    found = device_check.devices()
    assert found["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_the_attention_of_training_is_the_plain_formula_on_a_cpu() -> None:
    found = judge.judge_attention("cpu", Answer(1.0, value=device_check.attention("cpu")), ASKED)
    assert found.verdict == "ok", found


def test_attention_that_sees_too_much_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowed(layout: Any, kinds: list[LayerKind], *rest: Any) -> dict[LayerKind, Mask]:
        made = build_masks(layout, [LayerKind(causal=True, window=None)], *rest)
        return {kinds[0]: next(iter(made.values()))}

    monkeypatch.setattr(device_check, "build_masks", narrowed)
    found = judge.judge_attention("cpu", Answer(1.0, value=device_check.attention("cpu")), ASKED)
    assert found.verdict == "broken"


def test_the_real_step_learns_on_a_cpu() -> None:
    found = device_check.step("cpu")
    assert judge.judge_step("cpu", Answer(1.0, value=found), ASKED).verdict == "ok"
    assert (found["attention"], found["dtype"], found["graphs"]) == ("sdpa", "float32", 0)
    # Before its first update a drafter holds all words for equally likely.
    assert found["losses"][0] == pytest.approx(math.log(device_check.GEOMETRY.vocab_size), abs=0.5)


@pytest.mark.slow
def test_processes_add_up_on_a_cpu() -> None:
    found = ask(Question("stage2_train.device_check:together", ("cpu,cpu",)), 120)
    assert judge.judge_together("cpu,cpu", found, ASKED).verdict == "ok"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_gpu_passes_every_question() -> None:
    answers = {name: getattr(device_check, name)("cuda:0") for name in ("matmul", "attention", "step")}
    name = {"cuda:0": torch.cuda.get_device_name(0)}
    matmul = judge.judge_matmuls({"cuda:0": Answer(1.0, value=answers["matmul"])}, {"cuda:0": ASKED}, name)
    attention = judge.judge_attention("cuda:0", Answer(1.0, value=answers["attention"]), ASKED)
    step = judge.judge_step("cuda:0", Answer(1.0, value=answers["step"]), ASKED)
    assert [one.verdict for one in (*matmul, attention, step)] == ["ok"] * 3, answers
    assert (answers["attention"]["backend"], answers["step"]["graphs"]) == ("flex", 3)
    assert answers["step"]["reference"] == pytest.approx(answers["step"]["losses"][0], rel=2e-2)
