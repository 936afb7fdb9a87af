"""The compile contract: declared regions compile once each, before step 1; whatever compiles later ends the run.

Regions: the decoder layer and the mask builder, one graph for each kind of layer, and the loss of a chunk, one graph.
On a CPU training declares none: SDPA needs no compiler. Called by compile_warm_up.py (first calls) and train.py (the
watch afterwards). Torch counts what it compiles; the private parts used for that are the same in 2.11 and 2.13.
"""

from __future__ import annotations

import importlib
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from shared.errors import CompileContract
from stage2_train.attention import tile_tables
from stage2_train.chunk_loss import score
from stage2_train.drafter import DecoderLayer, Drafter
from stage2_train.objective import Engine

EAGER_FLEX = "flex_attention called without torch.compile"
# Torch keeps 64 by default; one that fell out would be a compile that nobody counts.
_RECORDS_KEPT = 4096


@dataclass(frozen=True)
class Region:
    """A function that is compiled: `graphs` times forward, and as often backward when it is `trained`."""

    name: str
    code: CodeType
    graphs: int
    trained: bool = False


@dataclass
class Made:
    """What was compiled of one region: forward graphs, how many of them came from a cache, backward graphs."""

    graphs: int = 0
    from_cache: int = 0
    backward_compiles: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Why each graph after the first was needed: the guard that failed."""


def graphs() -> int:
    """Dynamo graphs compiled in this process so far."""
    return _counters()["stats"]["unique_graphs"]


def declare(drafter: Drafter, engine: Engine, backend: str = "inductor") -> Contract:
    """Mark what this engine compiles, for its first call, and say how many graphs that must give.

    fullgraph: a break, or the recompile limit, raises instead of running dense flex_attention without a word. Drafters
    may be sharded before or after. On a CPU nothing is compiled but flex_attention, which only tests choose there.
    """
    regions = []
    if engine.attention == "flex":
        warnings.filterwarnings("error", message=EAGER_FLEX)
        for layer in drafter.layers:
            layer.compile(fullgraph=True, dynamic=False, backend=backend)
        engine.tiles.compile(backend)
        kinds = len(set(drafter.kinds))
        regions.append(Region("decoder layer", DecoderLayer.forward.__code__, kinds, trained=True))
        regions.append(Region("mask builder", tile_tables.__code__, kinds))
    if engine.attention == "flex" or engine.device.type == "cuda":
        engine.scorer.compile(backend)
        regions.append(Region("loss", score.__code__, 1))
    return Contract(regions, kernels=backend == "inductor")


class Contract:
    """The declared regions of one process: counts what they compile, and forbids any other compile once sealed."""

    def __init__(self, regions: Sequence[Region], *, kernels: bool = True) -> None:
        """`kernels`: flex_attention must never run its dense math, which every backend but inductor does."""
        self.regions = tuple(regions)
        self.shapes = ""
        """What the regions are compiled for, in words for messages."""
        self._kernels = kernels
        self._dense: Any = None
        self._before = self._sealed = self._breaks = 0
        self.restart()

    def restart(self) -> None:
        """Count from here on (again: after a warm-up that failed)."""
        from torch._dynamo.utils import set_compilation_metrics_limit

        if self.regions:
            set_compilation_metrics_limit(_RECORDS_KEPT)
            self._before = len(_records())
            self._breaks = _counters()["graph_break"].total()

    def warm_up(self, once: Callable[[], None]) -> dict[str, Any]:
        """Compile by running `once` (forward and backward on the real shapes, in grad mode), then seal.

        `once` runs again after the seal: what it compiled must serve it. Returns the run's record: regions, seconds.
        Raises CompileContract when a region did not give the graphs that were declared.
        """
        started = time.perf_counter()
        with self.watch("the warm-up"):
            once()
        _synchronize()
        compiled = time.perf_counter()
        self._check_declared()
        self._seal()
        with self.watch("the second warm-up"):
            once()
        _synchronize()
        again = time.perf_counter() - compiled
        self.check("the second warm-up")
        found = [(region, self._made()[region.name]) for region in self.regions]
        return {
            "graphs": sum(made.graphs for _, made in found),
            "seconds": compiled - started,
            "again_seconds": again,
            "compiled_for": self.shapes,
            "regions": {
                region.name: {
                    "graphs": made.graphs,
                    "declared": region.graphs,
                    "from_cache": made.from_cache,
                    "backward_compiles": made.backward_compiles,
                    "seconds": round(made.seconds, 3),
                }
                for region, made in found
            },
        }

    def progress(self) -> tuple[int, int]:
        """(regions whose graphs are all there, graphs compiled so far, backward ones too)."""
        made = self._made()
        whole = sum(made[region.name].graphs >= region.graphs for region in self.regions)
        return whole, sum(one.graphs + one.backward_compiles for one in made.values())

    def all_from_cache(self) -> bool:
        """Whether nothing was compiled that a cache does not hold."""
        return all(made.from_cache == made.graphs for made in self._made().values())

    def check(self, where: str) -> None:
        """Nothing compiled since the seal, no graph broke. Costs no wait for the device. Raises CompileContract."""
        if not self.regions:
            return
        for record in _records()[self._sealed :]:
            raise CompileContract(
                f"{self._name(record)} compiled again before {where}, after {self._for_shapes()}: "
                f"{_one_line(record.recompile_reason or 'a backward, or a first call')}"
            )
        breaks = _counters()["graph_break"]
        if breaks.total() > self._breaks:
            raise CompileContract(f"a compiled region broke before {where}: {_one_line(next(reversed(breaks)))}")

    @contextmanager
    def watch(self, where: str) -> Iterator[None]:
        """Turn what a broken contract raises into one sentence: the region, the guard that failed, the shapes."""
        try:
            yield
        except UserWarning as error:
            if EAGER_FLEX not in str(error):
                raise
            raise CompileContract(f"flex_attention ran without its kernel at {where}") from error
        except RuntimeError as error:
            sentence = self._sentence(error, where)
            if sentence is None:
                raise
            raise CompileContract(sentence) from error

    def release(self) -> None:
        """Let this process compile again; the contract is that of one run."""
        if self.regions:
            torch.compiler.set_stance("default")
        if self._dense is not None:
            _flex().math_attention, self._dense = self._dense, None

    def _seal(self) -> None:
        self._sealed = len(_records())
        torch.compiler.set_stance("fail_on_recompile")
        if self._kernels and self._dense is None:
            self._dense, _flex().math_attention = _flex().math_attention, _refuse_dense

    def _made(self) -> dict[str, Made]:
        """By region, or by the function's name and place for what was not declared."""
        found: dict[str, Made] = {region.name: Made() for region in self.regions}
        names: dict[str, str] = {}
        for record in _records()[self._before :]:
            if record.is_forward is False:  # it says only which forward it belongs to
                made = found.setdefault(names.get(record.compile_id, "an unknown backward"), Made())
                made.backward_compiles += 1
                made.seconds += (record.duration_us or 0) / 1e6
            elif record.co_name is not None and record.fail_type is None:
                made = found.setdefault(names.setdefault(record.compile_id, self._name(record)), Made())
                made.graphs += 1
                made.from_cache += _from_cache(record)
                made.seconds += record.entire_frame_compile_time_s or 0.0
                made.reasons += [record.recompile_reason] if record.recompile_reason else []
        return found

    def _name(self, record: Any) -> str:
        if record.co_name is None:
            return "the backward of a region"
        return self._region(record.co_filename, record.co_name, record.co_firstlineno)

    def _region(self, file: str, function: str, line: int | None = None) -> str:
        for region in self.regions:
            code = region.code
            if (file, function) == (code.co_filename, code.co_name) and line in (None, code.co_firstlineno):
                return region.name
        return f"{function} ({file}{'' if line is None else f':{line}'}), which is no declared region,"

    def _check_declared(self) -> None:
        found = self._made()
        for region in self.regions:
            made = found.pop(region.name)
            if made.graphs != region.graphs:
                why = made.reasons[-1] if made.reasons else "an input's dtype, stride or requires_grad differs"
                raise CompileContract(
                    f"the {region.name} compiled {made.graphs} graphs, {region.graphs} declared, for "
                    f"{self._for_shapes()}: {_one_line(why)}"
                )
            most = region.graphs if region.trained else 0
            if not (most - made.from_cache <= made.backward_compiles <= most):
                raise CompileContract(
                    f"the {region.name} compiled {made.backward_compiles} backward graphs, {most} declared"
                )
        for name in found:
            raise CompileContract(f"{name} compiled in the warm-up; declare it or call it without torch.compile")

    def _for_shapes(self) -> str:
        return self.shapes or "the shapes of the warm-up"

    def _sentence(self, error: RuntimeError, where: str) -> str | None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

        text = str(error)
        if isinstance(error, Unsupported):
            return f"a compiled region breaks in two at {where}: {_one_line(text)}"
        if isinstance(error, FailOnRecompileLimitHit):
            return f"a compiled region reached torch's limit of graphs at {where}: {_one_line(text)}"
        if "Detected recompile when torch.compile stance" not in text:
            return None
        name, why = "a compiled region", text
        if place := re.search(r"filename: '([^']*)', function name: '([^']*)', line number: \d+(.*)", text, re.DOTALL):
            name, why = self._region(place[1], place[2]), place[3] or "its first call"
        why = why.replace("triggered by the following guard failure(s):", "")
        return f"{name} would compile again at {where}, after {self._for_shapes()}: {_one_line(why)}"


def _refuse_dense(*_arguments: Any, **_named: Any) -> Any:
    raise CompileContract("flex_attention ran its dense math instead of its kernel: a call that was never compiled")


def _flex() -> Any:
    # The attribute of the package is the operator; the module of the same name is found by import only.
    return importlib.import_module("torch._higher_order_ops.flex_attention")


def _records() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    # The rest are kernels' autotuning at their first run.
    return [record for record in get_compilation_metrics() if not record.is_runtime]


def _counters() -> dict[str, Counter[str]]:
    from torch._dynamo.utils import counters

    return counters


def _from_cache(record: Any) -> bool:
    """A whole graph came from disk: its forward and backward, or (when autograd's part is not cached) its kernels."""
    if record.aotautograd_local_cache_hit_count:
        return True
    return bool(record.inductor_fx_local_cache_hit_count) and not record.inductor_fx_local_cache_miss_count


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:600]
