"""What to do next, one line for each code, and the exit code that a command ends with. Used by manifests/verdict.py."""

from __future__ import annotations

import re

from manifests.evidence import Evidence
from manifests.runs import launcher_processes
from manifests.verdict_errors import ADVICE_BY_TEXT
from manifests.verdict_finding import Finding
from shared.errors import (
    CommunicationFailed,
    DiskFull,
    GpuFault,
    Interrupted,
    NoProgress,
    OutOfMemory,
    PathNotWritable,
    StoreDamaged,
    WorkerFailed,
    WorkerHung,
    WorkerKilled,
    error_classes,
)

# `dflash logs` and `dflash resume` refuse a run of torchrun: it kept the output, and only its command can begin again.
_OURS = {
    "logs": "`dflash logs {run}`",
    "rank_logs": "`dflash logs {run}{rank}`",
    "go_on": "`dflash resume {run}`",
}
_KEPT = "kept by torchrun or Slurm: the terminal, --log-dir, slurm-*.out"
_THEIRS = {"logs": _KEPT, "rank_logs": _KEPT, "go_on": "run the same torchrun command again (or srun)"}
_LESS = "use less (fewer workers, smaller batches)"
_ADVICE = {
    "running": "watch it with: `dflash logs {run} -f`",
    "done": "nothing to do",
    "py.exception": "read the traceback ({rank_logs}) and mend the cause",
    "py.thread_lost": "read the traceback ({rank_logs}) and mend the cause",
    "py.exit0_undone": "find who calls exit before the work is done ({rank_logs})",
    "py.exit_code": "read its last lines ({rank_logs})",
    "sig.bus.shm": "make /dev/shm larger (docker: --shm-size=8g; kubernetes: an emptyDir of medium Memory)",
    "sig.segv": "read the stack in {fault}; if it comes again, suspect the newest library or the hardware",
    "sig.kill.oom_cgroup": f"give the container more memory, or {_LESS}",
    "sig.kill.oom_host": f"free memory on the host, or {_LESS}",
    "sig.kill.external": "ask who or what kills processes on this host (a scheduler, an admin, a script)",
    "tree.oom_group": f"give the container or session more memory, or {_LESS} (`dflash doctor`)",
    "tree.killed": "find what ended the session or container (logout, tmux server, scheduler, admin): `dflash doctor`",
    "container.restart": "find in its orchestrator's log why the container restarted",
    "gpu.cuda_oom": "lower the batch, or free the GPU of other processes (nvidia-smi)",
    "gpu.fault": "read the traceback; CUDA_LAUNCH_BLOCKING=1 names the kernel; a GPU on which all fails is broken",
    "gpu.lost": "have the GPU reset by an administrator after its other users have saved (nvidia-smi shows which)",
    "comm.mismatch": "compare the stacks of the ranks (`dflash why {run}`): one took another way through the code",
    "hang.stopped": "find who stopped the process (SIGSTOP, Ctrl-Z, a debugger)",
    "hang.io": "look at the disk or network mount that it waits for (dmesg, mount)",
    "hang.startup": "read its last lines ({rank_logs}): it never came to its own work",
    "disk.full": "make room on the disk of {run}; finished work is kept",
    "disk.read_only": "make the disk of {run} writable again (one with errors is remounted read-only: dmesg)",
    "disk.io": "the disk or network mount answers with errors (dmesg): move to another one",
    "disk.limit": "raise the limit of file size (ulimit -f)",
    "log.full": "make room where the logs of {run} are",
    "data.corrupt": "mend the store that is named (`dflash store verify --repair`)",
    "data.nonfinite": "look at the losses before it (`dflash query`), lower the learning rate or take that data out",
    "compile.contract": "read the message ({rank_logs}); report it if you did not change the code",
    "sup.killed": "find what killed the supervisor (an admin, a script); finished work is kept",
    "progress.none": "mend the cause first: the same failure comes each time",
    "storm": "mend the cause first: it failed again and again within minutes",
    "unknown": "read the last lines ({logs})",
}
_BY_FAMILY = {
    "hang.": "look in the stacks (`dflash why {run}`) at what the named rank waits for",
    "sig.": "read the stack in {fault}",
    "refused.": "do what the message says",
}
# Nothing is to be mended before going on; nothing is to be gone on with.
_AT_ONCE = ("user.stop", "sig.term.external", "sig.int.external", "sig.hup", "host.reboot")
_NOTHING = ("running", "done")


def advice_on(evidence: Evidence, finding: Finding) -> str:
    """One line, with the run's folder in its commands."""
    code = finding.code
    rank = f" --rank {finding.ranks[0]}" if len(finding.ranks) == 1 else ""
    fault = f"{evidence.run_dir}/logs/{evidence.role}-{finding.ranks[0] if finding.ranks else 'N'}.fault"
    if code == "running" and evidence.now.supervisor_alive is None:
        return f"ask on its own host: `dflash status {evidence.run_dir}`"
    theirs = launcher_processes(evidence.run or {}) is not None
    values = {"run": evidence.run_dir, "rank": rank, "fault": fault}
    values |= {name: text.format(**values) for name, text in (_THEIRS if theirs else _OURS).items()}
    if not theirs:
        values["go_on"] = _go_on(evidence, _OURS["go_on"].format(run=evidence.moved_from or evidence.run_dir))
    if code in _AT_ONCE:
        return values["go_on"] if theirs else f"go on with: {values['go_on']}"
    family = next((text for start, text in _BY_FAMILY.items() if code.startswith(start)), _ADVICE["unknown"])
    text = _ADVICE.get(code, family)
    if code.startswith(("py.", "gpu.fault")):
        text = next((advice for words, advice in ADVICE_BY_TEXT if re.search(words, finding.sentence)), text)
    return text.format(**values) + ("" if code in _NOTHING else f"; then: {values['go_on']}")


def _go_on(evidence: Evidence, again: str) -> str:
    """The command that goes on; where the folder was moved, what must be done first."""
    if not evidence.moved_from:
        return again
    return f"put {evidence.run_dir} back in the place of {evidence.moved_from}, {again}"


_EXIT = {
    "running": 0,
    "done": 0,
    "user.stop": Interrupted.exit_code,
    "sig.kill.oom_cgroup": OutOfMemory.exit_code,
    "sig.kill.oom_host": OutOfMemory.exit_code,
    "tree.oom_group": OutOfMemory.exit_code,
    "progress.none": NoProgress.exit_code,
    "storm": NoProgress.exit_code,
    "disk.full": DiskFull.exit_code,
    "log.full": DiskFull.exit_code,
    "disk.read_only": PathNotWritable.exit_code,
    "disk.io": PathNotWritable.exit_code,
    "disk.limit": PathNotWritable.exit_code,
    "data.corrupt": StoreDamaged.exit_code,
    "data.nonfinite": error_classes()["NonFinite"].exit_code,
    "compile.contract": error_classes()["CompileContract"].exit_code,
    "unknown": WorkerFailed.exit_code,
}
_EXIT_BY_FAMILY = {
    "py.": WorkerFailed.exit_code,
    "sig.": WorkerKilled.exit_code,
    "tree.": WorkerKilled.exit_code,
    "host.": WorkerKilled.exit_code,
    "container.": WorkerKilled.exit_code,
    "sup.": WorkerKilled.exit_code,
    "hang.": WorkerHung.exit_code,
    "gpu.": GpuFault.exit_code,
    "comm.": CommunicationFailed.exit_code,
    "refused.": WorkerFailed.exit_code,
}
# A worker's own code counts only where the class that it stands for is the verdict.
_OWN = ("refused.", "sig.term.external", "sig.int.external", "disk.", "log.")


def exit_code_of(code: str, own: int | None = None) -> int:
    """The exit code of a command whose run ended so; `own`: that of the fault itself, where a class has one."""
    if own and (code.startswith(_OWN) or own == Interrupted.exit_code):
        return own
    if code.startswith("refused."):
        name = "".join(word.capitalize() for word in code.removeprefix("refused.").split("_"))
        return error_classes()[name].exit_code if name in error_classes() else WorkerFailed.exit_code
    return _EXIT.get(code) or next(
        (number for start, number in _EXIT_BY_FAMILY.items() if code.startswith(start)), _EXIT.get(code, 50)
    )
