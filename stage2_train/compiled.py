"""The compile contract on CUDA: each declared region compiles once, before step 1; later compiles end the run.

The region is the decoder layer: one graph per kind of layer, shared by all layers of that kind. Called by train.py;
nothing here runs on the CPU path, where SDPA needs no compiler.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shared.errors import CompileContract
from stage2_train.drafter import Drafter

EAGER_FLEX = "flex_attention called without torch.compile"


def graphs() -> int:
    """Dynamo graphs compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_layers(drafter: Drafter, backend: str = "inductor") -> int:
    """Mark every layer for compilation at its first call; returns how many graphs that must give.

    fullgraph: a break, or the recompile limit, raises instead of running dense flex_attention without a word.
    """
    warnings.filterwarnings("error", message=EAGER_FLEX)
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=backend)
    return len(set(drafter.kinds))


def warm_up(once: Callable[[], None], expected: int) -> dict[str, Any]:
    """Compile by running `once` (forward and backward on the real shapes, in grad mode), then forbid any other.

    Returns {"graphs", "seconds", "again_seconds"} for the run's record. Raises CompileContract when the number of
    graphs is not `expected`.
    """
    before, started = graphs(), time.perf_counter()
    with contract("warm-up"):
        once()
    _synchronize()
    compiled = time.perf_counter()
    found = graphs() - before
    if found != expected:
        raise CompileContract(
            f"the decoder layer compiled {found} graphs, {expected} declared; something in it differs "
            "between layers (an input's dtype, stride or requires_grad)"
        )
    torch.compiler.set_stance("fail_on_recompile")
    with contract("second warm-up"):
        once()
    _synchronize()
    return {"graphs": found, "seconds": compiled - started, "again_seconds": time.perf_counter() - compiled}


@contextmanager
def contract(where: str) -> Iterator[None]:
    """Turn what a broken contract raises into one sentence: the recompile with its guard, or the eager kernel."""
    try:
        yield
    except RuntimeError as error:
        if "recompile" not in str(error):
            raise
        raise CompileContract(f"a compiled region would compile again at {where}: {_one_line(error)}") from error
    except UserWarning as error:
        if EAGER_FLEX not in str(error):
            raise
        raise CompileContract(f"flex_attention ran without its kernel at {where}") from error


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
