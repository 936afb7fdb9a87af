"""`dflash doctor`: what this machine can and cannot promise, line by line, and what to do about it.

First what the kernel, systemd, disks and drivers say (doctor_machine.py), then what torch can do on each device
(doctor_probes.py), every try in a process of its own. This process never loads torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shared.config import FilePath
from shared.errors import ConfigRefused, MachineUnfit
from shared.progress import say, tell

if TYPE_CHECKING:
    from manifests.doctor_finding import Finding

# Without persistence mode eight GPUs take nvidia-smi several seconds.
_QUICK_S, _PATIENT_S = 1.2, 30.0


@click.command()
@click.option("--quick", is_flag=True, help="Only what needs no torch; within two seconds.")
@click.option("--target", help="Target to load: folder, GGUF folder or Hub id.  [default: the bundled one]")
@click.option(
    "--run-dir",
    type=FilePath(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where runs will be; its disk is tried out.",
)
@click.option("--deadline", type=float, default=300.0, show_default=True, help="Seconds for each try with torch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(quick: bool, target: str | None, run_dir: Path, deadline: float, as_json: bool) -> None:
    """Say what this machine can and cannot promise, and try every part of both stages alone.

    Each line is ok, limited (work runs, a promise does not hold) or broken (exit 46), with what to do.

    \b
    dflash doctor
    dflash doctor --quick --run-dir /fast/disk/runs
    dflash doctor --target Qwen/Qwen3-8B --json
    """
    from manifests.doctor_finding import worst

    if not deadline > 0:
        raise ConfigRefused(f"--deadline is {deadline}; it must be above 0 seconds")
    started = time.monotonic()
    found: list[Finding] = []
    for findings in _examine(quick, target, run_dir, deadline):
        if not as_json:
            _show(findings, "" if not found else found[-1].part)
        found += findings
    broken = [finding.check for finding in found if finding.verdict == "broken"]
    limited = sum(finding.verdict == "limited" for finding in found)
    if as_json:
        report = {"verdict": worst(found), "seconds": round(time.monotonic() - started, 1)}
        tell(json.dumps(report | {"findings": [finding.as_dict() for finding in found]}, indent=2))
    if broken:
        raise MachineUnfit(
            f"{len(broken)} of {len(found)} checks are broken: {', '.join(broken)}; what to do is beside each"
        )
    if not as_json:
        tell(f"\n{len(found)} checks in {time.monotonic() - started:.0f} s: {limited} limited, none broken")


def _examine(quick: bool, target: str | None, run_dir: Path, deadline: float) -> Iterator[list[Finding]]:
    from manifests.doctor_gpus import read_gpus
    from manifests.doctor_machine import machine_findings
    from manifests.doctor_probes import Probing, device_findings
    from manifests.doctor_session import REAPED_WITHIN_S
    from shared.kernel import Kernel

    kernel = Kernel()
    gpus = read_gpus(kernel.root, _QUICK_S if quick else _PATIENT_S)
    yield from machine_findings(kernel, run_dir, gpus, 1.0 if quick else REAPED_WITHIN_S)
    if not quick:
        probing = Probing(
            target=target, deadline_s=deadline, devices=gpus.devices, announce=lambda text: say(f"... {text}")
        )
        yield from device_findings(probing)


def _show(findings: list[Finding], part_before: str) -> None:
    for finding in findings:
        if finding.part != part_before:
            tell(finding.part if not part_before else f"\n{finding.part}")
            part_before = finding.part
        for line in finding.lines():
            tell(line)
