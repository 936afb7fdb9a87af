"""One optimizer step over all ranks, and the sums it leaves behind.

Called by train.py. A step is: denominator over all ranks, micro-batches forward and backward, everything finite on
every rank?, gradients added, clipped, update. Ranks never disagree on which of these they do.

Shapes: B slots per block.
"""

from __future__ import annotations

import resource
from typing import Any

import torch

from shared.errors import NonFinite
from stage2_train.config import TrainConfig
from stage2_train.data import Batch, StepRows
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.loss import read_counts
from stage2_train.objective import Engine, block_states, loss_and_counts, move, weight_sum
from stage2_train.schedule import FlatGradient, Optimizer, learning_rate


class Stepper:
    """Runs steps on one process's drafter."""

    def __init__(
        self,
        drafter: Drafter,
        optimizer: Optimizer,
        gradient: FlatGradient,
        engine: Engine,
        ranks: Ranks,
        config: TrainConfig,
    ) -> None:
        self.drafter, self.optimizer, self.gradient = drafter, optimizer, gradient
        self.engine, self.ranks, self.config = engine, ranks, config

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward on a batch without an update, to compile; every parameter must have got its gradient."""
        self.gradient.zero()
        self._forward_backward(batch, 1.0)
        assert self.gradient.attached(), "a parameter's .grad was replaced: its gradient would be lost"
        self.gradient.zero()

    def _forward_backward(self, batch: Batch, denominator: float) -> torch.Tensor:
        """Adds to the gradient; returns [counts..., loss] float64 on the device."""
        placed = move(batch, self.drafter.config.mask_token_id, self.engine)
        hidden = block_states(self.drafter, placed, self.engine)
        loss, counts = loss_and_counts(hidden, placed, self.engine, denominator)
        loss.backward()
        return torch.cat([counts, loss.detach().double()[None]])

    def step(self, state: dict[str, Any], rows: StepRows, total: int) -> None:
        """One update from one global batch; moves `state` to the next step and adds to its window.

        A batch without a label on any rank updates nothing and is counted. Raises NonFinite before the update.
        """
        device, step = self.engine.device, state["global_step"]
        rate = learning_rate(step, total, self.config.learning_rate, self.config.warmup_ratio, self.config.min_lr_ratio)
        weights = torch.tensor([weight_sum(rows.parts, self.engine.slot_weights)], dtype=torch.float64, device=device)
        denominator = float(self.ranks.sum(weights).item())
        self.gradient.zero()
        sums: torch.Tensor | None = None
        for batch in rows.parts:
            part = self._forward_backward(batch, denominator or 1.0)
            sums = part if sums is None else sums + part
        assert sums is not None, "a step has at least one micro-batch"
        bad = ~(torch.isfinite(sums).all() & torch.isfinite(self.gradient.buffer).all())
        flags = torch.zeros(self.ranks.world_size, dtype=torch.float64, device=device)
        flags[self.ranks.rank] = bad
        facts = torch.tensor(
            [sum(b.tokens for b in rows.parts), sum(b.without_anchors for b in rows.parts)],
            dtype=torch.float64,
            device=device,
        )
        shared = self.ranks.sum(torch.cat([torch.nan_to_num(sums), facts, flags])).cpu()
        if shared[-self.ranks.world_size :].any():
            raise NonFinite(self._blame(rows, step))
        self.ranks.sum(self.gradient.buffer)
        norm = float(self.gradient.clip(self.config.clip))
        if not norm < float("inf"):
            raise NonFinite(
                f"the gradient norm over all ranks is {norm} at step {step}; lower --learning-rate or "
                "raise --warmup-ratio (the last checkpoint is kept)"
            )
        if denominator > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        else:
            state["steps_without_labels"] += 1
        counts, loss, tokens, without = shared[: len(sums) - 1], *shared[len(sums) - 1 : len(sums) + 2].tolist()
        state.update(global_step=step + 1, epoch=rows.epoch, batch=rows.batch + 1)
        state["tokens"] += int(tokens)
        state["documents_without_anchors"] += int(without)
        state["window"]["tokens"] += tokens
        if denominator > 0:  # a step that measured nothing is left out of the means, not counted as 0
            Window.add(state["window"], counts, {"loss": loss, "grad_norm": norm, "learning_rate": rate})

    def _blame(self, rows: StepRows, step: int) -> str:
        """Who made the numbers bad: every rank names its first bad row and parameter, and all say the same sentence."""
        found = torch.zeros(self.ranks.world_size, 2, dtype=torch.float64, device=self.engine.device)
        documents = [names for batch in rows.parts for names in batch.documents]
        bad_row = next((i for i, fine in enumerate(_finite_rows(rows)) if not fine), None)
        bad_parameter = next((i for i, p in enumerate(self.gradient.parameters) if not _finite(p.grad)), None)
        found[self.ranks.rank, 0] = 0 if bad_parameter is None else bad_parameter + 1
        first_document = documents[bad_row][0] if bad_row is not None and documents[bad_row] else -1
        found[self.ranks.rank, 1] = 0 if bad_row is None else first_document + 2
        said = self.ranks.sum(found).cpu().tolist()
        names = [name for name, _ in self.drafter.named_parameters()]
        for rank, (parameter, document) in enumerate(said):
            if parameter or document:
                where = f"first bad gradient {names[int(parameter) - 1]}" if parameter else "gradients finite"
                row = (
                    f"; the stored features of the row that starts with document {int(document) - 2} are not finite: "
                    "extract it again"
                    if document
                    else "; all stored features are finite: lower --learning-rate or raise --warmup-ratio"
                )
                return f"non-finite loss or gradient on rank {rank} at step {step}, before the update; {where}{row}"
        return f"non-finite loss at step {step}, before the update; all gradients are finite"


def _finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())


def _finite_rows(rows: StepRows) -> list[bool]:
    return [fine for batch in rows.parts for fine in batch.finite_rows()]


def memory_bytes(device: torch.device) -> float:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class Window:
    """Sums since the last log line, kept in the loop state so that a restart does not lose half a window."""

    @staticmethod
    def empty(block_size: int) -> dict[str, Any]:
        """No step yet."""
        return {"steps": 0, "tokens": 0.0, "counts": [0.0] * (3 * (block_size - 1) + 3), "sums": {}}

    @staticmethod
    def add(window: dict[str, Any], counts: torch.Tensor, numbers: dict[str, float]) -> None:
        """Add one step's loss.count vector and numbers."""
        window["steps"] += 1
        window["counts"] = [a + b for a, b in zip(window["counts"], counts.tolist(), strict=True)]
        window["sums"] = {name: window["sums"].get(name, 0.0) + value for name, value in numbers.items()}

    @staticmethod
    def read(window: dict[str, Any], block_size: int) -> dict[str, float]:
        """Means over the window's steps, the context tokens, and the acceptance numbers of all their blocks."""
        steps = max(window["steps"], 1)
        numbers = {name: value / steps for name, value in window["sums"].items()} | {"tokens": window["tokens"]}
        return numbers | read_counts(torch.tensor(window["counts"], dtype=torch.float64), block_size)
