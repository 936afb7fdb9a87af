"""What an exception is called, from its class, its message and where it was raised.

Texts are those of torch, NCCL, gloo, CUDA and the C library as of torch 2.11 to 2.13. A text that follows from
another worker's death is a cascade: never a root while there is one. Used by manifests/verdict_deaths.py.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from shared.errors import error_classes

# The words around a lost connection that make it one between ranks, not one to a store in a bucket.
_RANKS = re.compile(r"gloo|nccl|c10d|process ?group|tcpstore|torch[./]distributed", re.IGNORECASE)
_DIST_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError|"
    r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|NCCL error|(?:communicator|process group).{0,40}abort|"
    r"recvValue failed|sendBytes failed|failed to recv|no such process",
    re.IGNORECASE,
)
_PEER_PLAIN = re.compile(r"connection (?:closed|reset) by peer", re.IGNORECASE)
_WAITED = re.compile(
    r"collective operation timeout|watchdog caught|timed? ?out (?:waiting|after)|socket timeout|"
    r"wait timeout|operation timed out|monitored ?barrier|heartbeat monitor",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"mismatch between collectives|op\.preamble\.length|collectives? (?:do(?:es)? not|don't) match|"
    r"ran (?:a )?different collective",
    re.IGNORECASE,
)
_CUDA_OOM = re.compile(
    r"CUDA out of memory|CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|"
    r"torch\.(?:cuda\.)?OutOfMemoryError|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|"
    r"Triton Error \[CUDA\]: out of memory|Cuda failure (?:\d+ )?'out of memory'",
)
_GPU_LOST = re.compile(r"GPU is lost|fallen off the bus", re.IGNORECASE)
# Another process holds it, or this one may not see it: nothing that a reset of it would mend.
_GPU_TAKEN = re.compile(r"no CUDA-capable device|busy or unavailable", re.IGNORECASE)
# NCCL's and the store's own reasons: the rank failed by itself, though the words around them are those of a lost peer.
_NO_PEER = re.compile(
    r"/dev/shm/nccl|Duplicate GPU|ncclInvalidUsage|ncclInvalidArgument|EADDRINUSE|failed to listen",
)
_GPU_FAULT = re.compile(
    r"CUDA error|CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_|cudaError[A-Z]|device-side assert|"
    r"illegal memory access|misaligned address|unspecified launch failure|uncorrectable ECC",
)
_DISK = {
    "disk.read_only": (errno.EROFS,),
    "disk.io": (errno.EIO, errno.ESTALE),
    "disk.limit": (errno.EFBIG,),
    "disk.full": (errno.ENOSPC, errno.EDQUOT),
}
_OWN = {
    "DiskFull": "disk.full",
    "StoreDamaged": "data.corrupt",
    "NonFinite": "data.nonfinite",
    "CompileContract": "compile.contract",
    "GpuFault": "gpu.fault",
    "CommunicationFailed": "comm.mismatch",
}
_LAST_LINE = re.compile(r"(?:\w+\.)*(?P<error>[A-Z]\w*)(?:: (?P<message>.*))?")
_LOGGED = re.compile(r"(?:thread (?P<thread>.{1,200}) )?ended by (?P<error>[A-Z]\w+): (?P<message>.*)")
_OWN_LOG = re.compile(r"<stdout>|<stderr>|\bprint\(|logging/__init__\.py|sys\.std(?:out|err)\.|\.log\b")


class Named(NamedTuple):
    """A code, and whether it is what a worker sees of another's death; `waited`: a collective did not come about."""

    code: str
    cascade: bool = False
    waited: bool = False


def name_error(error: str, message: str, traceback: str = "") -> Named:
    """The code of an exception by its class name; unnamed ones are py.exception."""
    known = error_classes().get(error)
    if error in _OWN:
        return Named("log.full" if _log_is_full(error, message, traceback) else _OWN[error])
    if error == "PathNotWritable":
        return Named(_disk_code(message) or "refused.path_not_writable")
    if error == "SupervisorGone":
        return Named("sup.killed", cascade=True)
    if known is not None:
        return Named(f"refused.{re.sub(r'(?<!^)(?=[A-Z])', '_', error).lower()}")
    if found := _of_text(error, message, traceback):
        return found
    if error == "OSError" and (code := _disk_code(message)):
        return Named(code)
    return Named("py.exception")


def name_text(text: str) -> Named | None:
    """What the last lines of a native crash say (NCCL's watchdog, a CUDA error that ended in abort), if anything."""
    return _of_text("", text, "")


def _of_text(error: str, message: str, traceback: str) -> Named | None:
    if error == "OutOfMemoryError" or _CUDA_OOM.search(message):
        return Named("gpu.cuda_oom")
    if _GPU_LOST.search(message):
        return Named("gpu.lost")
    if _GPU_TAKEN.search(message):
        return Named("gpu.fault")
    # Only of an exception: in the log of a native crash such a line may be a warning of an hour ago.
    if error and _NO_PEER.search(message):
        return Named("py.exception")
    between_ranks = error in _DIST_ERRORS or _RANKS.search(message) is not None
    # NCCL reports the CUDA error of a peer's lost connection as its own: between ranks, the connection comes first.
    if not (between_ranks and _PEER.search(message)) and (error == "AcceleratorError" or _GPU_FAULT.search(message)):
        return Named("gpu.fault")
    if error and error not in _DIST_ERRORS and error not in ("RuntimeError", "ConnectionError"):
        return None
    if _MISMATCH.search(message):
        return Named("comm.mismatch", waited=True)
    if _PEER_PLAIN.search(message):
        return Named("comm.peer_death", cascade=True)
    between_ranks = between_ranks or _RANKS.search(traceback[-4000:]) is not None
    if between_ranks and _WAITED.search(message):
        return Named("comm.peer_death", cascade=True, waited=True)
    if between_ranks and (_PEER.search(message) or error in _DIST_ERRORS):
        return Named("comm.peer_death", cascade=True)
    return None


def _disk_code(message: str) -> str | None:
    for code, numbers in _DISK.items():
        if any(os.strerror(value) in message for value in numbers):
            return code
    return None


def _log_is_full(error: str, message: str, traceback: str) -> bool:
    """Whether it was a line of output, not the work, that found no room: the error of a print names no file."""
    last = [line for line in traceback.splitlines() if line.startswith("  ")][-3:]
    return error == "DiskFull" and "while writing . " in message and any(_OWN_LOG.search(line) for line in last)


def from_log(lines: tuple[str, ...]) -> dict[str, str | None] | None:
    """error, message and thread of the exception that a log ends with: what a worker without an ending still said."""
    for line in reversed(lines):
        if found := _LOGGED.search(line):
            return found.groupdict()
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("Traceback (most recent call last)")]
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    begun = starts[-1] if starts else frames[0] if frames else None
    for line in lines[begun + 1 :] if begun is not None else ():
        if not line.startswith(" ") and (found := _LAST_LINE.fullmatch(line.strip())):
            return {"error": found["error"], "message": line.strip(), "thread": None}
    return None


ADVICE_BY_TEXT = (
    (
        r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|MemoryError",
        "it needs more host memory than it may have: use smaller batches, or raise its limit (ulimit -v, container)",
    ),
    (
        r"worker .{0,40}killed by signal",
        "a child process of it was killed: watch the host's memory and /dev/shm (`dflash why` has the last minute)",
    ),
    (r"unable to open shared memory|/dev/shm|torch_shm", "/dev/shm is too small: start the container with --shm-size"),
    (
        f"(?i:{_GPU_TAKEN.pattern})",
        "nvidia-smi shows who holds the GPU and its compute mode; "
        "look at CUDA_VISIBLE_DEVICES and the container's --gpus",
    ),
    (r"Too many open files", "raise the limit of open files: ulimit -n"),
    (r"can't start new thread|Resource temporarily unavailable", "raise the limit of processes: ulimit -u"),
)
