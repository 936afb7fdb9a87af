"""Runs extraction many times cheaply: torch and the target are loaded once here, every trial is a fork of this process.

A program of its own (`python fault_server.py TARGET`), asked by tests/fault_extraction.py with one JSON line a request.
The command and its workers are the real ones, told apart from a real start only in being forked instead of spawned
(tests/fault_calls.py then sees their file calls) and in finding the target loaded.
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
import time
from pathlib import Path
from typing import Any

import torch
from fault_calls import Calls, Kill
from fault_client import BAD_LETTER
from tiny_target import save_target

import shared.atomic
import shared.cli
import shared.launch
import shared.worker
from shared.launch import LaunchSpec, log_path
from shared.target import Target, load_target
from stage1_extract import worker

_PDEATHSIG, _SUBREAPER = 1, 36
_running: set[int] = set()


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    if not Path(sys.argv[1]).exists():
        save_target(Path(sys.argv[1]), layers=3)
    loaded = load_target(sys.argv[1], dtype="float32", device="cpu")
    _spoil(loaded)
    worker.load_target = lambda *_, **__: loaded  # type: ignore[assignment]
    importlib.import_module("stage1_extract.extract")  # so that no trial has to
    shared.launch._spawn = _fork  # type: ignore[assignment]
    shared.launch.POLL_S = 0.005
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
        _redirect(output)
        global _calls
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


def _redirect(output: str) -> None:
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        descriptor = os.open(path, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


class _Forked:
    """What shared/launch.py uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 3600.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork(spec: LaunchSpec, rank: int, environment: dict[str, str]) -> _Forked:
    """`shared.launch._spawn` without the seconds that a new interpreter takes to import torch."""
    path = log_path(spec.run_dir, spec.role, rank)
    kept = shared.atomic.held_locks()
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # As a spawned process has it: nothing of the command is inherited, its lock above all, but what it passes on.
        for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208
            if number > 2 and number != _calls.descriptor and number not in kept:
                try:
                    os.close(number)
                except OSError:
                    continue
        _redirect(str(path))
        _calls.role = f"worker-{rank}"
        _calls.log.with_name(f"{_calls.log.name}.{os.getpid()}").touch()
        os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        sys.argv = ["worker", spec.entry, str(spec.run_dir), spec.role]
        code = shared.worker.main()
    finally:
        os._exit(code)


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
