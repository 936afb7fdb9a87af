"""Faults inside a real `dflash train` on a GPU: python tests/fault_training.py [--device cpu] [FOLDER]

One training per fault, all at the same time, of a toy drafter on a toy store: each is to end under the right name, to
give all memory of the GPU back, and to be brought to its last step by `dflash resume`. Prints a score sheet; exit
status 1 when anything is wrong. What happens to toy ranks is in fault_scenarios_cuda.py; this is the trainer itself:
compiled code, page-locked batches, copies on a stream of their own. On a CPU the kernels' faults are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.progress import tell

HERE = Path(__file__).parent
FAULT_VARIABLE = "FAULT_IN_TRAINING"
STEPS, SAVE_EVERY, FAULT_AT = 60, 20, 30
SLACK_MIB, FREE_WITHIN_S, END_S = 64, 10.0, 500.0
OPTIONS = {
    "max-length": 200, "anchors": 24, "block-size": 8, "batch-rows": 4, "num-layers": 2, "head-dim": 64,
    "steps": STEPS, "save-every": SAVE_EVERY, "eval-every": 10**6, "log-every": 10, "nproc": 1, "restarts": 0,
    "hang-limit-scale": 0.25,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens at step FAULT_AT, and what it must be called. `killed`: from outside, the worker or everything."""

    name: str
    code: str
    exit_code: int | None
    killed: str = ""
    needs_gpu: bool = False
    evidence: str = ""
    """What a line of the evidence must say."""


FAULTS = (
    Fault("device_assert", "gpu.fault", 56, needs_gpu=True),
    Fault("illegal_address", "gpu.fault", 56, needs_gpu=True),
    Fault("out_of_memory", "gpu.cuda_oom", 56, needs_gpu=True),
    Fault("sleep_on_the_gpu", "hang.busy", 54, needs_gpu=True, evidence="100 % busy"),
    Fault("wait_in_python", "hang.wait", 54),
    Fault("sigkill", "sig.kill.external", 51, killed="worker"),
    Fault("everything", "tree.killed", None, killed="everything"),
)


def main(arguments: Sequence[str]) -> int:
    """Play all, then ask, then go on."""
    from toy_store import counting_texts, make_store

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="fault-training-"))).resolve()
    cuda = options.device == "cuda"
    faults = [fault for fault in FAULTS if cuda or not fault.needs_gpu]
    store = make_store(folder / "toy.zarr", counting_texts(32), blocks=2)
    held_before = used_mib() if cuda else 0
    live = {fault.name: start(fault, store, folder / fault.name, options.device) for fault in faults}
    for fault in faults:
        if fault.killed:
            await_and_kill(fault, folder / fault.name, live[fault.name])
    codes = {name: child.wait(END_S) for name, child in live.items()}
    rows = [judged(fault, folder / fault.name, codes[fault.name]) for fault in faults]
    if cuda:
        free = wait_for(lambda: used_mib() <= held_before + SLACK_MIB, FREE_WITHIN_S)
        rows.append(("memory of the GPU", "free", f"{used_mib()} MiB in use", free))
    going = {fault.name: dflash("resume", str(folder / fault.name)) for fault in faults}
    for name, child in going.items():
        again = Fault(f"resume after {name}", "done", 0)
        rows.append(judged(again, folder / name, child.wait(END_S)))
    for name, expected, found, right in rows:
        tell(f"{name:<32} {expected:<20} {found:<60} {'right' if right else 'WRONG'}")
    wrong = sum(not right for *_, right in rows)
    tell(f"{len(rows) - wrong} of {len(rows)} right; runs are in {folder}")
    return 1 if wrong else 0


def start(fault: Fault, store: Path, run_dir: Path, device: str) -> subprocess.Popen[bytes]:
    """`dflash train` with workers that have the fault."""
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, str(HERE / "changed_worker.py"), "fault_training:work", "train"]
    line = [*command, f"--store={store}", f"--run={run_dir}", f"--device={device}", *options]
    return _spawn(line, run_dir, fault.name)


def dflash(*arguments: str) -> subprocess.Popen[bytes]:
    """The command as people call it; the fault was had already."""
    return _spawn([sys.executable, "-m", "shared", *arguments], Path(arguments[-1]))


def _spawn(line: Sequence[str], run_dir: Path, fault: str = "") -> subprocess.Popen[bytes]:
    roots = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, FAULT_VARIABLE: fault, "PYTHONPATH": os.pathsep.join(filter(None, roots))}
    run_dir.mkdir(exist_ok=True)
    with run_dir.with_name(f"{run_dir.name}.out").open("ab") as out:
        return subprocess.Popen(line, stdout=out, stderr=out, env=environment)


def judged(fault: Fault, run_dir: Path, code: int) -> tuple[str, str, str, bool]:
    """What `dflash why` says of it."""
    asked = subprocess.run(
        [sys.executable, "-m", "shared", "why", str(run_dir), "--json"], capture_output=True, text=True, check=False
    )
    try:
        said: dict[str, Any] = json.loads(asked.stdout)["verdict"]
    except (ValueError, KeyError):
        return fault.name, fault.code, f"no answer: {asked.stderr[-60:]!r}", False
    right = said["code"] == fault.code and (fault.exit_code is None or code == fault.exit_code)
    right = right and (not fault.evidence or any(fault.evidence in line for line in said["evidence"]))
    return fault.name, fault.code, f"{said['code']} ({said['confidence']}), exit {code}", right


def await_and_kill(fault: Fault, run_dir: Path, viewer: subprocess.Popen[bytes]) -> None:
    """SIGKILL at its moment to the worker alone, or to all that lives of the run."""
    from manifests.evidence import collect

    wait_for(lambda: at_moment(run_dir).exists() or viewer.poll() is not None, END_S)
    for event in collect(run_dir).events:
        mine = event["event"] == "worker spawned" or fault.killed == "everything"
        if mine and event["event"] in ("worker spawned", "supervisor started"):
            os.kill(int(event["detail"]["pid"]), signal.SIGKILL)
    if fault.killed == "everything":
        viewer.kill()


def used_mib() -> int:
    """Memory in use on all GPUs of this machine."""
    from fault_scenarios_cuda import used_mib

    return used_mib()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Until something is so, and whether it came."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def at_moment(run_dir: Path) -> Path:
    """Written by a worker just before its fault; a run that goes on has none a second time."""
    return run_dir.with_name(f"{run_dir.name}.moment")


def work(run_dir: Path, rank: int, world_size: int) -> None:
    """A real worker whose step FAULT_AT is its last."""
    import fault_cuda
    from fault_injections import wait_in_python

    from stage2_train import train as training
    from stage2_train.step import Stepper

    class Hands:
        """What the injections ask of a toy."""

        @property
        def square(self) -> Any:
            import torch

            return torch.ones(512, 512, device="cuda")

    wanted, real, hands = os.environ.get(FAULT_VARIABLE, ""), Stepper.step, Hands()
    acts: dict[str, Callable[[Any], None]] = {"wait_in_python": wait_in_python, "sigkill": wait_in_python}
    acts["everything"] = wait_in_python

    def step(stepper: Any, state: dict[str, Any], *given: Any) -> Any:
        moment = at_moment(run_dir)
        if state["global_step"] == FAULT_AT and wanted and not moment.exists():
            moment.touch()
            (acts.get(wanted) or getattr(fault_cuda, wanted))(hands)
        return real(stepper, state, *given)

    Stepper.step = step  # type: ignore[method-assign]
    training.main(run_dir, rank, world_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
