"""What `dflash doctor` tries out with torch: each question in a process of its own, device by device.

Called by manifests/doctor.py after the machine's facts. Next: manifests/doctor_ask.py (the process), doctor_devices.py
(the verdicts), stage2_train/device_check.py and stage1_extract/device_check.py (what runs).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from manifests import doctor_devices as judge
from manifests.doctor_ask import Answer, Question, ask
from manifests.doctor_finding import Finding

TRAINING = "stage2_train.device_check"
EXTRACTION = "stage1_extract.device_check"


@dataclass(frozen=True, kw_only=True)
class Probing:
    """What to try: `devices` is how many NVIDIA devices the machine has, `announce` tells what is asked now."""

    target: str | None
    """None: the bundled one."""
    deadline_s: float
    devices: int
    announce: Callable[[str], None]


def device_findings(probing: Probing) -> Iterator[list[Finding]]:
    """Torch, then on each device matrix product, attention and step, then all GPUs together, then the target.

    Compiled code goes to a fresh folder that all devices share: the first one shows that compiling works, the others
    take what it made.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-doctor-cache-") as folder:
        asker = _Asker(probing, Path(folder))
        probing.announce("loading torch")
        question = asker.question(f"{TRAINING}:devices")
        answer = asker.ask(question)
        yield judge.judge_torch(answer, question, probing.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if answer.value is None:
            return
        gpus = {gpu["device"]: gpu["name"] for gpu in answer.value["gpus"]}
        devices = ["cpu", *gpus]
        answers, questions = asker.each(f"{TRAINING}:matmul", devices, "matrix product")
        yield judge.judge_matmuls(answers, questions, gpus)
        answers, questions = asker.each(f"{TRAINING}:attention", devices, "attention, forward and backward")
        yield [judge.judge_attention(device, answers[device], questions[device]) for device in devices]
        answers, questions = asker.each(f"{TRAINING}:step", devices, "training step")
        yield [judge.judge_step(device, answers[device], questions[device]) for device in devices]
        if len(gpus) > 1:
            yield [_together(asker, list(gpus))]
        yield list(_target(asker, devices[1] if gpus else "cpu"))


def _together(asker: _Asker, gpus: Sequence[str]) -> Finding:
    asker.probing.announce("all GPUs: a sum over processes")
    question = asker.question(f"{TRAINING}:together", ",".join(gpus))
    return judge.judge_together(question.arguments[0], asker.ask(question), question)


def _target(asker: _Asker, device: str) -> Iterator[Finding]:
    """The fast kernels where there is a GPU, and the target on the first device."""
    missing: tuple[str, ...] = ()
    if device != "cpu":
        asker.probing.announce(f"{device}: fast kernels of hybrid targets")
        question = asker.question(f"{EXTRACTION}:fast_paths")
        answer = asker.ask(question)
        yield judge.judge_fast_paths(answer, question)
        missing = tuple(name for name, why in (answer.value or {}).items() if why)
    target, name = asker.probing.target or str(bundled_target()), asker.probing.target or "the bundled target"
    asker.probing.announce(f"{device}: loading {name}")
    question = asker.question(f"{EXTRACTION}:load", target, device)
    yield judge.judge_load(name, device, asker.ask(question), question, missing)


def bundled_target() -> Path:
    """The folder of the small target that comes with the package."""
    return Path(str(resources.files("shared") / "bundled" / "target"))


class _Asker:
    """Asks with one deadline and one folder of compiled code; a stop ends what is being asked."""

    def __init__(self, probing: Probing, cache: Path) -> None:
        self.probing = probing
        self._stop = threading.Event()
        self._environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }

    def question(self, entry: str, *arguments: str) -> Question:
        return Question(entry, arguments, self._environment)

    def ask(self, question: Question) -> Answer:
        return ask(question, self.probing.deadline_s, self._stop)

    def each(self, entry: str, devices: Sequence[str], what: str) -> tuple[dict[str, Answer], dict[str, Question]]:
        """The CPU and the first GPU one after the other, then the other GPUs side by side."""
        questions = {device: self.question(entry, device) for device in devices}
        answers = {}
        for device in devices[:2]:
            self.probing.announce(f"{device}: {what}")
            answers[device] = self.ask(questions[device])
        if rest := devices[2:]:
            self.probing.announce(f"{rest[0]} to {rest[-1]}: {what}")
            with ThreadPoolExecutor(min(len(rest), max(1, (os.cpu_count() or 1) // 4))) as pool:
                asked = [pool.submit(self.ask, questions[device]) for device in rest]
                try:
                    answers |= dict(zip(rest, [one.result() for one in asked], strict=True))
                except BaseException:
                    self._stop.set()
                    raise
        return answers, questions
