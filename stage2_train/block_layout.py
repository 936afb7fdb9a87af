"""The blocks of a batch: their anchors, labels and the teacher's distributions, in arrays of fixed shapes.

Called by data.py for every batch. Next: anchors.py (where blocks start and what they must predict).

Shapes: R rows, N anchor slots, B slots, K top logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage2_train.anchors import coverage, labels, run_ends
from stage2_train.batch import Array
from stage2_train.objectives import Objective
from stage2_train.packing import Row

# Arrays of a store that hold the teacher's distribution of the next token, by their names in a batch.
DISTRIBUTION = {"teacher_ids": "topk_ids", "teacher_logits": "topk_logits", "teacher_logsumexp": "logsumexp"}


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Lays blocks out in a batch's arrays; `topk` is the store's, `pinned` page-locked memory."""

    anchors: int
    objective: Objective
    topk: int
    pinned: bool

    def stored(self) -> tuple[str, ...]:
        """The arrays of a document that blocks are made from."""
        return ("input_ids", "loss_mask", *(DISTRIBUTION.values() if self.objective.needs_topk else ()))

    def allocate(self, rows: int) -> dict[str, Tensor]:
        """The arrays of R rows, all zeros: a slot that stays so is unused."""
        slots, at_labels = (rows, self.anchors), (rows, self.anchors, self.objective.block_size)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **{name: (slots, torch.int32) for name in ("anchor_positions", "anchor_tokens", "start", "end")},
            "remaining": (slots, torch.int32),
            "labels": (at_labels, torch.int64),
            "counted": (at_labels, torch.bool),
        }
        if self.objective.needs_distributions:
            shapes |= {
                "teacher_ids": ((*at_labels, self.topk), torch.int32),
                "teacher_logits": ((*at_labels, self.topk), torch.uint16),
                "teacher_logsumexp": (at_labels, torch.float32),
            }
        return {
            name: torch.zeros(shape, dtype=dtype, pin_memory=self.pinned) for name, (shape, dtype) in shapes.items()
        }

    def fill(
        self, arrays: Mapping[str, Array], row: Row, documents: Sequence[Mapping[str, Array]], drawn: Sequence[Array]
    ) -> tuple[int, int]:
        """Lay out one row in its part of the arrays, from its documents and their anchors.

        Returns supervised tokens that got a label, and how many could have.
        """
        slot, covered, coverable = 0, 0, 0
        for piece, document, anchors in zip(row, documents, drawn, strict=True):
            slots = slice(slot, slot + len(anchors))
            arrays["anchor_positions"][slots] = anchors
            arrays["anchor_tokens"][slots] = document["input_ids"][anchors]
            arrays["start"][slots] = piece.offset
            arrays["end"][slots] = piece.offset + anchors
            arrays["remaining"][slots] = run_ends(document["loss_mask"], anchors) - anchors - 1
            self._label(arrays, slots, document, anchors)
            found, possible = coverage(document["loss_mask"], anchors, self.objective.distances[-1])
            slot, covered, coverable = slots.stop, covered + found, coverable + possible
        return covered, coverable

    def _label(self, arrays: Mapping[str, Array], slots: slice, document: Mapping[str, Array], anchors: Array) -> None:
        """Labels of a document's blocks, and the distributions that the teacher had for them."""
        goal, ids = self.objective, document["input_ids"]
        arrays["labels"][slots], arrays["counted"][slots] = labels(
            ids, document["loss_mask"], anchors, goal.block_size, shift=goal.shift_labels, slot_0=goal.slot_0
        )
        if not goal.needs_topk:
            return
        # What the target says after the token before the label is what it says about the label.
        before = np.clip(anchors[:, None] + np.arange(goal.block_size) + goal.shift_labels - 1, 0, len(ids) - 1)
        if goal.labels == "teacher":
            arrays["labels"][slots] = document["topk_ids"][before, 0]
        if goal.needs_distributions:
            for name, stored in DISTRIBUTION.items():
                arrays[name][slots] = document[stored][before]
