"""CRC-32C by the fastest library that is installed, for chunks of half a megabyte that lie in the processor's cache.

`awscrt` (wide carry-less multiplication) does 30-60 GB/s there, so that checking costs nothing beside reading;
`google_crc32c`, which zarr needs anyway, 6. The latter holds the interpreter's lock, so its C library is called
directly. Used wherever the store checks bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import google_crc32c
import numpy as np

Array = np.ndarray[Any, Any]
# Below this a checksum is done sooner than the lock is given up and taken again.
_SMALL_BYTES = 1 << 16
_KNOWN = (b"123456789", 0xE3069283)


@functools.cache
def _library() -> Callable[[Any], int]:
    """crc32c(buffer of bytes)."""
    try:
        from awscrt.checksums import crc32c as fast
    except (ImportError, OSError):
        return _from_google() or google_crc32c.value
    return fast if fast(_KNOWN[0]) == _KNOWN[1] else google_crc32c.value


def _from_google() -> Callable[[Any], int] | None:
    """The C function inside google_crc32c, which lets other threads run; None when it cannot be reached."""
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_value
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32

    def value(data: Any) -> int:
        if isinstance(data, bytes):
            return int(function(data, len(data)))
        if len(data) < _SMALL_BYTES or not isinstance(data, np.ndarray):
            return int(google_crc32c.value(data))
        return int(function(data.ctypes.data, len(data)))

    return value if value(_KNOWN[0]) == _KNOWN[1] else None


def crc32c(data: Array | bytes) -> int:
    """CRC-32C of bytes or of a contiguous array's bytes."""
    if isinstance(data, np.ndarray) and (data.ndim != 1 or data.dtype != np.uint8):
        data = data.reshape(-1).view(np.uint8)
    return _library()(data)


def crc32c_of_each(chunks: Iterable[Array]) -> list[int]:
    """CRC-32C of each one-dimensional uint8 array."""
    return list(map(_library(), chunks))
