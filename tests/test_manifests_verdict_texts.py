"""What native crashes, NCCL and CUDA write, in full, and the names that it must get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verdict_night import Night
from verdict_scenarios import scenarios

from manifests.evidence_files import log_tails
from manifests.verdict import Verdict, verdict
from manifests.verdict_errors import name_error, name_text
from manifests.worker_process import _tail

FRAMES = (
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f12 in /app/lib/libc10.so)",
    *(f"frame #{i}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x{i:x} (0x7f1{i:x} in /app/lib/libtorch_cuda.so)"
      for i in range(1, 16)),
    "frame #16: clone + 0x44 (0x7f99 in /lib/libc.so.6)",
)  # fmt: skip
ILLEGAL = (
    "terminate called after throwing an instance of 'c10::Error'",
    "  what():  CUDA error: an illegal memory access was encountered",
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 "
    "(most recent call first):",
    *FRAMES,
    "",
)
WATCHDOG = (
    "[rank1]:[E] ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:686 "
    "(most recent call first):",
    *FRAMES,
    "",
)


def crash(lines: tuple[str, ...], ranks: tuple[int, ...] = (1,), *, recorded: bool = True) -> Verdict:
    """Ranks that abort with these last lines, in the supervisor's record or only in the log."""
    night = Night(supervised=recorded)
    if recorded:
        night.sampled(30)
    for rank in ranks:
        if recorded:
            night.died(30.3, rank, signal=6, lines=lines)
        else:
            night.beat(30.3, rank)
            night.logs[f"train-{rank}.log"] = lines
    return verdict(night.failed(33).evidence() if recorded else night.evidence())


@pytest.mark.parametrize("lines", [ILLEGAL, WATCHDOG])
def test_a_native_backtrace_does_not_push_the_fault_out(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "train-1.log"
    log.write_text("step 7\n" * 100 + "\n".join((*lines, *FRAMES, *FRAMES)) + "\n")
    kept = _tail(log, 0, 12)
    assert name_text("\n".join(kept)) is not None
    assert len(kept) == 12
    assert not any(line.startswith("frame #") for line in kept)
    tail = log_tails(tmp_path, "train", [])["train-1.log"]
    assert name_text("\n".join(tail)) is not None
    assert len(tail) == 40
    ranks = (0, 1) if lines is WATCHDOG else (1,)
    found = crash(tuple(kept), ranks)
    assert found.code == ("comm.mismatch" if lines is WATCHDOG else "gpu.fault")
    assert found.ranks == ranks


def test_frames_of_the_fault_file_and_other_lines_stay(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("frame #1: a\nframe #x: b\nframe #7\n1: c\n")
    assert _tail(log, 0, 30) == ["frame #x: b", "frame #7", "1: c"]
    assert _tail(log, 0, 30, first=True)[0] == "frame #1: a"


def test_a_silent_rank_is_named_by_a_log_that_ends_in_frames() -> None:
    traceback = (
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "ValueError: no such row",
        *FRAMES,
    )
    found = crash(traceback, recorded=False)
    assert (found.code, found.confidence) == ("py.exception", "likely")


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5\n{}\nLast error:\n{}"
)
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."
SEGMENT = (
    "Error while creating shared memory segment /dev/shm/nccl-9xK2 (size 33030528), error: No space left on device (28)"
)
TWICE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000"
PORT = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    ("error", "message", "code", "cascade"),
    [
        ("DistBackendError", NCCL.format("unhandled system error", SYSTEM, SEGMENT), "py.exception", False),
        ("DistBackendError", NCCL.format("invalid usage", USAGE, TWICE), "py.exception", False),
        ("DistBackendError", NCCL.format("u", CUDA, "Cuda failure 'out of memory'"), "gpu.cuda_oom", False),
        ("DistBackendError", NCCL.format("u", CUDA, "Cuda failure 2 'out of memory'"), "gpu.cuda_oom", False),
        ("DistNetworkError", PORT, "py.exception", False),
        (
            "DistBackendError",
            NCCL.format("u", SYSTEM, "socketPollConnect: Connection refused"),
            "comm.peer_death",
            True,
        ),
        ("RuntimeError", "CUDA driver error: out of memory", "gpu.cuda_oom", False),
        ("RuntimeError", "Triton Error [CUDA]: out of memory", "gpu.cuda_oom", False),
        ("AcceleratorError", "CUDA error: all CUDA-capable devices are busy or unavailable", "gpu.fault", False),
        ("RuntimeError", "No CUDA-capable device is detected", "gpu.fault", False),
        ("RuntimeError", "CUDA error: GPU is lost", "gpu.lost", False),
    ],
)
def test_a_reason_of_its_own_goes_before_the_words_of_a_lost_peer(
    error: str, message: str, code: str, cascade: bool
) -> None:
    named = name_error(error, message)
    assert (named.code, named.cascade) == (code, cascade)


def raised(error: str, message: str) -> Verdict:
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    night.raised(30.3, 1, error, f"{error}: {message}")
    night.asked_away(31.5, 0)
    return verdict(night.failed(33).evidence())


def test_a_full_dev_shm_under_nccl_is_advised_on() -> None:
    found = raised("DistBackendError", NCCL.format("unhandled system error", SYSTEM, SEGMENT))
    assert (found.code, found.ranks, found.confidence) == ("py.exception", (1,), "proved")
    assert "; last error: Error while creating shared memory segment /dev/shm/nccl-9xK2" in found.sentence
    assert "--shm-size" in found.advice
    assert "; last error: Duplicate GPU" in raised("DistBackendError", NCCL.format("u", USAGE, TWICE)).sentence
    assert "last error" not in raised("ValueError", "a\nb").sentence


def test_a_gpu_that_is_taken_is_not_to_be_reset() -> None:
    for text in ("CUDA error: all CUDA-capable devices are busy or unavailable", "no CUDA-capable device is detected"):
        found = raised("RuntimeError", text)
        assert found.code == "gpu.fault"
        assert "nvidia-smi shows who holds the GPU and its compute mode" in found.advice
        assert "CUDA_VISIBLE_DEVICES" in found.advice
    assert "compute mode" not in raised("RuntimeError", "CUDA error: misaligned address").advice
    lost = raised("RuntimeError", "CUDA error: GPU is lost")
    assert "after its other users have saved" in lost.advice


def test_a_rank_that_we_asked_to_leave_is_not_missed() -> None:
    def waited(asked: bool, **facts: Any) -> Verdict:
        night = Night(ranks=3)
        night.sampled(30)
        night.beating(30.2)
        for rank in (0, 1):
            night.raised(30.3, rank, "DistBackendError", f"DistBackendError: {WATCHDOG[0]}")
        if asked:
            night.asked_away(31.5, 2)
        return verdict(night.failed(33).evidence(**facts))

    assert (waited(asked=False).code, waited(asked=False).ranks) == ("comm.mismatch", (2,))
    assert (waited(asked=True).code, waited(asked=True).ranks) == ("comm.mismatch", (0, 1))
    assert "for rank 2" not in waited(asked=True).sentence


def test_the_advice_for_a_run_of_torchrun_names_what_works_there() -> None:
    launched = {"detail": {"provenance": {"world_size": 2}}}
    for scenario in scenarios():
        made = scenario.evidence
        found = verdict(
            replace(
                made, run=(made.run or {}) | launched, supervisor=None, now=replace(made.now, supervisor_alive=None)
            )
        )
        assert "dflash resume" not in found.advice, scenario.name
        assert "dflash logs" not in found.advice, scenario.name
        assert found.code in ("running", "done") or "run the same torchrun command again" in found.advice, found
    night = Night(supervised=False)
    night.beating(30.0)
    night.ending(30.2, 0, "RuntimeError", "Connection reset by peer")
    made = night.evidence()
    ours = verdict(made)
    assert ours.advice == "read the last lines (`dflash logs runs/a`); then: `dflash resume runs/a`"
    theirs = verdict(replace(made, run=(made.run or {}) | launched))
    assert (theirs.code, theirs.advice) == (
        ours.code,
        "read the last lines (kept by torchrun or Slurm: the terminal, --log-dir, slurm-*.out); then: run the same "
        "torchrun command again (or srun)",
    )
