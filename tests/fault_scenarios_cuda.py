"""What happens to a worker on a GPU: a failed assertion, a wild address, no memory, a kill, a kernel without an end.

Afterwards the GPU's memory must be free again, whatever happened. Collected by fault_scenarios.py; needs a GPU that
nobody else uses, one run at a time: `python tests/fault_matrix.py --only CUDA --jobs 1`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import fault_acts as acts
from fault_names import KILLED, hang, tree
from fault_run import Expect, Live, Scenario

_FREE_WITHIN_S = 10.0
_SLACK_MIB = 64


def used_mib() -> int:
    """Memory in use on all GPUs of this machine, in MiB."""
    line = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()))


@contextmanager
def counted(live: Live) -> Iterator[None]:
    """Note what was in use before the run."""
    live.seen["gpu_mib"] = used_mib()
    yield


def is_free_again(live: Live) -> None:
    """The memory of every rank, the dead one's first of all, goes back to the GPU."""
    limit = live.seen["gpu_mib"] + _SLACK_MIB
    deadline = time.monotonic() + _FREE_WITHIN_S
    while (used := used_mib()) > limit:
        if time.monotonic() > deadline:
            live.notes.append(f"{used} MiB in use on the GPU {_FREE_WITHIN_S:.0f} s after the end, {limit} allowed")
            return
        time.sleep(0.1)


def on_gpu(name: str, expect: Expect, *, world: int = 2, **changes: object) -> Scenario:
    """A scenario of ranks that hold memory of a GPU."""
    given = {
        "entry": "fault_cuda:work",
        "setup": counted,
        "after": is_free_again,
        "needs": "cuda",
        "phases": ("step", "checkpoint"),
        "roles": ("train",),
        "world": world,
        "prompt": False,  # CUDA's own clean-up comes between a fault and the end of its process
        **changes,
    }
    return Scenario(name=f"CUDA: {name}", expect=expect, **given)  # type: ignore[arg-type]


_FAULT = Expect(code="gpu.fault", exit_code=56, weaker=("py.exception", "py.exit_code", "sig.abrt", "unknown"))
_OOM = Expect(code="gpu.cuda_oom", exit_code=56, weaker=("py.exception", "py.exit_code", "unknown"))

CUDA = [
    on_gpu("device assert", _FAULT, fault="fault_cuda:device_assert"),
    on_gpu("illegal address", _FAULT, fault="fault_cuda:illegal_address"),
    on_gpu("out of memory", _OOM, fault="fault_cuda:out_of_memory", roles=("extract",), world=1),
    on_gpu("SIGKILL", KILLED, act=acts.kill, prompt=True),
    on_gpu("everything killed", tree("tree.killed", "proved", "likely"), act=acts.everything_killed),
    on_gpu(
        "a kernel that does not end",
        hang("busy", "hang.wait"),
        fault="fault_cuda:sleep_on_the_gpu",
        spec={"hang_limit_scale": 0.04},  # 12 s for each part of the loading, 2.4 s for a step
    ),
]
