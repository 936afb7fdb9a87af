"""Have the disk begin with bytes that were just written, long before the fsync that makes them durable.

Without it the page cache takes a whole block first and the disk idles meanwhile. Called by shared/shard_file.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SYNC_FILE_RANGE_WRITE = 2


@functools.cache
def _system_call() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2) of the C library; None where there is none."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def start_writing(descriptor: int, offset: int, size: int) -> None:
    """Start writing a range of a file to disk and do not wait; only a hint, so what it answers does not matter."""
    if (call := _system_call()) is not None:
        call(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)
