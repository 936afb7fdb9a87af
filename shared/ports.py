"""A port of this machine for processes that will meet there: whoever chooses it is not the one who listens.

Used by manifests/spawn.py and stage2_train/device_check.py.
"""

from __future__ import annotations

import random
import socket
from contextlib import closing, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _TRIES = 10_000, 50


def free_port() -> int:
    """A port that nobody listens at, below those that the kernel gives to whoever asks for any.

    One of theirs would be free now and could be another process's before ours have started: every connection that
    somebody opens takes one.
    """
    first = 32_768
    with suppress(OSError, ValueError, IndexError):
        first = int(_RANGE.read_text().split()[0])
    dice = random.SystemRandom()  # not the generator that a run has seeded: two runs would meet
    for _ in range(_TRIES if first > _LOWEST else 0):
        with suppress(OSError):
            return _bound(dice.randrange(_LOWEST, first))
    return _bound(0)


def _bound(port: int) -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("", port))  # on all addresses, as the store of torch.distributed listens
        return int(probe.getsockname()[1])
