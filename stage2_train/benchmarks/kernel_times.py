"""Where the time of a step goes: the profiler's kernels by kind, matrix products by the weight they go with.

Called by stopwatch.py. On CUDA kernels are counted and the rest of the time is idle; on a CPU the operators themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_train.drafter_config import DrafterConfig

_LOSS_WORDS = ("logsumexp", "argmax", "scatter")
_GEMM_WORDS = ("gemm", "nvjet", "cutlass", "xmma", "cublas")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work: its name, when it ran (us), and the CPU operators that launched it, innermost first."""

    name: str
    start: float
    end: float
    operators: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the inputs of the innermost operator that has any."""
    in_loss: bool = False

    @property
    def time(self) -> float:
        """Microseconds."""
        return self.end - self.start


def kind_of(kernel: Kernel, config: DrafterConfig) -> str:
    """What a kernel is for, by its name, its operators and the sizes of its inputs."""
    name, operators = kernel.name.lower(), [operator.lower() for operator in kernel.operators]
    if "nccl" in name or any("nccl" in operator or "gloo" in operator for operator in operators):
        return "communication"
    if name.startswith(("memcpy", "memset")):
        return "copy"
    attention = ("flex_attention", "fmha", "flash", "scaled_dot_product")
    if any(word in text for word in attention for text in (name, *operators)):
        backward = "backward" in name or any("backward" in operator for operator in operators)
        return "attention backward" if backward else "attention forward"
    if any(operator.startswith("optimizer.step") for operator in operators) or "multi_tensor" in name:
        return "optimizer"
    if any(operator in ("aten::mm", "aten::addmm", "aten::bmm") for operator in operators[:2]) or any(
        word in name for word in _GEMM_WORDS
    ):
        return f"matmul {_weight_of(kernel.shapes, config)}"
    if kernel.in_loss or any(word in name for word in _LOSS_WORDS):
        return "loss, elementwise"
    return "fused elementwise" if "triton" in name else "eager elementwise"


def _weight_of(shapes: Sequence[Sequence[int]], config: DrafterConfig) -> str:
    """Which weight a product goes with: no two of these sizes are the same in a real drafter."""
    sizes = {size for shape in shapes for size in shape}
    names = {
        config.vocab_size: "head",
        len(config.target_layer_ids) * config.target_hidden_size: "fc",
        config.intermediate_size: "mlp",
        2 * config.intermediate_size: "mlp",
        config.num_attention_heads * config.head_dim: "q, o",
        config.num_key_value_heads * config.head_dim: "k, v",
    }
    return next((name for size, name in names.items() if size in sizes), "other")


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one kernel ran, whatever the stream."""
    total = end = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.end > end:
            total += kernel.end - max(kernel.start, end)
            end = kernel.end
    return total


def summed(kernels: Sequence[Kernel], config: DrafterConfig, steps: int) -> dict[str, Any]:
    """{"kinds": ms per step by kind, "top": the longest kernels, "wall_ms", "idle_ms"}, the times per step."""
    kinds: dict[str, float] = defaultdict(float)
    names: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        kind = kind_of(kernel, config)
        kinds[kind] += kernel.time / 1e3 / steps
        names[kind, kernel.name].append(kernel.time / 1e3)
    wall = (max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)) / 1e3
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "top": [
            {"kind": kind, "kernel": name[:90], "calls": len(found) / steps, "ms": sum(found) / steps}
            for (kind, name), found in longest
        ],
        "wall_ms": wall / steps,
        "idle_ms": (wall - busy(kernels) / 1e3) / steps,
    }


def kernel_times(profiler: Any, config: DrafterConfig, steps: int, device: str) -> dict[str, Any]:
    """`summed` over what a torch.profiler saw of `steps` steps."""
    return summed(_on_gpu(profiler, config) if device == "cuda" else _on_cpu(profiler, config), config, steps)


def _on_cpu(profiler: Any, config: DrafterConfig) -> list[Kernel]:
    """The stretches of time that an operator spends in itself, not in those that it calls."""
    events = list(profiler.events())
    loss = _loss_regions(events, config)
    found = []
    for event in (event for event in events if event.name.startswith("aten::")):
        edge = event.time_range.start
        inner = sorted((child.time_range.start, child.time_range.end) for child in event.cpu_children)
        for start, end in [*inner, (event.time_range.end, edge)]:
            if start > edge:
                found.append(_kernel(event.name, (edge, start), event, loss))
            edge = max(edge, end)
    return found


def _on_gpu(profiler: Any, config: DrafterConfig) -> list[Kernel]:
    """Kernels and copies, each with the operator that launched it as far as the profiler knows it."""
    events = list(profiler.events())
    # The runtime's own calls (cudaLaunchKernel) are numbered apart from the operators, from the same start.
    on_cpu = (event for event in events if event.device_type.name == "CPU")
    operators = {event.id: event for event in on_cpu if not event.name.startswith("cu")}
    loss = _loss_regions(list(operators.values()), config)
    found = []
    for raw in profiler.profiler.kineto_results.events():
        # Ranges that annotate the GPU's timeline are no work.
        if raw.device_type().name == "CUDA" and not raw.is_user_annotation():
            operator = operators.get(raw.linked_correlation_id())
            start = raw.start_ns() / 1e3
            found.append(_kernel(raw.name(), (start, start + raw.duration_ns() / 1e3), operator, loss))
    return found


def _kernel(name: str, times: tuple[float, float], operator: Any, loss: set[int]) -> Kernel:
    chain = _chain(operator)
    shapes = next((shapes for event in chain if (shapes := _shapes(event))), ())
    in_loss = any(event.id in loss for event in chain)
    return Kernel(name, *times, tuple(event.name for event in chain), shapes, in_loss)


def _chain(operator: Any) -> list[Any]:
    chain = []
    while operator is not None:
        chain.append(operator)
        operator = operator.cpu_parent
    return chain


def _shapes(event: Any) -> tuple[tuple[int, ...], ...]:
    shapes = event.input_shapes or []
    return tuple(tuple(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape))


def _loss_regions(events: Iterable[Any], config: DrafterConfig) -> set[int]:
    """Ids of the operators that call the head's products directly, a compiled region or an autograd function."""
    found = set()
    for event in events:
        if event.name == "aten::mm" and _weight_of(_shapes(event), config) == "head":
            above = next((e for e in _chain(event)[1:] if not e.name.startswith("aten::")), None)
            if above is not None:
                found.add(above.id)
    return found
