"""Start a process that shall outlive us, or that we watch: its session, its files, its environment.

Used for the supervisor (manifests/launch.py), workers (worker_process.py) and the finishing process (finish.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.launch_spec import LaunchSpec
from shared.atomic import held_locks
from shared.phases import SCALE_VARIABLE
from shared.ports import free_port


def spawn(
    command: list[str], environment: Mapping[str, str], log: Path, *, append: bool = True, errors: Path | None = None
) -> int:
    """Start a command in a session of its own with this folder's lock; returns its pid.

    stdin is empty, stdout goes to `log`, at its end or (append false) in its place, stderr too or to the end of
    `errors`.
    """
    # posix_spawn, not subprocess: it starts the child with nothing blocked and a session of its own, whatever this
    # process blocks, and without copying it.
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    flags = appending if append else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    kept = held_locks()
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(errors), appending, 0o644) if errors else (os.POSIX_SPAWN_DUP2, 1, 2),
        # A pipe that our own shell gave us would otherwise not end before the run does.
        *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _closable() if descriptor not in kept),
        # Onto itself: the one that this process opened is closed in a child otherwise.
        *((os.POSIX_SPAWN_DUP2, descriptor, descriptor) for descriptor in kept),
    ]
    return os.posix_spawn(
        command[0],
        command,
        dict(environment),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD),
    )


def _open_descriptors() -> list[int]:
    """Beyond stdin, stdout and stderr."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]  # noqa: PTH208


def _closable() -> list[int]:
    """Open descriptors that the C library agrees to close in a child; those above the limit close at its exec.

    It refuses numbers from the limit of open files on with EBADF, and whoever lowers that limit (ulimit -n 100) may
    have left us a pipe above it.
    """
    limit = os.sysconf("SC_OPEN_MAX")
    found = _open_descriptors()
    for descriptor in found:
        if 0 <= limit <= descriptor:
            with suppress(OSError):  # that of the look itself is gone already
                os.set_inheritable(descriptor, False)
    return [descriptor for descriptor in found if limit < 0 or descriptor < limit]


def environment_of(spec: LaunchSpec) -> dict[str, str]:
    """What all ranks of one attempt are started with: a rendezvous of their own, threads that fit the cores."""
    threads = max(1, (os.cpu_count() or 1) // spec.num_workers)
    # OpenMP threads that spin while waiting made two busy workers on two cores 4x slower: wait passively.
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
    }
    fixed = {
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(spec.num_workers),
        "PYTHONUNBUFFERED": "1",
        "DFLASH_PARENT_PID": str(os.getpid()),
        SCALE_VARIABLE: str(spec.hang_limit_scale),
    }
    return {**defaults, **os.environ, **fixed, **spec.environment}
