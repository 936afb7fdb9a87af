"""The plain version of the training step that ours is measured against: what one writes in an afternoon.

    python -m stage2_train.benchmarks.plain_step --shape 27b

One model, torch.compile around all of it, flex_attention with create_block_mask, cross-entropy in chunks of 2,048 rows
that makes its gradient in the forward pass, fused AdamW on bf16 weights. Features are on the device already: no store,
no clipping, no checks, no metrics. On a CPU attention is SDPA with a dense mask, flex having no backward there.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stage2_train.benchmarks.made_store import drawn, fitting
from stage2_train.drafter_config import DrafterConfig
from stage2_train.flops import step_flops
from stage2_train.metrics import ceiling, synchronize

CHUNK = 2048


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [heads,T,d] at positions [T]."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None].float() * inverse
    cos, sin = (torch.cat((part, part), -1).to(x.dtype) for part in (angle.cos(), angle.sin()))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class PlainDrafter(nn.Module):
    """All layers in one module; weights in one list per layer."""

    def __init__(self, config: DrafterConfig, device: torch.device) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size

        def linear(rows: int, columns: int) -> nn.Linear:
            layer = nn.Linear(rows, columns, bias=False, device=device, dtype=torch.bfloat16)
            nn.init.normal_(layer.weight, std=0.02)
            return layer

        def ones(size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size, device=device, dtype=torch.bfloat16))

        self.heads, self.kv, self.dim, self.theta = heads, kv, dim, config.rope_theta
        self.fc = linear(len(config.target_layer_ids) * config.target_hidden_size, hidden)
        self.fc_norm, self.last_norm = ones(hidden), ones(hidden)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": linear(hidden, heads * dim), "k": linear(hidden, kv * dim), "v": linear(hidden, kv * dim),
                    "o": linear(heads * dim, hidden), "gate": linear(hidden, inner), "up": linear(hidden, inner),
                    "down": linear(inner, hidden),
                }
            )
            for _ in range(config.num_hidden_layers)
        )  # fmt: skip
        self.norms: Any = nn.ModuleList(
            nn.ParameterList([ones(hidden), ones(hidden), ones(dim), ones(dim)]) for _ in self.layers
        )

    def forward(self, features: Tensor, embeds: Tensor, context_at: Tensor, block_at: Tensor, mask: Any) -> Tensor:
        """features [S,F*Ht], embeds [Q,H], positions [S] and [Q], mask a BlockMask or [Q,S+Q] bool -> [Q,H]."""
        context, x = norm(self.fc(features), self.fc_norm), embeds
        positions = torch.cat((context_at, block_at))
        for layer, norms in zip(self.layers, self.norms, strict=True):
            first, second, q_norm, k_norm = norms
            own = norm(x, first)
            both = torch.cat((context, own))
            q = rope(norm(layer["q"](own).unflatten(-1, (-1, self.dim)), q_norm).transpose(0, 1), block_at, self.theta)
            k = rope(
                norm(layer["k"](both).unflatten(-1, (-1, self.dim)), k_norm).transpose(0, 1), positions, self.theta
            )
            v = layer["v"](both).unflatten(-1, (-1, self.dim)).transpose(0, 1)
            if isinstance(mask, Tensor):
                seen: Any = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
            else:
                seen = flex_attention(q[None], k[None], v[None], block_mask=mask, enable_gqa=True)
            x = x + layer["o"](seen[0].transpose(0, 1).flatten(1))
            own = norm(x, second)
            x = x + layer["down"](F.silu(layer["gate"](own)) * layer["up"](own))
        return norm(x, self.last_norm)


def chunk(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of some rows and its gradient in `hidden`."""
    logits = (hidden @ head.t()).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    picked = logits.gather(1, labels[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    residual = (torch.exp(logits - normaliser) - hit.float()) * weights[:, None]
    return ((normaliser - picked).squeeze(1) * weights).sum(), residual.to(hidden.dtype) @ head


class ChunkedLoss(torch.autograd.Function):
    """`chunk` over 2,048 rows at a time: the gradient is made on the way forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, run: Any) -> Tensor:
        pieces = zip(hidden.split(CHUNK), labels.split(CHUNK), weights.split(CHUNK), strict=True)
        losses, gradients = zip(*(run(h, head, y, w) for h, y, w in pieces), strict=True)
        ctx.save_for_backward(torch.cat(gradients))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None


class PlainTrainer:
    """One row of one document per step, with fresh anchors."""

    def __init__(self, config: DrafterConfig, length: int, anchors: int, device: torch.device) -> None:
        self.config, self.length, self.count, self.device = config, length, anchors, device
        self.model = PlainDrafter(config, device)
        compiled = device.type == "cuda"
        self.run: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.chunk: Any = torch.compile(chunk, dynamic=False) if compiled else chunk
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
        at = str(device)
        self.embed = drawn((config.vocab_size, config.hidden_size), 0.02, 2, at)
        self.head = drawn((config.vocab_size, config.hidden_size), 0.02, 3, at)
        width = len(config.target_layer_ids) * config.target_hidden_size
        self.features = drawn((length, width), 1.0, 1, at)
        self.ids = torch.randint(0, config.vocab_size - 1, (length + config.block_size,), device=device)

    def mask(self, anchors: Tensor) -> Any:
        """Own document before the anchor, and the own block."""
        size, length = self.config.block_size, self.length

        def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < anchors[q // size]) | ((k >= length) & ((k - length) // size == q // size))

        queries = self.count * size
        if self.device.type == "cuda":
            return create_block_mask(visible, None, None, queries, length + queries, device=self.device)
        index = torch.arange(length + queries, device=self.device)
        return visible(index, index, index[:queries, None], index[None, :])

    def step(self) -> float:
        """One update; the arithmetic it took, by flops.step_flops with all slots through the head."""
        config, size = self.config, self.config.block_size
        anchors = torch.randperm(self.length - 1, device=self.device)[: self.count].sort().values
        slots = torch.arange(size, device=self.device)
        at = (anchors[:, None] + slots).flatten()
        ids = torch.where(slots == 0, self.ids[anchors][:, None], config.mask_token_id).flatten()
        weights = torch.exp(-(slots - 1) / 7.0) * (slots > 0)
        weights = (weights / (weights.sum() * self.count)).repeat(self.count)
        embeds = F.embedding(ids, self.embed)
        hidden = self.run(self.features, embeds, torch.arange(self.length, device=self.device), at, self.mask(anchors))
        loss: Any = ChunkedLoss.apply(hidden, self.head, self.ids[at], weights, self.chunk)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return step_flops(config, _Row(anchors.cpu().numpy()[None], self.length), size)


class _Row:
    """A row of one document, as flops.py wants to know it."""

    def __init__(self, end: np.ndarray[Any, Any], length: int) -> None:
        self.start, self.end, self.context_positions = np.zeros_like(end), end, np.zeros((1, length), np.int32)


@click.command()
@click.option("--shape", default="27b", show_default=True)
@click.option("--steps", default=10, show_default=True, help="Measured ones; three go before them.")
@click.option("--anchors", type=int)
@click.option("--max-length", type=int)
def main(shape: str, steps: int, anchors: int | None, max_length: int | None) -> None:
    """Print one JSON line: step_ms, tflops, ceiling, compile_s, memory in bytes."""
    sizes = fitting(shape, anchors, max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = PlainTrainer(sizes.geometry(), sizes.max_length, sizes.anchors, device)
    started = time.perf_counter()
    trainer.step()
    synchronize(device)
    compiled = time.perf_counter() - started
    for _ in range(2):
        trainer.step()
    before, times, flops = ceiling(device), [], 0.0
    for _ in range(steps):
        synchronize(device)
        started = time.perf_counter()
        flops = trainer.step()
        synchronize(device)
        times.append(time.perf_counter() - started)
    found = {
        "step_ms": 1e3 * statistics.median(times),
        "tflops": flops / statistics.median(times) / 1e12,
        "ceilings": [before, ceiling(device)],
        "first_step_s": compiled,
        "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
