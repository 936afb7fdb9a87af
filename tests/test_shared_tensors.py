"""Tensor files: the user's own permissions, and the libraries' errors as one sentence."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shared.errors import DiskFull, PathNotWritable, StoreDamaged
from shared.tensors import read_state, read_tensors, write_state, write_tensors

WEIGHTS = {"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that refuses more, without being root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_round_trip_with_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            write_tensors(tmp_path / f"{mask}.safetensors", WEIGHTS, {"format": "pt"})
            (tmp_path / f"{mask}.txt").write_text("")
        finally:
            os.umask(before)
        path = tmp_path / f"{mask}.safetensors"
        assert path.stat().st_mode == (tmp_path / f"{mask}.txt").stat().st_mode
        again = read_tensors(path, "")
        assert all(torch.equal(again[name], tensor) for name, tensor in WEIGHTS.items())
    write_state(tmp_path / "s.pt", {"step": 3, "m": WEIGHTS["a"]})
    assert read_state(tmp_path / "s.pt", "")["step"] == 3


@pytest.mark.parametrize("write", [write_tensors, write_state], ids=["safetensors", "torch"])
def test_a_disk_that_refuses_is_named_through_both_libraries(tmp_path: Path, write: object) -> None:
    assert callable(write)
    with files_of_at_most(50_000), pytest.raises((PathNotWritable, DiskFull), match=r"file"):
        write(tmp_path / "file", WEIGHTS)
    with pytest.raises(PathNotWritable, match="No such file"):
        write(tmp_path / "nowhere" / "file", WEIGHTS)


def test_a_full_disk_is_named_through_torch() -> None:
    with pytest.raises(DiskFull, match="/dev/full"):
        write_state(Path("/dev/full"), WEIGHTS)


def test_damage_is_named_with_the_file_and_the_advice(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", WEIGHTS)
    write_state(tmp_path / "s", WEIGHTS)
    for name, read in (("t", read_tensors), ("s", read_state)):
        whole = (tmp_path / name).read_bytes()
        for content in (b"", whole[:-100], b"\xff" * 100, None):
            (tmp_path / name).unlink()
            if content is not None:
                (tmp_path / name).write_bytes(content)
            else:
                assert not (tmp_path / name).exists()
            with pytest.raises(StoreDamaged, match=rf"{name} .*; do so"):
                read(tmp_path / name, "do so")
            (tmp_path / name).touch()
