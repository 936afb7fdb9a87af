"""Tensor files written and read so that a full disk or a damaged file is one sentence.

Called by stage 1 (the head in a store) and stage 2 (checkpoints, exports). Renames and fsync: shared/atomic.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.atomic import disk_faults
from shared.early_writeback import PIECE_BYTES, make_durable, start_writing
from shared.errors import StoreDamaged


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None = None,
    told: Callable[[int], None] = lambda size: None,
) -> None:
    """A safetensors file with the permissions of any new file, durable; `told` hears of every piece that is.

    Raises DiskFull or PathNotWritable.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with disk_faults(path):
        # Made here first, because safetensors makes its files readable by their owner alone.
        path.touch()
        mode = path.stat().st_mode
        save_file(host, path, metadata=metadata)
        path.chmod(mode)
        with path.open("rb") as file:
            make_durable(file.fileno(), told)


class _Read(io.FileIO):
    """A file as torch.load wants one, read in pieces of at most 64 MiB of which `told` hears."""

    def __init__(self, path: Path, told: Callable[[int], None]) -> None:
        super().__init__(path)
        self._told = told

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and (count := super().readinto(view[done : done + PIECE_BYTES])):
            done += count
            self._told(count)
        return done

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return super().read(size)
        data = bytearray(size)
        return bytes(memoryview(data)[: self.readinto(data)])


def read_tensors(path: Path, advice: str, told: Callable[[int], None] | None = None) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU; `advice` ends the message. Raises StoreDamaged.

    They are mapped, and read only where they are used. With `told` all bytes are read now, and it hears of them.
    """
    try:
        path.open("rb").close()  # safetensors calls a file without read permission missing
        if told is not None:
            with _Read(path, told) as file:
                piece = bytearray(PIECE_BYTES)
                while file.readinto(piece):
                    pass
        return load_file(path)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    except SafetensorError as error:
        raise StoreDamaged(f"{path} ({path.stat().st_size:,} bytes) is damaged: {error}; {advice}") from error


def write_state(path: Path, state: Any, told: Callable[[int], None] = lambda written: None) -> None:
    """torch.save through a file of ours, whose error keeps the system's number. Raises DiskFull or PathNotWritable.

    `told` hears of every 64 MiB that are written, and again when they are on the disk, which begins with them at once.
    """
    with disk_faults(path), path.open("wb") as file:
        torch.save(state, cast(IO[bytes], _Written(file, told)))
        file.flush()
        make_durable(file.fileno(), told)


class _Written:
    """A file as torch.save wants one, which says how far it is every 64 MiB."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file, self._told = file, told
        self._begun = 0

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        at = self._file.tell()
        if at - self._begun >= PIECE_BYTES:
            self._file.flush()
            start_writing(self._file.fileno(), self._begun, at - self._begun)
            self._told(at - self._begun)
            self._begun = at
        return written

    def flush(self) -> None:
        self._file.flush()


def read_state(path: Path, advice: str, told: Callable[[int], None] = lambda size: None) -> Any:
    """What `write_state` wrote, tensors and plain values only; `told` hears of bytes read. Raises StoreDamaged."""
    try:
        with _Read(path, told) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    except PermissionError:
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ValueError: all mean damage here
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StoreDamaged(f"{path} is damaged ({first}); {advice}") from error
