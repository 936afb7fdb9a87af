"""Learning rate and optimizer step: warm-up, cosine, AdamW over one flat gradient, clipping.

Called by train.py. All parameters' gradients are views of one flat float32 buffer: one norm, one all-reduce,
one finiteness check for the whole drafter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Rate of the update number `step` (0-based) of `total`: linear to `peak`, then a cosine to peak * min_ratio.

    The first update has a rate above 0; the last one has the minimum only after it (a rate of 0 would waste it).
    """
    warmup = round(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class FlatGradient:
    """One buffer behind every parameter's .grad. Parameters must be float32 and on one device."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        """Start a new step; the views stay."""
        self.buffer.zero_()

    def attached(self) -> bool:
        """Whether autograd still accumulates into the buffer (an assignment to .grad would silently detach it)."""
        end = self.buffer.untyped_storage().data_ptr()
        return all(p.grad is not None and p.grad.untyped_storage().data_ptr() == end for p in self.parameters)

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient to norm `limit` when it is longer; returns the norm before, a 0-dim tensor."""
        norm = torch.linalg.vector_norm(self.buffer)
        self.buffer.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def adamw(parameters: Iterable[nn.Parameter], peak: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, betas 0.9 / 0.95; matrices decay, norm weights do not. Fused on CUDA."""
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=listed[0].is_cuda)


class MuonWithAdamW:
    """Muon for the matrices, AdamW for the norm weights, stepped and saved as one optimizer.

    Muon's update is scaled to the root mean square of an AdamW update ("match_rms_adamw"), so that one learning rate
    serves both; it likes a rate several times AdamW's. Momentum 0.95 with Nesterov, five Newton-Schulz iterations.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], peak: float, weight_decay: float) -> None:
        listed = list(parameters)
        self.muon = torch.optim.Muon(
            [p for p in listed if p.ndim == 2], lr=peak, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = adamw([p for p in listed if p.ndim != 2], peak, 0.0)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        """One update of every parameter."""
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


Optimizer = torch.optim.AdamW | MuonWithAdamW


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], peak: float, weight_decay: float) -> Optimizer:
    """The optimizer of `--optimizer`: "adamw" (the paper's) or "muon"."""
    return (MuonWithAdamW if name == "muon" else adamw)(parameters, peak, weight_decay)
