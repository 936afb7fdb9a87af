"""Gradients of all parameters in one flat buffer, summed over ranks in buckets while backward still runs.

Called by step.py through the interface `Gradient`, which sharding.py implements for FSDP2 as well. Losses are divided
by a denominator over all ranks beforehand, so gradients are added, never averaged. Next: optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stage2_train.distributed import Ranks

# Large enough for full speed on a link between GPUs, small enough that little is left to send when backward ends.
BUCKET_BYTES = 2**26


class Gradient(Protocol):
    """The parameters that this rank updates, with their gradients. Indices count parameters in the module's order."""

    names: list[str]
    parameters: list[nn.Parameter]
    """What the optimizer updates: whole parameters, or this rank's rows of them."""
    shapes: list[torch.Size]
    """Of the whole parameters."""
    sharded: bool

    def zero(self) -> None:
        """Start a new step."""

    def summing(self, last: bool) -> AbstractContextManager[None]:
        """Around each micro-batch's forward and backward; `last` says that no more come in this step."""

    def finish(self) -> None:
        """After the last micro-batch: from here on, gradients are sums over all ranks."""

    def squares(self) -> Tensor:
        """This rank's part of the squared norm (0-dim float64): the parts of all ranks add up to it."""

    def clip(self, norm: float, limit: float) -> None:
        """Scale to norm `limit` when `norm` is larger."""

    def bad(self) -> list[bool]:
        """For each parameter whether what this rank knows of its gradient is not finite; after `squares` only."""

    def attached(self) -> bool:
        """Whether every parameter has a gradient where the optimizer and the sums expect it."""

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        """A tensor held like parameter `index` (a moment, the parameter itself), whole on rank 0. A collective."""

    def part(self, index: int, tensor: Tensor) -> Tensor:
        """The inverse of `whole`, from the whole tensor on every rank."""


@dataclass
class _Bucket:
    """Neighbouring parameters whose gradients are sent together."""

    start: int
    stop: int
    members: list[int]
    missing: int = 0
    lengths: Tensor | None = None
    """Norm of each member's gradient on this rank alone, [members]."""


class FlatGradient:
    """One float32 buffer behind every parameter's .grad, laid out in the order in which backward fills it.

    A bucket is all-reduced as soon as its last gradient is there, always in the same order on every rank, on NCCL's
    own stream. The sum of two ranks does not depend on the buckets; of more it may differ by rounding, because the
    order of addition inside a collective depends on where in it a number lies.
    """

    sharded = False
    beside: dist.ProcessGroup | None = None
    """What sends while backward computes, when that is not the default group (sending.py)."""

    def __init__(self, module: nn.Module, ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        named = dict(module.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.ranks = ranks
        first = self.parameters[0]
        self.buffer = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        self._buckets: list[_Bucket] = []
        self._works: list[dist.Work] = []
        self._next, self._summing = 0, False
        offset = 0
        for index in reversed(range(len(self.parameters))):
            parameter = self.parameters[index]
            stop = offset + parameter.numel()
            parameter.grad = self.buffer[offset:stop].view_as(parameter)
            if not self._buckets or (offset - self._buckets[-1].start) * first.element_size() >= bucket_bytes:
                self._buckets.append(_Bucket(offset, stop, []))
            bucket = self._buckets[-1]
            bucket.stop = stop
            bucket.members.append(index)
            if ranks.world_size > 1:
                parameter.register_post_accumulate_grad_hook(partial(self._filled, bucket))
            offset = stop

    def zero(self) -> None:
        """Start a new step; the views stay."""
        self.buffer.zero_()

    @contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        """Around each micro-batch; in the last one buckets are sent while the rest of backward computes."""
        self._next, self._summing = 0, last and self.ranks.world_size > 1
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
        yield
        self._summing = False

    def _filled(self, bucket: _Bucket, _parameter: Tensor) -> None:
        """Autograd has added to one parameter's gradient; runs on autograd's thread."""
        if not self._summing:
            return
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        # Measured before the sum, after which nobody could say whose gradient was not finite.
        bucket.lengths = self._lengths(bucket.members)
        group = self.beside
        if group is not None and bucket is self._buckets[-1]:
            # Nothing is left to compute: at full width. After the rest, as two communicators may block each other.
            self._wait()
            group = None
        work = dist.all_reduce(self.buffer[bucket.start : bucket.stop], group=group, async_op=True)
        assert work is not None
        self._works.append(work)
        self._next += 1

    def _lengths(self, members: list[int]) -> Tensor:
        gradients = [gradient for index in members if (gradient := self.parameters[index].grad) is not None]
        return torch.stack(torch._foreach_norm(gradients))

    def finish(self) -> None:
        """Send what backward did not fill (the same on every rank, so that no rank waits for ever), wait for all."""
        if self.ranks.world_size > 1:
            for bucket in self._buckets[self._next :]:
                self._send(bucket)
        self._wait()

    def _wait(self) -> None:
        """For all that was sent; with NCCL the stream waits, not the CPU."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def squares(self) -> Tensor:
        """Every rank holds the whole sum, so each has an equal part of its squared norm."""
        return torch.linalg.vector_norm(self.buffer).double().square() / self.ranks.world_size

    def clip(self, norm: float, limit: float) -> None:
        """Scale to norm `limit` when `norm` is larger."""
        if norm > limit:
            self.buffer.mul_(limit / (norm + 1e-6))

    def bad(self) -> list[bool]:
        """Which gradients were not finite on this rank before they were summed."""
        found = [False] * len(self.parameters)
        for bucket in self._buckets:
            lengths = self._lengths(bucket.members) if bucket.lengths is None else bucket.lengths
            for index, fine in zip(bucket.members, torch.isfinite(lengths).tolist(), strict=True):
                found[index] = not fine
        return found

    def attached(self) -> bool:
        """Whether autograd still accumulates into the buffer (an assignment to .grad would silently detach it)."""
        storage = self.buffer.untyped_storage().data_ptr()
        return all(p.grad is not None and p.grad.untyped_storage().data_ptr() == storage for p in self.parameters)

    def whole(self, _index: int, tensor: Tensor) -> Tensor:
        """Every rank holds whole tensors."""
        return tensor

    def part(self, _index: int, tensor: Tensor) -> Tensor:
        """Every rank holds whole tensors."""
        return tensor
