"""One optimizer step over all ranks, and the sums it leaves behind.

Called by train.py. A step is: denominator over all ranks, micro-batches forward and backward, gradients added (while
backward runs: gradient.py), everything finite?, clipped, update. Ranks never disagree on which of these they do. The
CPU waits for the device once, just before the update: everything that it must know is read there in one piece.

Shapes: B slots per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.errors import NonFinite
from stage2_train.batch import Batch
from stage2_train.blame import blame
from stage2_train.config import TrainConfig
from stage2_train.data import StepRows
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.gradient import Gradient
from stage2_train.learning_rate import learning_rate
from stage2_train.loss import count_size, read_counts
from stage2_train.objective import Engine, block_states, denominator, loss_and_counts, move
from stage2_train.optimizers import Optimizer

# What every rank counts of its batches, in this order.
FACTS = ("tokens", "without_anchors", "covered", "coverable")


class Stepper:
    """Runs steps on one process's drafter."""

    def __init__(
        self,
        drafter: Drafter,
        optimizer: Optimizer,
        gradient: Gradient,
        engine: Engine,
        ranks: Ranks,
        config: TrainConfig,
    ) -> None:
        self.drafter, self.optimizer, self.gradient = drafter, optimizer, gradient
        self.engine, self.ranks, self.config = engine, ranks, config
        self.tick: Callable[[], None] = lambda: None
        """Called for every micro-batch: a step of hundreds is longer than a step may be silent."""

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward on a batch without an update, to compile; every parameter must have got its gradient."""
        self.gradient.zero()
        with self.gradient.summing(last=False):
            self._forward_backward(batch, 1.0)
        assert self.gradient.attached(), "a parameter's .grad was replaced: its gradient would be lost"
        self.gradient.zero()

    def _forward_backward(self, batch: Batch, divisor: float | torch.Tensor) -> torch.Tensor:
        """Adds to the gradient; returns [counts..., loss] float64 on the device."""
        placed = move(batch, self.drafter.config.mask_token_id, self.engine)
        hidden = block_states(self.drafter, placed, self.engine)
        loss, counts = loss_and_counts(hidden, placed, self.engine, divisor)
        loss.backward()
        return torch.cat([counts, loss.detach().double()[None]])

    def step(self, state: dict[str, Any], rows: StepRows, total: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """One update from one global batch; moves `state` to the next step and adds to its window.

        Returns whether `stop` says on any rank, asked late in the step, that this should be the last one. A process
        that is alone asks between micro-batches too, and gives the step up with `state` as it was. A batch without a
        label on any rank updates nothing and is counted. Raises NonFinite before the update.
        """
        device, step = self.engine.device, state["global_step"]
        rate = learning_rate(step, self.config.rate(total))
        divisor = self.ranks.sum(_on_device([denominator(rows.parts, self.engine.objective)], device))
        self.gradient.zero()
        sums: torch.Tensor | None = None
        for number, batch in enumerate(rows.placed(), start=1):
            self.tick()
            if number > 1 and self.ranks.world_size == 1 and stop():
                return True
            with self.gradient.summing(last=number == len(rows.parts)):
                part = self._forward_backward(batch, torch.where(divisor > 0, divisor, 1.0))
            sums = part if sums is None else sums + part
        assert sums is not None, "a step has at least one micro-batch"
        self.gradient.finish()
        # Not seen in the loss: NaN in the sum over ranks tells all of them at once.
        teacher = 0.0 if all(batch.teacher_is_whole() for batch in rows.parts) else math.nan
        facts = _on_device([stop(), teacher, *(sum(getattr(b, name) for b in rows.parts) for name in FACTS)], device)
        shared = self.ranks.sum(torch.cat([self.gradient.squares()[None], facts, sums]))
        read = torch.cat([divisor, shared]).cpu()
        weight, squares, stopping, _, tokens, without, covered, coverable, *_ = read.tolist()
        counts, loss, norm = read[4 + len(FACTS) : -1], float(read[-1]), math.sqrt(squares)
        if not torch.isfinite(read).all():
            raise NonFinite(blame(rows.parts, float(sums[-1]), norm, self.gradient, self.ranks, step))
        if weight > 0:
            self.gradient.clip(norm, self.config.clip)
            self.optimizer.step(rate)
        else:
            state["steps_without_labels"] += 1
        state.update(global_step=step + 1, epoch=rows.epoch, batch=rows.batch + 1)
        state["tokens"] += int(tokens)
        state["documents_without_anchors"] += int(without)
        state["window"]["covered"] += covered
        state["window"]["coverable"] += coverable
        if weight > 0:  # a step that measured nothing is left out of the means, not counted as 0
            Window.add(state["window"], counts, {"loss": loss, "grad_norm": norm, "learning_rate": rate})
        return bool(stopping)


def _on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float64 vector made by kernels: a copy from the CPU would wait until all that is queued before it has run."""
    return torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in values])


class Window:
    """Sums since the last log line, kept in the loop state so that a restart does not lose half a window."""

    @staticmethod
    def empty(drafts: int) -> dict[str, Any]:
        """No step yet; `drafts` tokens a block."""
        sums = {"covered": 0.0, "coverable": 0.0}
        return {"steps": 0, **sums, "counts": [0.0] * count_size(drafts), "sums": {}}

    @staticmethod
    def add(window: dict[str, Any], counts: torch.Tensor, numbers: dict[str, float]) -> None:
        """Add one step's loss.count vector and numbers."""
        window["steps"] += 1
        window["counts"] = [a + b for a, b in zip(window["counts"], counts.tolist(), strict=True)]
        window["sums"] = {name: window["sums"].get(name, 0.0) + value for name, value in numbers.items()}

    @staticmethod
    def read(window: dict[str, Any]) -> dict[str, float]:
        """Means over the window's steps, and the acceptance numbers of all their blocks.

        anchor_coverage: of the supervised tokens that some anchor would give a label, how many a block did.
        """
        steps = max(window["steps"], 1)
        numbers = {name: value / steps for name, value in window["sums"].items()}
        if window["coverable"]:
            numbers["anchor_coverage"] = window["covered"] / window["coverable"]
        return numbers | read_counts(torch.tensor(window["counts"], dtype=torch.float64))
