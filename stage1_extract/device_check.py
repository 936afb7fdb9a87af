"""What `dflash doctor` asks of a device about stage 1: the target loaded, and one batch through it.

Called in a process of its own (manifests/doctor_child.py); manifests/doctor_devices.py says what the answers mean.
Nothing is written. Next: teacher.py, which is what extraction runs.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import torch

from shared.geometry import default_target_layer_ids
from shared.target import load_target
from stage1_extract.teacher import Teacher

DOCUMENTS, TOKENS, TOPK = 4, 256, 8
# Extra kernels of hybrid targets: distribution, module.
FAST_PATHS = (("flash-linear-attention", "fla"), ("causal-conv1d", "causal_conv1d"), ("einops", "einops"))


def fast_paths() -> dict[str, str]:
    """For each extra kernel of hybrid targets "" when it can be imported, or why not."""
    found = {}
    for package, module in FAST_PATHS:
        try:
            importlib.import_module(module)
            found[package] = ""
        except Exception as error:  # noqa: BLE001 - compiled extensions raise what they like when they do not fit
            found[package] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def load(target: str, device: str) -> dict[str, Any]:
    """Load the target as extraction does and run one batch of random tokens twice; the second run is timed.

    Raises the errors of load_target; torch.OutOfMemoryError when it does not fit.
    """
    started = time.perf_counter()
    found = load_target(target, device=device)
    loaded = time.perf_counter() - started
    vocabulary = found.embed_tokens_weight.shape[0]
    taps = default_target_layer_ids(found.num_hidden_layers, 1)
    teacher = Teacher(found, taps, topk=min(TOPK, vocabulary))
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, vocabulary, TOKENS, dtype=np.int32) for _ in range(DOCUMENTS)]
    teacher(documents)
    synchronize(found.device)
    started = time.perf_counter()
    out = teacher(documents)
    synchronize(found.device)
    seconds = time.perf_counter() - started
    parameters = list(found.model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "dtype": str(found.dtype).removeprefix("torch."),
        "load_s": loaded,
        "tokens": DOCUMENTS * TOKENS,
        "tokens_per_s": DOCUMENTS * TOKENS / seconds,
        "finite": bool(out.finite.all()),
        "linear_attention": "linear_attention" in (getattr(found.text_config, "layer_types", None) or ()),
        "peak": torch.cuda.max_memory_allocated(found.device) if found.device.type == "cuda" else None,
    }


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
