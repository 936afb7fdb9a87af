"""Tensor files written and read so that a full disk or a damaged file is one sentence.

Called by stage 1 (the head in a store) and stage 2 (checkpoints, exports). Renames and fsync: shared/atomic.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.atomic import disk_faults
from shared.errors import StoreDamaged


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file with the permissions of any new file. Raises DiskFull or PathNotWritable."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with disk_faults(path):
        # Made here first, because safetensors makes its files readable by their owner alone.
        path.touch()
        mode = path.stat().st_mode
        save_file(host, path, metadata=metadata)
        path.chmod(mode)


def read_tensors(path: Path, advice: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU; `advice` ends the message. Raises StoreDamaged."""
    try:
        path.open("rb").close()  # safetensors calls a file without read permission missing
        return load_file(path)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    except SafetensorError as error:
        raise StoreDamaged(f"{path} ({path.stat().st_size:,} bytes) is damaged: {error}; {advice}") from error


def write_state(path: Path, state: Any) -> None:
    """torch.save through a file of ours, whose error keeps the system's number. Raises DiskFull or PathNotWritable."""
    with disk_faults(path), path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path, advice: str) -> Any:
    """What `write_state` wrote, tensors and plain values only. Raises StoreDamaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing; {advice}") from error
    except PermissionError:
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ValueError: all mean damage here
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StoreDamaged(f"{path} is damaged ({first}); {advice}") from error
