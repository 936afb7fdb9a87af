"""GPUs and software as far as nobody has to load them: nvidia-smi, NVML, package versions, the C compiler.

`read_gpus` and `read_software` gather, the judges are pure. Called by manifests/doctor.py and doctor_machine.py. What
a GPU can do is tried out by manifests/doctor_probes.py.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from manifests.doctor_finding import Finding, size
from shared.gpus import GpuQuestion

_MIB = 1 << 20
# What a driver keeps for itself on an idle GPU is less.
_HELD = 1 << 30
_GONE_S = 0.5
PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d", "einops")
_HYBRID = ("flash-linear-attention", "causal-conv1d", "einops")


@dataclass(frozen=True)
class Card:
    """One GPU as nvidia-smi describes it; "" or None where the driver does not say."""

    index: int
    name: str
    total: int | None
    used: int | None
    ecc: str
    uncorrected: int
    """ECC errors since the driver was loaded that could not be corrected."""
    remapping: str
    """ "pending" or "failed" when rows of its memory wait for a reset or have no spare left."""
    recovery: str
    """What the driver wants done to it: None, Reset, Reboot, ... ("" before driver 570)."""
    persistence: bool
    compute_mode: str
    processes: tuple[tuple[int, str, int | None], ...]
    """(pid, name, bytes) of who holds memory, as far as this container sees them."""


@dataclass(frozen=True)
class GpuFacts:
    """`devices` counts /dev/nvidia0, ...; `fault` says why nvidia-smi gave nothing."""

    devices: int
    cards: tuple[Card, ...]
    driver: str
    cuda: str
    fault: str
    nvml: str
    """ "" when `dflash status` can ask NVML, else why not."""


@dataclass(frozen=True)
class SoftwareFacts:
    """Installed versions ("" for none) and what compiles."""

    versions: Mapping[str, str]
    broken: tuple[str, ...]
    """Packages of which only the metadata is there."""
    compiler: str
    headers: bool
    """Python.h, which Triton's launchers are compiled with."""


def read_gpus(root: Path, deadline_s: float) -> GpuFacts:
    """Ask nvidia-smi and NVML side by side, both with `deadline_s` seconds."""
    devices = len(list((root / "dev").glob("nvidia[0-9]*")))
    question = GpuQuestion(root / "dev")
    text, fault = _nvidia_smi(deadline_s) if devices else ("", "")
    cards, driver, cuda = parse_smi(text)
    return GpuFacts(devices, cards, driver, cuda, fault, question.answer(deadline_s).missing)


def read_software() -> SoftwareFacts:
    """Look packages and compiler up without importing or running any."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    compiler = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (path := shutil.which(name or ""))), ""
    )
    return SoftwareFacts(
        versions=found,
        broken=tuple(name for name in ("torch", "transformers") if found[name] and not importlib.util.find_spec(name)),
        compiler=compiler,
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    )


def judge_gpus(facts: GpuFacts) -> list[Finding]:
    """The findings of the part "GPUs"."""
    if not facts.devices and not facts.cards:
        return [Finding("GPUs", "driver", "ok", "no NVIDIA device here: both stages run on the CPU")]
    if not facts.cards:
        advice = "run nvidia-smi; in a container the NVIDIA runtime must be on (docker run --gpus all)"
        said = f"{facts.devices} NVIDIA devices, but {facts.fault or 'nvidia-smi names none'}"
        return [Finding("GPUs", "driver", "limited", said, advice)]
    cuda = f", CUDA up to {facts.cuda}" if facts.cuda else ""
    found = [Finding("GPUs", "driver", "ok", f"{facts.driver}{cuda}, {len(facts.cards)} GPUs")]
    found.append(_nvml(facts.nvml))
    found += [judge_card(card) for card in facts.cards]
    if not all(card.persistence for card in facts.cards):
        advice = "sudo nvidia-smi -pm 1: without it every first process waits seconds for the driver to load"
        found.append(Finding("GPUs", "persistence", "limited", "persistence mode is off", advice))
    return found


def judge_card(card: Card) -> Finding:
    """One GPU: what makes it unusable, else what is in the way."""
    name = f"GPU {card.index}"
    found = f"{card.name}, {size(card.used)} of {size(card.total)} in use, ECC {card.ecc or 'unknown'}"
    if card.recovery.lower() not in ("", "none", "n/a"):
        advice = f"the driver asks for it: {card.recovery} (nvidia-smi -r -i {card.index}, or a reboot)"
        return Finding("GPUs", name, "broken", f"{found}, waits for {card.recovery}", advice)
    if card.remapping == "failed":
        return Finding("GPUs", name, "broken", f"{found}, no spare rows left in its memory", "have this GPU replaced")
    if card.compute_mode == "Prohibited":
        return Finding("GPUs", name, "broken", f"{found}, compute mode Prohibited", f"nvidia-smi -i {card.index} -c 0")
    if card.uncorrected or card.remapping:
        found += f", {card.uncorrected} uncorrected memory errors" + (", a remapping pending" if card.remapping else "")
        return Finding("GPUs", name, "limited", found, f"reset it when it is free: nvidia-smi -r -i {card.index}")
    if card.used is not None and card.used > _HELD:
        return Finding("GPUs", name, "limited", f"{found} by {_holders(card)}", "end these processes or use other GPUs")
    if card.compute_mode == "Exclusive_Process":
        advice = f"nvidia-smi -i {card.index} -c 0, to evaluate beside a training"
        return Finding("GPUs", name, "limited", f"{found}, one process at a time", advice)
    return Finding("GPUs", name, "ok", found)


def judge_software(facts: SoftwareFacts, gpus: bool) -> list[Finding]:
    """The findings of the part "software"; compilers and fast kernels matter where there are GPUs."""
    return [_torch(facts), _hybrid(facts, gpus), _compiler(facts, gpus)]


def parse_smi(text: str) -> tuple[tuple[Card, ...], str, str]:
    """Cards, driver and highest CUDA version from `nvidia-smi -q -x`; fields that a driver lacks stay empty."""
    try:
        log = ElementTree.fromstring(text)  # the text of nvidia-smi, no stranger's
    except ElementTree.ParseError:
        return (), "", ""
    cards = tuple(_card(index, gpu) for index, gpu in enumerate(log.findall("gpu")))
    return cards, log.findtext("driver_version", ""), log.findtext("cuda_version", "")


def _card(index: int, gpu: ElementTree.Element) -> Card:
    volatile = gpu.find("ecc_errors/volatile")
    errors = [] if volatile is None else [_number(e.text) or 0 for e in volatile if "uncorrectable" in e.tag]
    remapping = ""
    for field, state in (("remapped_row_pending", "pending"), ("remapped_row_failure", "failed")):
        if gpu.findtext(f"remapped_rows/{field}", "").strip().lower() == "yes":
            remapping = state
    return Card(
        index=index,
        name=gpu.findtext("product_name", "unknown"),
        total=_mib(gpu.findtext("fb_memory_usage/total")),
        used=_mib(gpu.findtext("fb_memory_usage/used")),
        ecc=gpu.findtext("ecc_mode/current_ecc", ""),
        uncorrected=sum(errors),
        remapping=remapping,
        recovery=gpu.findtext("gpu_recovery_action", "").strip(),
        persistence=gpu.findtext("persistence_mode", "Enabled") != "Disabled",
        compute_mode=gpu.findtext("compute_mode", ""),
        processes=tuple(
            (_number(one.findtext("pid")) or 0, one.findtext("process_name", ""), _mib(one.findtext("used_memory")))
            for one in gpu.findall("processes/process_info")
        ),
    )


def _holders(card: Card) -> str:
    if not card.processes:
        return "processes that cannot be seen from here"
    return ", ".join(f"{Path(name).name or 'a process'} {pid} ({size(held)})" for pid, name, held in card.processes[:4])


def _nvml(missing: str) -> Finding:
    if not missing:
        return Finding("GPUs", "NVML", "ok", "answers: `dflash status` shows memory and utilisation")
    advice = "pip install nvidia-ml-py" if "not installed" in missing else "see whether nvidia-smi answers"
    return Finding("GPUs", "NVML", "limited", f"{missing}: `dflash status` shows no GPUs", advice)


def _torch(facts: SoftwareFacts) -> Finding:
    found = ", ".join(f"{name} {facts.versions[name] or '-'}" for name in ("torch", "triton", "transformers"))
    missing = [name for name in ("torch", "transformers") if not facts.versions[name]]
    if missing or facts.broken:
        what = f"{' and '.join([*missing, *facts.broken])} not installed or damaged"
        return Finding("software", "torch", "broken", f"{found}: {what}", "pip install 'dflash-offline'")
    return Finding("software", "torch", "ok", found)


def _hybrid(facts: SoftwareFacts, gpus: bool) -> Finding:
    found = ", ".join(f"{name} {facts.versions[name] or 'missing'}" for name in _HYBRID)
    if all(facts.versions[name] for name in _HYBRID):
        return Finding("software", "fast kernels", "ok", found)
    if not gpus:
        return Finding("software", "fast kernels", "ok", f"{found} (CUDA only, for hybrid targets such as Qwen3.5)")
    advice = (
        "for hybrid targets (Qwen3.5): pip install 'dflash-offline[gpu]'; causal-conv1d is built against your torch"
    )
    return Finding("software", "fast kernels", "limited", f"{found}: hybrid targets take their slow path", advice)


def _compiler(facts: SoftwareFacts, gpus: bool) -> Finding:
    headers = "Python.h there" if facts.headers else "no Python.h"
    found = f"{facts.compiler or 'none'}, {headers}"
    if facts.compiler and facts.headers:
        return Finding("software", "C compiler", "ok", found)
    if not gpus:
        return Finding("software", "C compiler", "ok", f"{found}: only training on GPUs compiles")
    advice = "apt-get install gcc python3-dev (of this Python), or set CC: Triton compiles a launcher for each kernel"
    return Finding("software", "C compiler", "broken", found, advice)


def _nvidia_smi(deadline_s: float) -> tuple[str, str]:
    """Its report, and why there is none; inside a stuck driver no signal reaches it, so we hardly wait for its end."""
    try:
        child = subprocess.Popen(
            ["nvidia-smi", "-q", "-x"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        return "", f"nvidia-smi cannot be started ({os.strerror(error.errno or 0)})"
    try:
        said, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        assert child.stdout is not None
        child.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GONE_S)
        return "", f"nvidia-smi did not answer within {deadline_s:g} s"
    if child.returncode:
        return "", f"nvidia-smi failed: {' '.join(said.split())[:200]}"
    return said, ""


def _mib(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else value * _MIB


def _number(text: str | None) -> int | None:
    """ "81559 MiB" to 81559; None for "N/A"."""
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdecimal() else None
