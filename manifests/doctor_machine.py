"""All that `dflash doctor` says about a machine without torch, and the short form for the start of a run.

`machine_findings` gathers at the edge and judges by the pure functions of the other doctor_*.py. `warnings` is what a
launch repeats in a line each. Called by manifests/doctor.py and supervisor.py. Next: manifests/doctor_memory.py.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from manifests.doctor_ask import Question, ask
from manifests.doctor_finding import Finding
from manifests.doctor_folder import FolderFacts, file_system, judge_folder, shared_memory
from manifests.doctor_gpus import GpuFacts, judge_gpus, judge_software, read_software
from manifests.doctor_limits import judge_limits, read_limits
from manifests.doctor_memory import counters, group_kill, judge_memory, read_memory
from manifests.doctor_session import container_of, judge_session, read_session, scope
from manifests.doctor_sources import mount_of, mounts
from shared.kernel import Kernel

# A disk that needs longer for twenty small writes is broken for every purpose here.
_FOLDER_DEADLINE_S = 20.0


def machine_findings(kernel: Kernel, run_dir: Path, gpus: GpuFacts, patience_s: float) -> Iterator[list[Finding]]:
    """Part by part: memory, session, disks, limits, GPUs, software. `gpus` was read by `read_gpus`.

    `patience_s` for what this machine is asked and shown (systemd, an orphan); a fixture is never.
    """
    yield judge_memory(read_memory(kernel, container_of(kernel)))
    yield judge_session(read_session(kernel, user_name(), patience_s if kernel.root == Path("/") else 0.0))
    yield judge_folder(read_folder(kernel, run_dir))
    yield judge_limits(read_limits(kernel))
    yield judge_gpus(gpus)
    yield judge_software(read_software(), gpus=bool(gpus.devices))


def warnings(kernel: Kernel, run_dir: Path) -> list[str]:
    """What a launch should say of this machine before it starts: one sentence each, [] when every promise holds.

    Reads a few small files; starts nothing, imports nothing, never raises.
    """
    facts = read_memory(kernel, container_of(kernel))
    session = read_session(kernel, user_name())
    # Asking systemd takes too long here. Services are set up by who knows, login sessions go on since systemd 253.
    unasked = session.unit.endswith(".scope") and not session.unit.startswith("session-")
    found = [
        file_system(str(run_dir), mount_of(run_dir, mounts(kernel.root))),
        shared_memory(kernel.shm()),
        group_kill(facts),
        counters(facts),
        *([scope(session)] if unasked else []),
    ]
    return [f"{one.check}: {one.found}; {one.advice}" for one in found if one.verdict != "ok"]


def read_folder(kernel: Kernel, run_dir: Path) -> FolderFacts:
    """Mount table and sizes, and the run folder tried out by a child."""
    table = mounts(kernel.root)
    temporary = Path(tempfile.gettempdir())
    answer = ask(Question("manifests.doctor_folder:measure", (str(run_dir),)), _FOLDER_DEADLINE_S)
    return FolderFacts(
        path=str(run_dir),
        mount=mount_of(run_dir, table),
        measured=answer.value or {},
        fault="" if answer.value is not None else answer.sentence(),
        shm=kernel.shm(),
        temporary=str(temporary),
        temporary_mount=mount_of(temporary, table),
        temporary_free=_free(temporary),
    )


def user_name() -> str:
    """Of this user, or his number where the machine knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _free(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
