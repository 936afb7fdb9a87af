"""What step.py and parallel.py print of the measurements of a run. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from shared.benchmarks.measure import table
from shared.progress import summary, tell

GIB = 2**30
Found = Mapping[str, Any]


def show_ours(ours: Found) -> None:
    """Speed, share of the ceiling, waiting, memory; then compiling and the profile."""
    top = statistics.median(ours["ceilings"])
    ceilings = ", ".join(f"{value:,.4g}" for value in ours["ceilings"])
    flops = {name: value / 1e12 for name, value in ours["flops"].items()}
    summary(
        f"\nour step, {ours['parameters']:,} parameters, {ours['attention']} attention",
        [
            ("step", f"{ours['step_ms']:,.1f} ms, mean of {ours['steps']}"),
            ("median, worst", f"{ours['step_ms_median']:,.1f} ms, {ours['step_ms_worst']:,.1f} ms"),
            ("context", f"{ours['tokens_per_second']:,.0f} tokens/s"),
            ("TFLOP of a step", f"{sum(flops.values()):,.4g}"),
            ("of which", ", ".join(f"{name} {value:,.4g}" for name, value in flops.items())),
            ("TFLOP/s", f"{ours['tflops']:,.4g}"),
            ("ceiling", f"{top:,.4g} TFLOP/s, median of {ceilings} (before, middle, after)"),
            ("share of the ceiling", f"{ours['tflops'] / top:.3f}"),
            ("time between steps", f"{ours['between_steps_share']:.2%}, waiting for data is a part of it"),
            *((name, f"{value:,.4g}") for name, value in sorted(ours["metrics"].items()) if "wait" in name),
            ("memory, settled", f"{ours['memory_settled'] / GIB:.3f} GiB at the most"),
            ("memory, last step", f"{ours['memory_last'] / GIB:.3f} GiB at the most"),
            ("set up", f"{ours['set_up_s']:.1f} s, compiling included; all {ours['wall_s']:.0f} s"),
        ],
    )
    show_compile("compile, cold", ours)
    if ours["kernels"]:
        show_kernels(ours["kernels"])


def show_compile(title: str, run: Found) -> None:
    """The run's own record of what it compiled."""
    found = {name: run["events"][name] for name in ("compiled", "compile cache") if name in run["events"]}
    tell(f"\n{title}: {json.dumps(found, indent=1) if found else 'nothing is compiled here'}")


def show_kernels(kernels: Found) -> None:
    """Shares of a step by kind, and the longest kernels."""
    wall = kernels["wall_ms"]
    times = {**kernels["kinds"], "idle": kernels["idle_ms"]}
    rows = [{"kind": kind, "ms/step": ms, "share": f"{ms / wall:.1%}"} for kind, ms in times.items()]
    tell(table(f"where a step goes, {wall:,.1f} ms under the profiler (streams overlap)", rows))
    tell(table("longest kernels, ms per step", kernels["top"]))


def show_plain(plain: Found, ours: Found | None) -> None:
    """The plain version, and its time as a ratio to ours."""
    top = statistics.median(plain["ceilings"])
    pairs = [
        ("step", f"{plain['step_ms']:,.1f} ms"),
        ("TFLOP/s", f"{plain['tflops']:,.4g}, {plain['tflops'] / top:.3f} of the ceiling ({top:,.4g})"),
        ("first step", f"{plain['first_step_s']:.1f} s, compiling included"),
        ("memory", f"{(plain['memory'] or 0) / GIB:.2f} GiB"),
    ]
    if ours is not None:
        pairs.append(("plain / ours", f"{plain['step_ms'] / ours['step_ms']:.3f} in time"))
    summary("\nthe plain version", pairs)


def show_attention(found: Found) -> None:
    """One layer's attention against SDPA."""
    summary(
        "\nattention, forward and backward of one layer",
        [
            ("ours", f"{found['ours_ms']:,.2f} ms, {found['ours_tflops']:,.4g} TFLOP/s over visible pairs"),
            ("SDPA, dense mask", f"{found['dense_ms']:,.2f} ms"),
            ("ratio", f"{found['ratio']:.2f}"),
            ("visible", f"{found['visible_share']:.1%} of all pairs"),
            ("apart", ", ".join(f"{name} {value:.1e}" for name, value in found["apart"].items())),
        ],
    )
