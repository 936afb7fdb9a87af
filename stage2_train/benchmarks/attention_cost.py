"""Our attention against SDPA with a dense mask, forward and backward, at the shape of a training row.

    python -m stage2_train.benchmarks.attention_cost --shape 27b

On CUDA flex_attention with our BlockMask, compiled; on a CPU the grouped masks that training uses there. The row is one
document, where attention has the most to do. Also started by step.py.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from stage2_train.attention import Layout, build_masks, dense_mask
from stage2_train.benchmarks.made_store import fitting
from stage2_train.drafter import attention
from stage2_train.drafter_config import LayerKind
from stage2_train.flops import ATTENTION_WITH_BACKWARD, visible_pairs
from stage2_train.metrics import synchronize

_KIND = LayerKind(causal=False, window=None)


@click.command()
@click.option("--shape", default="27b", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--anchors", type=int)
@click.option("--max-length", type=int)
def main(shape: str, rounds: int, anchors: int | None, max_length: int | None) -> None:
    """Print one JSON line: ms and TFLOP/s of both, their ratio, and how far results and gradients are apart."""
    sizes = fitting(shape, anchors, max_length)
    config = sizes.geometry()
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    end = np.sort(np.random.default_rng(0).permutation(sizes.max_length - 1)[: sizes.anchors]).astype(np.int32)[None]
    start = np.zeros_like(end)
    layout = Layout(
        torch.from_numpy(start).to(device), torch.from_numpy(end).to(device), sizes.max_length, sizes.block_size
    )
    queries = sizes.anchors * sizes.block_size
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    lengths = (queries, sizes.max_length + queries, sizes.max_length + queries)
    inputs = [
        torch.randn(1, count, length, config.head_dim, device=device, dtype=dtype, requires_grad=True)
        for count, length in zip(heads, lengths, strict=True)
    ]
    upstream = torch.randn_like(inputs[0])
    run: Any = torch.compile(attention, fullgraph=True, dynamic=False) if cuda else attention
    mask = build_masks(layout, [_KIND], "flex" if cuda else "sdpa", dtype)[_KIND]
    cases = {"ours": (run, mask), "dense": (attention, dense_mask(layout, _KIND))}
    results = {name: _once(*case, inputs, upstream) for name, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            synchronize(device)
            started = time.perf_counter()
            _once(*case, inputs, upstream)
            synchronize(device)
            times[name].append(time.perf_counter() - started)
    median = {name: statistics.median(found) for name, found in times.items()}
    pairs = visible_pairs(start, end, sizes.block_size, _KIND)
    flops = ATTENTION_WITH_BACKWARD * 4 * config.num_attention_heads * config.head_dim * pairs
    found = {
        "ours_ms": 1e3 * median["ours"],
        "dense_ms": 1e3 * median["dense"],
        "ratio": median["dense"] / median["ours"],
        "ours_tflops": flops / median["ours"] / 1e12,
        "visible_share": pairs / (lengths[0] * lengths[1]),
        "apart": {
            name: _apart(ours, dense)
            for name, ours, dense in zip(("out", "dq", "dk", "dv"), results["ours"], results["dense"], strict=True)
        },
    }
    click.echo(json.dumps(found))


def _once(run: Any, mask: Any, inputs: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Result and the gradients of q, k and v."""
    out = run(*inputs, mask)
    return (out.detach(), *torch.autograd.grad(out, inputs, upstream))


def _apart(first: Tensor, second: Tensor) -> float:
    """Relative L2 distance."""
    return float((first.float() - second.float()).norm() / second.float().norm())


if __name__ == "__main__":
    main()
