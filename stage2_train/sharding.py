"""FSDP2: every rank keeps a share of each parameter, of its gradient and of the optimizer's state.

For `--parallel fsdp`; called by training_parts.py and checkpoint.py. Layers are gathered just before they run and
their gradients are summed into shares in the backward of every micro-batch: memory is why one chooses this, so whole
gradients are never kept. Layers may be compiled before or after. Next: gradient.py (the interface), optimizers.py.

A tensor is cut along its first axis as torch.chunk does; ranks past the last row hold nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter


def shard(drafter: Drafter, ranks: Ranks, dtype: torch.dtype) -> None:
    """Move a drafter to this rank's device in shares: float32 masters, computing in `dtype`, sums in float32.

    `fc` and `hidden_norm` are groups of their own: their gradients come last, when the root's group, which the
    gradient of the block embeddings ends, may be done already.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # Inputs have the compute dtype already.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    order = [drafter.fc, drafter.hidden_norm, *drafter.layers, drafter]
    for module in order:
        # The root too: what an estimate leaves gathered would miss the next update.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    parts = [module for module in order if isinstance(module, FSDPModule)]
    for part, before in zip(parts, (parts[0], *parts), strict=False):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        # What backward needs next. By default it would follow the order of all forwards since the last backward,
        # estimates included; the first one has nothing before it and names itself, which fetches nothing.
        part.set_modules_to_backward_prefetch([before])
    register_fsdp_forward_method(drafter, "on_features")


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's state with whole tensors, on rank 0; a collective when it is sharded."""
    return {
        name: _gather(_local(tensor), tensor.shape) if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }


@torch.no_grad()
def fill_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into a module, or into this rank's shares of it."""
    for name, own in module.state_dict().items():
        if isinstance(own, DTensor):
            own.to_local().copy_(_rows(tensors[name], own.device_mesh.size(), own.device_mesh.get_local_rank()))
        else:
            own.copy_(tensors[name])


def _rows(whole: Tensor, world_size: int, rank: int) -> Tensor:
    """This rank's rows of a whole tensor; none past the end."""
    size = -(-whole.shape[0] // world_size)
    return whole[rank * size : (rank + 1) * size]


def held_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters as far as this rank holds them: whole, or its rows; no collective."""
    return {
        name: _local(weight) if isinstance(weight, DTensor) else weight.detach()
        for name, weight in module.named_parameters()
    }


@torch.no_grad()
def _gather(own: Tensor, shape: torch.Size) -> Tensor:
    """All ranks' rows as one tensor on the CPU of rank 0; nothing on the others.

    Not DTensor.full_tensor: it makes the whole tensor on every GPU, and crashes over gloo there (pytorch #132471).
    """
    world_size = dist.get_world_size()
    size = -(-shape[0] // world_size)
    padded = own.new_zeros(size, *shape[1:])
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in range(world_size)] if dist.get_rank() == 0 else None
    dist.gather(padded, parts, dst=0)
    return torch.cat([part.cpu() for part in parts])[: shape[0]] if parts else torch.empty(0, dtype=own.dtype)


class ShardedGradient:
    """This rank's rows of a sharded drafter's parameters, and of their gradients summed over ranks.

    `parameters` are plain tensors over the memory of the sharded ones, so that no optimizer needs to know.
    """

    sharded = True

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
        self.ranks = ranks
        self.names = [name for name, _ in drafter.named_parameters()]
        self._sources = [parameter for _, parameter in drafter.named_parameters()]
        self.shapes = [source.shape for source in self._sources]
        self.parameters = [nn.Parameter(_local(source)) for source in self._sources]
        self._lengths: Tensor | None = None

    def zero(self) -> None:
        """Start a new step."""
        for source, parameter in zip(self._sources, self.parameters, strict=True):
            source.grad = parameter.grad = None

    @contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        """Every micro-batch's gradients are summed over ranks in its own backward."""
        yield

    def finish(self) -> None:
        """Show the sums to the optimizer."""
        for source, parameter in zip(self._sources, self.parameters, strict=True):
            parameter.grad = None if source.grad is None else _local(source.grad)

    def _gradients(self) -> list[Tensor]:
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    def squares(self) -> Tensor:
        """The squared norm of this rank's rows."""
        self._lengths = torch.stack(torch._foreach_norm(self._gradients()))
        return self._lengths.double().square().sum()

    def clip(self, norm: float, limit: float) -> None:
        """Scale to norm `limit` when `norm` is larger."""
        if norm > limit:
            torch._foreach_mul_(self._gradients(), limit / (norm + 1e-6))

    def bad(self) -> list[bool]:
        """Which sums over all ranks are not finite in this rank's rows: whose they were is no longer to be seen."""
        assert self._lengths is not None
        return (~torch.isfinite(self._lengths)).tolist()

    def attached(self) -> bool:
        """Whether every parameter got a gradient, and the optimizer's views still are the sharded parameters."""
        return all(
            source.grad is not None and _local(source).data_ptr() == parameter.data_ptr()
            for source, parameter in zip(self._sources, self.parameters, strict=True)
        )

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        """All ranks' rows on the CPU of rank 0, nothing elsewhere."""
        return _gather(tensor, self.shapes[index])

    def part(self, _index: int, tensor: Tensor) -> Tensor:
        """This rank's rows."""
        return _rows(tensor, self.ranks.world_size, self.ranks.rank)


def _local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that lie here, over the same memory."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local.detach()
