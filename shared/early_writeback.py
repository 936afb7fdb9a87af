"""Have the disk begin with bytes that were just written, and wait for them piece by piece, each a sign of life.

Without the first the page cache takes a whole block and the disk idles meanwhile. Without the second one fsync of 14 GB
is minutes of silence on a network disk, and a healthy save a hang. Called by shard_file.py, tensors.py and atomic.py.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable

_WRITE, _WAIT = 2, 1 | 2 | 4  # SYNC_FILE_RANGE_...: start; wait for what is under way, start the rest, wait for it
PIECE_BYTES = 64 << 20
# What a disk says of the bytes themselves; anything else means that this file system cannot do it.
_OF_THE_DISK = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


@functools.cache
def _system_call() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2) of the C library; None where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def start_writing(descriptor: int, offset: int, size: int) -> None:
    """Start writing a range of a file to disk and do not wait; only a hint, so what it answers does not matter."""
    if (call := _system_call()) is not None:
        call(descriptor, offset, size, _WRITE)


def make_durable(descriptor: int, told: Callable[[int], None]) -> None:
    """fsync; `told` hears of all bytes, every 64 MiB as they are on the disk where the file system can say so.

    Raises OSError for what the disk says, also of a piece: the kernel says it once, a later fsync may not repeat it.
    """
    left, first = os.fstat(descriptor).st_size, 0
    while left > PIECE_BYTES and _written(descriptor, first):
        left, first = left - PIECE_BYTES, first + PIECE_BYTES
        told(PIECE_BYTES)
    os.fsync(descriptor)
    told(left)


def _written(descriptor: int, first: int) -> bool:
    """Wait for one piece; False when that is not possible here."""
    call = _system_call()
    if call is None:
        return False
    if call(descriptor, first, PIECE_BYTES, _WAIT) == 0:
        return True
    if (number := ctypes.get_errno()) in _OF_THE_DISK:
        raise OSError(number, os.strerror(number))
    return False
