"""Around transformers' own loading of a target: how far it is, in bytes, and which kernels it may take.

Called by shared/target.py. Fifty gigabytes from a slow disk take long and are no hang: the loading is watched through
the hook for its progress bars.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared import phases
from shared.reporter import Report
from shared.target_identity import TargetFiles

# The bar that transformers 5 draws over the tensors it puts in place.
_BAR = "Loading weights"
# Packages whose kernels transformers uses wherever they are installed.
_GPU_ONLY = ("fla", "causal_conv1d")


@contextmanager
def told(files: TargetFiles, report: Report) -> Iterator[None]:
    """Tell `report` the bytes loaded after every tensor; only the total where transformers has no such hook."""
    from transformers.utils import logging

    sizes, total = weight_bytes(files)
    report(phases.LOAD, 0, total, "bytes")
    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def hook(factory: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        bar = factory(*arguments, **named)
        return _Told(bar, len(arguments[0]), sizes, total, report) if named.get("desc") == _BAR and arguments else bar

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)
    report(phases.LOAD, total, total, "bytes")


class _Told:
    """A progress bar over (tensor's name, how it is made) that also reports."""

    def __init__(self, bar: Any, count: int, sizes: dict[str, int], total: int, report: Report) -> None:
        self._bar, self._sizes, self._total, self._report = bar, sizes, total, report
        # A tensor that the model calls otherwise than the file counts as one of average size.
        self._average = total / max(count, 1)

    def __iter__(self) -> Iterator[Any]:
        done = 0.0
        for number, item in enumerate(self._bar):
            yield item
            done += self._sizes.get(str(item[0]), self._average)
            self._report(phases.LOAD, min(round(done), self._total), self._total, "bytes", inner=number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


def weight_bytes(files: TargetFiles) -> tuple[dict[str, int], int]:
    """Bytes of each tensor by its name in the safetensors files ({} for other kinds of file), and of all together."""
    if files.gguf:
        return {}, (files.folder / files.gguf).stat().st_size
    sizes: dict[str, int] = {}
    for path in files.folder.glob("*.safetensors"):
        sizes |= _tensors_in(path)
    if sizes:
        return sizes, sum(sizes.values())
    return {}, sum(path.stat().st_size for path in files.folder.glob("*.bin"))


def _tensors_in(path: Path) -> dict[str, int]:
    """From the header; {} for a file that is not what it should be, which the loading itself will say."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= path.stat().st_size else {}
        offsets = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
        return {name: int(end) - int(start) for name, (start, end) in offsets.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@contextmanager
def kernels_for(device_type: str) -> Iterator[None]:
    """For a target on a CPU, keep transformers from packages whose kernels run on GPUs alone.

    It takes them when a family's module is first imported, whatever device the model goes to: with
    flash-linear-attention on a CUDA machine a hybrid target on the CPU ended in "Pointer argument (at 0) cannot be
    accessed from Triton (cpu tensor?)".
    """
    hidden = [name for name in _GPU_ONLY if device_type == "cpu" and name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    for name in hidden:
        modules[name] = None
    try:
        yield
    finally:
        for name in hidden:
            modules.pop(name, None)
