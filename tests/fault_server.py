"""Runs extraction many times cheaply: torch and the target are loaded once here, every trial is a fork of this process.

A program of its own (`python fault_server.py TARGET`), asked by tests/fault_extraction.py with one JSON line a request.
The command, its supervisor and workers are the real ones, told apart from a real start only in being forked instead of
spawned (tests/fault_calls.py then sees their file calls), in one process group, and in finding the target loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_calls import Calls, Kill
from fault_client import BAD_LETTER
from tiny_target import save_target

import manifests.crew
import manifests.finish
import manifests.launch
import manifests.supervise
import manifests.supervisor
import manifests.viewer
import manifests.worker_process
import shared.atomic
import shared.cli
import shared.worker
from manifests.launch_spec import LaunchSpec, log_path, summary_path
from shared.target import Target, load_target
from stage1_extract import worker

_PDEATHSIG, _SUBREAPER = 1, 36
_running: set[int] = set()
_server = os.getpid()


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    if not Path(sys.argv[1]).exists():
        save_target(Path(sys.argv[1]), layers=3)
    loaded = load_target(sys.argv[1], dtype="float32", device="cpu")
    _spoil(loaded)
    worker.load_target = lambda *_, **__: loaded  # type: ignore[assignment]
    importlib.import_module("stage1_extract.extract")  # so that no trial has to
    manifests.launch._start = _fork_supervisor
    manifests.worker_process._spawn = _fork_worker  # type: ignore[assignment]
    manifests.finish._start = _fork_finish
    manifests.supervise.POLL_S = manifests.crew.POLL_S = manifests.viewer._POLL_S = 0.005
    manifests.supervise.SETTLE_S = 0.05
    # Workers whose command was killed become ours, so that none is left running unseen.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _tell({"ready": True, "pid": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        _tell(_ACTIONS[request.pop("action")](**request))


def _spoil(target: Target) -> None:
    """Make the target's first layer give NaN for rows that hold the bad letter."""
    bad = target.tokenizer.encode(BAD_LETTER, add_special_tokens=False)[-1]
    seen: list[torch.Tensor] = []
    target.decoder.register_forward_pre_hook(lambda _m, _a, named: seen.append(named["input_ids"]), with_kwargs=True)
    target.layers[0].register_forward_hook(
        lambda _m, _a, out: torch.where((seen.pop() == bad).any(-1)[:, None, None], float("nan"), out)
    )


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _run(linger: bool = False, timer: dict[str, Any] | None = None, **command: Any) -> dict[str, Any]:
    """One `dflash` command. `timer`: {"seconds", "whom"} of a kill from outside; `linger`: do not wait for orphans."""
    started = time.monotonic()
    pid = _start(**command)["pid"]
    if timer:
        _kill_later(pid, Path(command["log"]), timer)
    return _finish(pid, linger) | {"seconds": time.monotonic() - started}


def _start(
    arguments: list[str],
    folder: str,
    output: str,
    log: str,
    kill: dict[str, Any] | None = None,
    contents: bool = False,
    workers_end_s: float = 60.0,
) -> dict[str, Any]:
    """Begin a command; `_finish` waits for it."""
    shared.atomic.WORKERS_END_S = workers_end_s
    pid = os.fork()
    if pid == 0:
        _become_command(arguments, Path(folder), output, Path(log), kill, contents)
    _running.add(pid)
    return {"pid": pid}


def _finish(pid: int, linger: bool = False) -> dict[str, Any]:
    """Wait for a command and, unless they may linger, for all that it left behind."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _running.discard(pid)
    if not linger:
        _reap()
    return {"code": code}


def _reap() -> dict[str, Any]:
    """Wait for every process that was left behind."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return {}


def _stop(pid: int) -> dict[str, Any]:
    """Ask a command to stop, as Ctrl-C does."""
    os.kill(pid, signal.SIGINT)
    return {}


def _workers(log: Path) -> list[int]:
    """Workers that a command started, living or ended."""
    return sorted(int(path.suffix[1:]) for path in log.parent.glob(f"{log.name}.*"))


def _kill_later(pid: int, log: Path, timer: dict[str, Any]) -> None:
    """SIGKILL after some seconds for everyone, the command, or one of the workers that live then."""
    time.sleep(timer["seconds"])
    if timer["whom"] == "everyone":
        os.killpg(pid, signal.SIGKILL)
        return
    victim = pid
    if timer["whom"] == "worker":
        workers = _workers(log)
        if not workers:
            return
        victim = random.Random(timer["seconds"]).choice(workers)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return


def _become_command(
    arguments: list[str], folder: Path, output: str, log: Path, kill: dict[str, Any] | None, contents: bool
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _redirect(output, output)
        global _calls
        Path(f"{log}.met").unlink(missing_ok=True)  # each run has its own kill
        _calls = Calls(folder, log, Kill(**kill) if kill else None, contents=contents)
        _calls.install()
        sys.argv = ["dflash", *arguments]
        shared.cli.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_calls: Calls


def _redirect(output: str, errors: str) -> None:
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        descriptor = os.open(path, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _forked(role: str, output: Path, errors: Path, run: Callable[[], int]) -> int:
    """Fork instead of starting an interpreter, which would import torch for seconds; returns the child's pid."""
    kept = shared.atomic.held_locks()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # As a spawned process has it: nothing is inherited, the lock above all, but what is passed on.
        for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208
            if number > 2 and number != _calls.descriptor and number not in kept:
                try:
                    os.close(number)
                except OSError:
                    continue
        _redirect(str(output), str(errors))
        _calls.role = role
        code = run()
    finally:
        os._exit(code)


def _fork_supervisor(spec: LaunchSpec) -> int:
    """`manifests.launch._start`; not in a session of its own: "everyone" is the trial's process group."""
    log = log_path(spec.run_dir, spec.role, "supervisor")

    def run() -> int:
        threading.Thread(target=_end_without, args=(_server,), daemon=True).start()
        os.environ[manifests.supervisor.LOCKS_VARIABLE] = ",".join(map(str, shared.atomic._held))
        shared.atomic._held.clear()
        return manifests.supervisor.main(spec.run_dir)

    return _forked("supervisor", log, log, run)


def _end_without(server: int) -> None:
    """A supervisor outlives whoever started it, and would wait for room for ever after a failed test."""
    while Path(f"/proc/{server}").exists():
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _fork_worker(spec: LaunchSpec, environment: dict[str, str], log: Path) -> int:
    """`manifests.worker_process._spawn`."""

    def run() -> int:
        _calls.log.with_name(f"{_calls.log.name}.{os.getpid()}").touch()
        os.environ.update(environment)
        sys.argv = ["worker", spec.entry, str(spec.run_dir), spec.role]
        return shared.worker.main()

    return _forked(f"worker-{environment['RANK']}", log, log, run)


def _fork_finish(spec: LaunchSpec) -> int:
    """`manifests.finish._start`."""
    summary, log = summary_path(spec.run_dir, spec.role), log_path(spec.run_dir, spec.role, "supervisor")
    summary.unlink(missing_ok=True)
    return _forked("finish", summary, log, lambda: manifests.finish.finish(spec.finish, spec.run_dir, spec.role))


def _mount(path: str, options: str) -> dict[str, Any]:
    """A memory disk; with "remount" among the options an existing one changes its size."""
    Path(path).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    return {}


def _unmount(path: str) -> dict[str, Any]:
    """Take a memory disk away, and whoever is still at work on it after a failed test."""
    for pid in list(_running):
        os.killpg(pid, signal.SIGKILL)
        _finish(pid)
    subprocess.run(["umount", path], check=True)
    return {}


_ACTIONS = {
    "run": _run,
    "start": _start,
    "finish": _finish,
    "stop": _stop,
    "reap": _reap,
    "mount": _mount,
    "unmount": _unmount,
}

if __name__ == "__main__":
    main()
