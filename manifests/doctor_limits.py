"""Resource limits and rights: what stops a run for no visible reason, and what evidence could be had afterwards.

`read_limits` gathers, `judge_limits` is pure. Called by manifests/doctor_machine.py. Next: manifests/doctor_gpus.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.doctor_finding import Finding, size
from manifests.doctor_sources import text_of
from shared.kernel import Kernel

# Readers, libraries and ranks of one training on eight GPUs have held about 1,500 files open.
_FEW_FILES, _TOO_FEW_FILES = 4096, 256
_FEW_PROCESSES = 4096
_LARGE_FILE = 64 << 30
_CAP_SYS_PTRACE = 19
_PTRACE = {"1": "only of descendants", "2": "only with CAP_SYS_PTRACE", "3": "of nobody"}


@dataclass(frozen=True)
class LimitFacts:
    """Soft limits by the names of /proc/self/limits (None: unlimited), and rights."""

    soft: Mapping[str, int | None]
    hard: Mapping[str, int | None]
    core_pattern: str
    ptrace_scope: str
    """ "0" to "3", "" without Yama."""
    may_ptrace: bool
    """CAP_SYS_PTRACE."""
    py_spy: bool
    kmsg: bool
    pidfd: bool
    kernel: str
    infiniband: bool


def read_limits(kernel: Kernel) -> LimitFacts:
    """Gather the facts below `kernel.root`; pidfd and py-spy are of this process."""
    root = kernel.root
    soft, hard = _limits(text_of(root / "proc/self/limits"))
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of(root / "proc/self/status"), re.MULTILINE)
    return LimitFacts(
        soft=soft,
        hard=hard,
        core_pattern=text_of(root / "proc/sys/kernel/core_pattern"),
        ptrace_scope=text_of(root / "proc/sys/kernel/yama/ptrace_scope"),
        may_ptrace=capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1),
        py_spy=shutil.which("py-spy") is not None or (Path(sys.executable).parent / "py-spy").exists(),
        kmsg=_opens(root / "dev/kmsg"),
        pidfd=_has_pidfd(),
        kernel=text_of(root / "proc/sys/kernel/osrelease"),
        infiniband=any((root / "sys/class/infiniband").glob("*")),
    )


def judge_limits(facts: LimitFacts) -> list[Finding]:
    """The findings of the part "limits"."""
    return [
        _files(facts),
        _address_space(facts),
        _file_size(facts),
        _processes(facts),
        _locked(facts),
        _core(facts),
        _stacks(facts),
        _kernel_log(facts),
        _kernel(facts),
    ]


def _files(facts: LimitFacts) -> Finding:
    soft, hard = facts.soft.get("open files"), facts.hard.get("open files")
    found = f"{_count(soft)} (may be raised to {_count(hard)})"
    if soft is None or soft >= _FEW_FILES:
        return Finding("limits", "open files", "ok", found)
    advice = "ulimit -n 65536, in the shell that starts the run"
    return Finding("limits", "open files", "broken" if soft < _TOO_FEW_FILES else "limited", found, advice)


def _address_space(facts: LimitFacts) -> Finding:
    soft = facts.soft.get("address space")
    if soft is None:
        return Finding("limits", "address space", "ok", "unlimited")
    advice = "ulimit -v unlimited: CUDA maps far more than it uses, and what exceeds this is a MemoryError, no OOM kill"
    return Finding("limits", "address space", "limited", size(soft), advice)


def _file_size(facts: LimitFacts) -> Finding:
    soft = facts.soft.get("file size")
    if soft is None or soft >= _LARGE_FILE:
        return Finding("limits", "file size", "ok", "unlimited" if soft is None else size(soft))
    advice = "ulimit -f unlimited: a checkpoint that is larger ends the run"
    return Finding("limits", "file size", "limited", size(soft), advice)


def _processes(facts: LimitFacts) -> Finding:
    soft = facts.soft.get("processes")
    if soft is None or soft >= _FEW_PROCESSES:
        return Finding("limits", "processes", "ok", _count(soft))
    advice = "ulimit -u 65536: threads count, and each worker has dozens"
    return Finding("limits", "processes", "limited", _count(soft), advice)


def _locked(facts: LimitFacts) -> Finding:
    soft = facts.soft.get("locked memory")
    if soft is None or not facts.infiniband:
        why = (
            ""
            if soft is None
            else "; only InfiniBand needs more, and there is none (CUDA's page-locked memory is free)"
        )
        return Finding("limits", "locked memory", "ok", ("unlimited" if soft is None else size(soft)) + why)
    advice = "ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL registers its buffers with InfiniBand"
    return Finding("limits", "locked memory", "limited", f"{size(soft)}, and InfiniBand is there", advice)


def _core(facts: LimitFacts) -> Finding:
    soft = facts.soft.get("core file size")
    if soft == 0:
        return Finding(
            "limits", "core files", "ok", "none: a crash leaves Python's stacks (faulthandler), no core file"
        )
    found = f"{'unlimited' if soft is None else size(soft)}, pattern {facts.core_pattern or 'unknown'}"
    if facts.core_pattern.startswith("|"):
        return Finding("limits", "core files", "ok", f"{found}: a program of the host takes them")
    advice = "ulimit -c 0, or keep room for it: a core file is as large as the worker"
    return Finding("limits", "core files", "limited", found, advice)


def _stacks(facts: LimitFacts) -> Finding:
    scope = facts.ptrace_scope
    allowed = facts.may_ptrace or scope in ("", "0")
    rights = "allowed" if allowed else f"{_PTRACE.get(scope, 'scope ' + scope)} (ptrace_scope {scope})"
    found = f"ptrace {rights}, py-spy {'there' if facts.py_spy else 'not installed'}"
    if allowed and facts.py_spy:
        return Finding("limits", "stacks of a hang", "ok", found)
    advice = (
        "pip install py-spy" if allowed else "docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0"
    )
    return Finding("limits", "stacks of a hang", "limited", f"{found}: Python's frames only, by faulthandler", advice)


def _kernel_log(facts: LimitFacts) -> Finding:
    if facts.kmsg:
        return Finding("limits", "kernel log", "ok", "readable")
    return Finding(
        "limits", "kernel log", "limited", "not readable: the driver's Xid errors and OOM reports cannot be looked up",
        "sudo dmesg -T | grep -E 'Xid|oom' after a death, or sysctl kernel.dmesg_restrict=0",
    )  # fmt: skip


def _kernel(facts: LimitFacts) -> Finding:
    found = f"Linux {facts.kernel or 'unknown'}, pidfd {'works' if facts.pidfd else 'refused'}"
    if facts.pidfd:
        return Finding("limits", "kernel", "ok", found)
    advice = "nothing to do: a process is then known by pid and start time"
    return Finding("limits", "kernel", "ok", found, advice)


def _limits(table: str) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """Soft and hard limits by name ("open files") from the text of /proc/self/limits."""
    soft: dict[str, int | None] = {}
    hard: dict[str, int | None] = {}
    for name, first, second in re.findall(r"^Max (.+?)\s{2,}(\w+)\s+(\w+)", table, re.MULTILINE):
        soft[name], hard[name] = (None if value == "unlimited" else int(value) for value in (first, second))
    return soft, hard


def _count(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _opens(path: Path) -> bool:
    """Whether it can be opened: with dmesg_restrict the permissions of /dev/kmsg promise what the kernel refuses."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _has_pidfd() -> bool:
    """Old kernels have no pidfd, and some seccomp filters of containers refuse it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True
