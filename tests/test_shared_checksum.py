"""Checksums are CRC-32C whichever library computes them, and writing early changes no byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import checksum
from shared.checksum import crc32c
from shared.early_writeback import start_writing


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial of RFC 3720."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


@given(st.binary(max_size=200))
def test_it_is_the_polynomial_of_the_zarr_codec(data: bytes) -> None:
    assert crc32c(data) == slow_crc32c(data)
    assert crc32c(np.frombuffer(data, np.uint8)) == slow_crc32c(data)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 1 << 20])
def test_every_library_agrees_on_arrays_and_on_bytes(size: int) -> None:
    import google_crc32c

    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = google_crc32c.value(data.tobytes())
    inside: Any = checksum._from_google()
    assert inside is not None, "the C library of google_crc32c is not reached: readers hold up the training thread"
    for function in (inside, checksum._library()):
        assert function(data) == function(data.tobytes()) == expected


def test_arrays_of_any_type_count_as_their_bytes() -> None:
    values = np.arange(60, dtype=np.uint16).reshape(4, 5, 3)
    assert crc32c(values) == crc32c(values.tobytes())
    assert crc32c(values[1:3]) == crc32c(values[1:3].tobytes())
    assert crc32c(np.array([1.5, np.nan])) == crc32c(np.array([1.5, np.nan]).tobytes())


def test_starting_to_write_changes_nothing_and_refuses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("xb", buffering=0) as file:
        file.write(b"abc" * 10000)
        start_writing(file.fileno(), 0, 20000)
        start_writing(file.fileno(), 10**9, 5)
        number = file.fileno()
    assert path.read_bytes() == b"abc" * 10000
    reading, writing = os.pipe()
    start_writing(writing, 0, 5)  # a file system that cannot
    start_writing(number, 0, 5)  # nothing is open there
    os.close(reading)
    os.close(writing)
