"""AdamW and Muon over the parameters as a rank holds them; state is saved whole, whatever the ranks were.

Called by training_parts.py, step.py (an update) and checkpoint.py. Read gradient.py first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stage2_train.distributed import Ranks
from stage2_train.gradient import Gradient

MOMENTUM = 0.95
# Coefficients and number of iterations of Muon's published Newton-Schulz iteration (Jordan et al., 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def adamw(parameters: Iterable[nn.Parameter], peak: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, betas 0.9 / 0.95; matrices decay, norm weights do not. Fused on CUDA."""
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=listed[0].is_cuda)


def iteration_dtype(device: torch.device) -> torch.dtype:
    """What Muon's iterations compute in and ranks send: bfloat16 on CUDA, float32 elsewhere.

    A CPU without bfloat16 units (no amx_bf16, no avx512_bf16) takes 6 s for a step that takes 0.5 s in float32.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalised(update: Tensor) -> Tensor:
    """The matrix near U V^T for an update U S V^T, in `iteration_dtype`: five Newton-Schulz iterations.

    They are done on the short side.
    """
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[0] > update.shape[1]
    x = update.to(iteration_dtype(update.device))
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class _Matrix:
    parameter: nn.Parameter
    """Whole, or this rank's rows."""
    shape: torch.Size
    """Of the whole matrix."""

    def cost(self) -> float:
        """Of its iterations: products of the short side squared with the long side."""
        return float(min(self.shape)) ** 2 * max(self.shape)

    def flops(self) -> float:
        """Of its iterations: three products each, one of them square."""
        return ITERATIONS * (4 * self.cost() + 2 * float(min(self.shape)) ** 3)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, every matrix's iteration done by one rank.

    The update is scaled to the root mean square of an AdamW update (0.2 sqrt(max side), Liu et al., arXiv 2502.16982),
    so that one learning rate serves both; it likes a rate several times AdamW's. Numbers are torch.optim.Muon's with
    adjust_lr_fn="match_rms_adamw". Ranks work in turns of one matrix each, sorted by cost, so that a turn's ranks are
    busy alike; only the update travels, in `iteration_dtype`.
    """

    def __init__(self, matrices: Sequence[_Matrix], ranks: Ranks, sharded: bool, weight_decay: float) -> None:
        super().__init__([matrix.parameter for matrix in matrices], {"lr": 0.0, "weight_decay": weight_decay})
        self.ranks, self.sharded = ranks, sharded
        self.turns = _turns(matrices, ranks.world_size)
        self.flops = sum(matrix.flops() for matrix in matrices) / ranks.world_size
        """Of a step, on each rank."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        rate, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for turn in self.turns:
            updates = self._sharded_turn(turn) if self.sharded else self._whole_turn(turn)
            for matrix, update in zip(turn, updates, strict=True):
                matrix.parameter.mul_(1 - rate * decay)
                matrix.parameter.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        return momentum

    def _nesterov(self, parameter: nn.Parameter, momentum: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.lerp(momentum, MOMENTUM)

    def _whole_turn(self, turn: Sequence[_Matrix]) -> list[Tensor]:
        """Every rank has every gradient: each works on its own matrix and tells the others."""
        updates = []
        for owner, matrix in enumerate(turn):
            momentum = self._momentum(matrix.parameter)
            if owner == self.ranks.rank:
                updates.append(orthogonalised(self._nesterov(matrix.parameter, momentum)).contiguous())
            else:
                dtype = iteration_dtype(momentum.device)
                updates.append(torch.empty(matrix.shape, dtype=dtype, device=momentum.device))
        if self.ranks.world_size > 1:
            for owner, update in enumerate(updates):
                dist.broadcast(update, src=owner)
        return updates

    def _sharded_turn(self, turn: Sequence[_Matrix]) -> list[Tensor]:
        """Every rank has rows of every gradient: its own matrix's are brought together, and its update cut again."""
        world, mine = self.ranks.world_size, self.ranks.rank
        held = [self._padded(matrix) for matrix in turn]
        gathered: list[Tensor] = []
        for owner, rows in enumerate(held):
            parts = [torch.empty_like(rows) for _ in range(world)] if owner == mine else None
            dist.gather(rows, parts, dst=owner)
            gathered = gathered if parts is None else parts
        cut: list[Tensor] = []
        if mine < len(turn):
            whole = torch.cat(gathered)
            whole[: turn[mine].shape[0]] = orthogonalised(whole[: turn[mine].shape[0]])
            cut = list(whole.chunk(world))
        for owner, rows in enumerate(held):
            dist.scatter(rows, cut if owner == mine else None, src=owner)
        return [rows[: matrix.parameter.shape[0]] for matrix, rows in zip(turn, held, strict=True)]

    def _padded(self, matrix: _Matrix) -> Tensor:
        """This rank's rows of the update in `iteration_dtype`, with rows of zeros up to what every rank sends."""
        own = self._nesterov(matrix.parameter, self._momentum(matrix.parameter))
        height = -(-matrix.shape[0] // self.ranks.world_size)
        rows = own.new_zeros(height, matrix.shape[1], dtype=iteration_dtype(own.device))
        rows[: own.shape[0]] = own
        return rows


def _turns(matrices: Sequence[_Matrix], world_size: int) -> list[list[_Matrix]]:
    """Matrices by cost, the costliest first, as many to a turn as there are ranks: the owner is the place in it."""
    ordered = sorted(matrices, key=lambda matrix: -matrix.cost())
    slots = [ordered[start::world_size] for start in range(world_size)]
    return [[matrix for matrix in turn if matrix is not None] for turn in zip_longest(*slots)]


class Optimizer:
    """The optimizers of a run, stepped as one; `state_dict` and `load_state_dict` deal in whole tensors."""

    def __init__(self, gradient: Gradient, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.gradient, self.parts = gradient, parts
        self._index = {id(parameter): index for index, parameter in enumerate(gradient.parameters)}

    def step(self, rate: float) -> None:
        """One update of every parameter with this learning rate."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def flops(self) -> float:
        """Of a step's matrix products on each rank."""
        return sum(part.flops for part in self.parts.values() if isinstance(part, Muon))

    def state_dict(self) -> dict[str, Any]:
        """Torch's state of the one optimizer, or {name: state}; with shards a collective that fills rank 0 alone."""
        states = {name: self._whole(part) for name, part in self.parts.items()}
        return states["adamw"] if len(states) == 1 else states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, from whole tensors on every rank. Settings stay this run's: devices and rates may differ."""
        states = {"adamw": state} if len(self.parts) == 1 else state
        for name, part in self.parts.items():
            order = self._order(part)
            cut = {
                key: {
                    field: self.gradient.part(order[key], value) if _is_whole(value) else value
                    for field, value in fields.items()
                }
                for key, fields in states[name]["state"].items()
            }
            part.load_state_dict({"state": cut, "param_groups": part.state_dict()["param_groups"]})

    def _whole(self, part: torch.optim.Optimizer) -> dict[str, Any]:
        state, order = part.state_dict(), self._order(part)
        state["state"] = {
            key: {
                field: self.gradient.whole(order[key], value) if _is_whole(value) else value
                for field, value in fields.items()
            }
            for key, fields in state["state"].items()
        }
        return state

    def _order(self, part: torch.optim.Optimizer) -> list[int]:
        """Which parameter torch's number of it stands for."""
        return [self._index[id(parameter)] for group in part.param_groups for parameter in group["params"]]


def _is_whole(value: Any) -> bool:
    """A moment, as against the counter of steps."""
    return isinstance(value, Tensor) and value.ndim > 0


def make_optimizer(name: str, gradient: Gradient, ranks: Ranks, peak: float, weight_decay: float) -> Optimizer:
    """The optimizer of `--optimizer`: "adamw" (the paper's), or "muon" for matrices and AdamW for norm weights."""
    if name == "adamw":
        return Optimizer(gradient, {"adamw": adamw(gradient.parameters, peak, weight_decay)})
    pairs = list(zip(gradient.parameters, gradient.shapes, strict=True))
    matrices = [_Matrix(parameter, shape) for parameter, shape in pairs if len(shape) == 2]
    rest = [parameter for parameter, shape in pairs if len(shape) != 2]
    muon = Muon(matrices, ranks, gradient.sharded, weight_decay)
    return Optimizer(gradient, {"muon": muon, "adamw": adamw(rest, peak, 0.0)})
