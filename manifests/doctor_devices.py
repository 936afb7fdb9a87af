"""What the answers of torch's devices mean: pure functions from an Answer to a line of `dflash doctor`.

Called by manifests/doctor_probes.py; the numbers come from device_check.py in stage2_train and stage1_extract.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from manifests.doctor_ask import Answer, Question
from manifests.doctor_finding import Finding, Verdict, size

# bfloat16 TFLOP/s in the data sheets, without sparsity. One large product reaches 65-75 % of it on a healthy GPU.
PEAKS = {"B200": 2250, "GH200": 989, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "4090": 165}
_OF_PEAK = 0.45
_OF_OTHERS = 0.8
_SLOW_CPU = 0.01
# bf16 against float64 on the same rounded inputs; float32 is good for 1e-6.
_APART: Mapping[str, tuple[float, float]] = {"bfloat16": (1e-2, 2e-2), "float32": (1e-5, 1e-5)}
_LOSS_APART = 2e-2


def judge_torch(answer: Answer, question: Question, devices: int, visible: str | None) -> list[Finding]:
    """torch loaded, and every GPU of the machine usable; `devices` are /dev/nvidia*, `visible` CUDA_VISIBLE_DEVICES."""
    if answer.value is None:
        return [failed("torch", answer, question)]
    has, gpus = answer.value, answer.value["gpus"]
    found = f"torch {has['torch']}, {has['threads']} CPU threads, loaded in {answer.seconds:.1f} s"
    if not gpus:
        if not devices or visible == "":
            return [Finding("devices", "torch", "ok", f"{found}, no CUDA device")]
        why = (
            "is a build without CUDA" if has["cuda"] is None else (has["no_cuda"] or f"(CUDA {has['cuda']}) sees none")
        )
        advice = "install the torch wheel for this driver: https://pytorch.org/get-started/locally"
        return [
            Finding("devices", "torch", "broken", f"{devices} NVIDIA devices, but torch {has['torch']} {why}", advice)
        ]
    found += f", CUDA {has['cuda']}, NCCL {has.get('nccl', '-')}"
    if visible is None and len(gpus) < devices:
        advice = "run nvidia-smi: a GPU that fell off the bus needs a reset or a reboot"
        return [Finding("devices", "torch", "limited", f"{found}: {len(gpus)} of {devices} GPUs", advice)]
    old = [gpu["device"] for gpu in gpus if gpu["capability"] < [8, 0]]
    if old:
        advice = "train there with --dtype float32 --attention sdpa, or use newer GPUs"
        return [Finding("devices", "torch", "limited", f"{found}: no bfloat16 on {', '.join(old)}", advice)]
    return [Finding("devices", "torch", "ok", found)]


def judge_matmuls(
    answers: Mapping[str, Answer], questions: Mapping[str, Question], names: Mapping[str, str]
) -> list[Finding]:
    """The products of all devices, each against its data sheet and its neighbours; `names` are those of the GPUs."""
    rates = {device: answer.value["tflops"] for device, answer in answers.items() if answer.value is not None}
    return [
        failed(f"{device} matmul", answer, questions[device])
        if answer.value is None
        else _matmul(
            device, answer.value, names.get(device, ""), [rates[d] for d in rates if d != device and d in names]
        )
        for device, answer in answers.items()
    ]


def _matmul(device: str, value: Mapping[str, Any], name: str, others: list[float]) -> Finding:
    rate, check = value["tflops"], f"{device} matmul"
    free = f", {size(value['free'])} of {size(value['total'])} free" if "free" in value else ""
    found = f"{rate:.3g} TFLOP/s in {value['dtype']}{free}"
    if not name:
        verdict: Verdict = "ok" if rate >= _SLOW_CPU else "limited"
        return Finding(
            "devices",
            check,
            verdict,
            found,
            "" if verdict == "ok" else "something else uses the cores, or OMP_NUM_THREADS is 1",
        )
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    if peak is not None and rate < _OF_PEAK * peak:
        advice = "something else computes there, or it is throttled: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        return Finding("devices", check, "limited", f"{found}, {rate / peak:.0%} of its {peak} ({name})", advice)
    if others and rate < _OF_OTHERS * statistics.median(others):
        advice = "every step of a training waits for its slowest GPU: leave it out, or see why"
        return Finding("devices", check, "limited", f"{found}, the others {statistics.median(others):.3g}", advice)
    return Finding("devices", check, "ok", f"{found} ({name})")


def judge_attention(device: str, answer: Answer, question: Question) -> Finding:
    """Compiled where it must be, and the same numbers as the plain formula."""
    check = f"{device} attention"
    if answer.value is None:
        return failed(check, answer, question)
    value = answer.value
    forward, backward = _APART[value["dtype"]]
    apart = value["apart"]
    how = "compiled and run" if value["backend"] == "flex" else "run"
    found = (
        f"{value['backend']} in {value['dtype']}, {how} forward and backward in {value['first_s']:.2g} s, then "
        f"{_ms(value['ms'])}; off by {apart['out']:.0e}, gradients {max_or_nan(apart):.0e}"
    )
    if apart["out"] <= forward and max_or_nan(apart) <= backward:
        return Finding("devices", check, "ok", found)
    advice = "do not train there: its numbers are wrong. Try another torch or driver, then another GPU"
    return Finding("devices", check, "broken", f"{found}; allowed are {forward:.0e} and {backward:.0e}", advice)


def judge_step(device: str, answer: Answer, question: Question) -> Finding:
    """The real step: every region compiled once, the loss that the CPU has too, and falling."""
    check = f"{device} step"
    if answer.value is None:
        return failed(check, answer, question)
    value, losses = answer.value, answer.value["losses"]
    compiled = f"{value['graphs']} graphs compiled in {value['compile_s']:.1f} s, " if value["graphs"] else ""
    found = f"{compiled}loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps of {_ms(value['ms'])}"
    found += f" ({value['attention']}, {value['dtype']})"
    advice = "do not train there: its numbers are wrong. Try another torch or driver, then another GPU"
    reference = value["reference"]
    if reference is not None and not abs(losses[0] - reference) <= _LOSS_APART * reference:
        return Finding("devices", check, "broken", f"{found}; the CPU begins with {reference:.3f}", advice)
    if not (all(map(math.isfinite, losses)) and losses[-1] < losses[0]):
        return Finding("devices", check, "broken", f"{found}: it does not learn", advice)
    return Finding("devices", check, "ok", found)


def judge_together(devices: str, answer: Answer, question: Question) -> Finding:
    """A sum over all GPUs, a process each, as training makes it."""
    if answer.value is None:
        return failed("all GPUs", answer, question)
    value = answer.value
    found = (
        f"{value['ranks']} processes added {size(value['bytes'])} by {value['backend']} at {value['gb_per_s']:.3g} GB/s"
    )
    if value["right"]:
        return Finding("devices", "all GPUs", "ok", found)
    advice = "nvidia-smi topo -m; NCCL_P2P_DISABLE=1 tells whether the direct links are to blame"
    return Finding("devices", "all GPUs", "broken", f"{found}, and the sum is wrong ({devices})", advice)


def judge_load(target: str, device: str, answer: Answer, question: Question, missing: tuple[str, ...]) -> Finding:
    """The target loaded and run; `missing` are fast kernels that cannot be imported."""
    check = f"{device} load"
    if answer.value is None:
        return failed(check, answer, question)
    value = answer.value
    found = (
        f"{target}: {_count(value['parameters'])} parameters, {size(value['bytes'])} in {value['dtype']}, "
        f"loaded in {value['load_s']:.1f} s, {value['tokens_per_s']:,.0f} tokens/s through it"
    )
    if not value["finite"]:
        advice = "its features cannot be trained on: check the files, or another --dtype"
        return Finding("devices", check, "broken", f"{found}; NaN or infinity in its features", advice)
    if value["linear_attention"] and missing and device != "cpu":
        advice = "pip install 'dflash-offline[gpu]', and causal-conv1d built against this torch"
        return Finding("devices", check, "limited", f"{found}, by the slow path: no {', '.join(missing)}", advice)
    return Finding("devices", check, "ok", found)


def judge_fast_paths(answer: Answer, question: Question) -> Finding:
    """Installed is not enough: these packages are compiled against one torch."""
    if answer.value is None:
        return failed("fast kernels", answer, question)
    broken = {name: why for name, why in answer.value.items() if why}
    if not broken:
        return Finding("devices", "fast kernels", "ok", f"{', '.join(answer.value)} can be imported")
    said = "; ".join(f"{name}: {why}" for name, why in broken.items())
    advice = (
        "only hybrid targets (Qwen3.5) need them: pip install 'dflash-offline[gpu]', and causal-conv1d for this torch"
    )
    return Finding("devices", "fast kernels", "limited", said, advice)


def failed(check: str, answer: Answer, question: Question) -> Finding:
    """The line of a question that has no value, and how to see all of its output."""
    again = f"python -m manifests.doctor_child {question.entry} 600 {' '.join(question.arguments)}".strip()
    first = {
        "late": "give it longer with --deadline, or see where it stands; alone: ",
        "killed": "this torch, driver and GPU do not go together, or something killed it; alone: ",
    }.get(answer.ending, "")
    if answer.name == "OutOfMemoryError":
        first = "end what holds the GPU's memory (nvidia-smi), or use a larger one; alone: "
    elif answer.name in ("ModuleNotFoundError", "ImportError"):
        first = "pip install 'dflash-offline' in this environment; alone: "
    return Finding("devices", check, "broken", answer.sentence(), (first or "alone, with all its output: ") + again)


def _count(number: int) -> str:
    """A number of parameters: 4.7 M, 27 B."""
    return f"{number / 1e6:.3g} M" if number < 1e9 else f"{number / 1e9:.3g} B"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def max_or_nan(apart: Mapping[str, float]) -> float:
    """The largest distance of a gradient; NaN when one is (max would hide it)."""
    gradients = [value for name, value in apart.items() if name != "out"]
    return math.nan if any(map(math.isnan, gradients)) else max(gradients)
