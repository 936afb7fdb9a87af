"""What the GPUs of this machine hold and do, asked of NVML in a child process that has half a second.

NVML can block for ever on a sick GPU, inside the driver where no signal reaches: the asker must not share that fate.
Called by `dflash status` (manifests/status.py); `python -m shared.gpus` is the child. Next: manifests/status.py.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 0.5
REAP_S = 0.1


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in bytes, utilisation in percent (None where the driver does not say, as under MIG)."""

    index: int
    name: str
    uuid: str
    used: int
    total: int
    utilisation: int | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class GpuReport:
    """The GPUs that answered, and why others or all are missing ("" when none is)."""

    gpus: tuple[Gpu, ...]
    missing: str


class GpuQuestion:
    """Asks when it is made, so that the answer comes while the caller does something else."""

    def __init__(self, devices: Path = Path("/dev")) -> None:
        self._asked = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._why_not = ""
        if not any(devices.glob("nvidia*")):
            self._why_not = "no NVML: this machine has no NVIDIA device"
            return
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "shared.gpus"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._why_not = f"no NVML: its process could not be started ({os.strerror(error.errno or 0)})"

    def answer(self, deadline_s: float = DEADLINE_S) -> GpuReport:
        """What has been said by `deadline_s` seconds after the question; never waits longer, never raises."""
        if self._child is None or self._child.stdout is None:
            return GpuReport((), self._why_not)
        data, in_time = _read_until(self._child.stdout.fileno(), self._asked + deadline_s)
        self._child.kill()
        self._child.stdout.close()
        # Not longer: a child inside a stuck driver call does not end, not even by SIGKILL.
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(REAP_S)
        return _report(data, "" if in_time else f"did not answer within {deadline_s:g} s")


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """What a pipe gave, and whether it came to its end before the deadline."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return data, True
        data += piece
    return data, False


def _report(data: bytes, late: str) -> GpuReport:
    """The child's lines as a report; a line that was cut by the deadline counts for nothing."""
    said = [json.loads(line) for line in data.split(b"\n")[:-1]]
    gpus = sorted((Gpu(**line["gpu"]) for line in said if "gpu" in line), key=lambda gpu: gpu.index)
    if broken := next((line["error"] for line in said if "error" in line), ""):
        return GpuReport(tuple(gpus), f"no NVML: {broken}")
    count = next((line["count"] for line in said if "count" in line), None)
    if count is None:
        return GpuReport((), f"no NVML: it {late or 'ended without an answer'}")
    silent = sorted(set(range(count)) - {gpu.index for gpu in gpus})
    faults = {line["index"]: line["fault"] for line in said if "fault" in line}
    told = [f"GPU {index} {faults.get(index, late or 'gave no answer')}" for index in silent]
    return GpuReport(tuple(gpus), "; ".join(told))


def main() -> None:
    """The child: one JSON line with the count, then one for each GPU, each asked by a thread of its own."""
    try:
        pynvml: Any = importlib.import_module("pynvml")  # from the package nvidia-ml-py
    except ImportError:
        _tell({"error": "the package nvidia-ml-py is not installed"})
        return
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        _tell({"error": str(error)})
        return
    _tell({"count": count})
    threads = [threading.Thread(target=_ask, args=(pynvml, index), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(pynvml: Any, index: int) -> None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = _memory(pynvml, handle)
        try:
            utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except pynvml.NVMLError:
            utilisation = None
        name, uuid = (_text(call(handle)) for call in (pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetUUID))
    except pynvml.NVMLError as error:
        _tell({"index": index, "fault": f"failed: {error}"})
        return
    _tell({"gpu": asdict(Gpu(index, name, uuid, memory.used, memory.total, utilisation))})


def _memory(pynvml: Any, handle: Any) -> Any:
    """In use and in all, as nvidia-smi shows them: the first version counts what the driver reserves as used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError, AttributeError):  # an older driver, an older package
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _text(value: str | bytes) -> str:
    """Releases of the package before 11.5 give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _tell(value: dict[str, Any]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")  # one write: lines of two threads never mix


if __name__ == "__main__":
    main()
