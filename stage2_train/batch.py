"""One batch as the CPU holds it. Made by data.py, checked by step.py, copied to the device by objective.py.

Shapes: R rows, S = max_length tokens, N anchor slots, B slots, F taps, H target hidden, K top logits, U store blocks
of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows ready to be trained on, in numpy. Unused slots have start = end = 0, count nothing, see only themselves."""

    tensors: dict[str, Tensor]
    """The memory of the arrays below, by their names: page-locked when a GPU is to copy from it. In a batch that
    device_feed.py hands out they are the copies there; the arrays stay on the CPU."""
    features: Array
    """[R,S,F*H] uint16: bf16 bits of the target's residual streams, or int8 codes; 0 where a row is not full."""
    scales: Array | None = None
    """[R,S,F] float32: token scales of int8 codes; None for a bf16 store, like the two below."""
    channels: Array | None = None
    """[U,F*H] float32: channel scales of the blocks that the rows' documents come from."""
    blocks: Array | None = None
    """[R,S] int32: which row of `channels` a token's codes go with."""
    context_positions: Array
    """[R,S] int32: position in the document."""
    anchor_positions: Array
    """[R,N] int32: position of the anchor in its document."""
    anchor_tokens: Array
    """[R,N] int32."""
    start: Array
    """[R,N] int32: row index of the document's first token."""
    end: Array
    """[R,N] int32: row index of the anchor."""
    remaining: Array
    """[R,N] int32: supervised tokens from the one after the anchor to the end of its answer; 0 in unused slots."""
    labels: Array
    """[R,N,B] int64."""
    counted: Array
    """[R,N,B] bool: slots with a label that count in the loss."""
    teacher_ids: Array | None = None
    """[R,N,B,K] int32: the teacher's most probable tokens at each label, most probable first; None, like the two
    below, when the objective asks for no distributions."""
    teacher_logits: Array | None = None
    """[R,N,B,K] uint16: bf16 bits of their logits."""
    teacher_logsumexp: Array | None = None
    """[R,N,B] float32: over the teacher's whole vocabulary."""
    documents: tuple[tuple[int, ...], ...]
    """Row numbers (in the prepared data) of the documents of each row, to name them in an error."""
    tokens: int
    """Context tokens that are not padding."""
    without_anchors: int
    """Documents that offer no anchor."""
    covered: int
    """Supervised tokens that are the label of at least one block."""
    coverable: int
    """Supervised tokens that would be, were every possible anchor used."""

    def teacher_is_whole(self) -> bool:
        """Whether every logsumexp is a finite number; true without distributions.

        Asked at every step: +inf makes all of the teacher's probabilities 0 and no loss that is not finite. Any other
        broken number of a distribution does.
        """
        return self.teacher_logsumexp is None or bool(np.isfinite(self.teacher_logsumexp).all())

    def broken_blocks(self, row: int) -> Array:
        """[N] bool: whether a number of the teacher's distributions for the block is broken.

        A logit of -inf is none: it is a probability of 0.
        """
        if self.teacher_logsumexp is None or self.teacher_logits is None:
            return np.zeros(self.start.shape[1], bool)
        bits = self.teacher_logits[row]
        nan_or_inf = ((bits & 0x7F80) == 0x7F80) & (bits != 0xFF80)
        return np.asarray(nan_or_inf.any(axis=(1, 2)) | ~np.isfinite(self.teacher_logsumexp[row]).all(axis=1))

    def document_at(self, row: int, token: int) -> int:
        """Row number, in the prepared data, of the document that a token of a row belongs to."""
        # Every document of a row starts at position 0 again.
        number = int((self.context_positions[row, : token + 1] == 0).sum()) - 1
        return self.documents[row][min(number, len(self.documents[row]) - 1)]

    def finite_tokens(self, row: int) -> Array:
        """[S] bool: whether each token's features are finite numbers."""
        if self.scales is None or self.channels is None or self.blocks is None:
            # bf16 is not finite exactly when all eight exponent bits are set.
            return np.asarray(((self.features[row] & 0x7F80) != 0x7F80).all(axis=-1))
        scales, fine = self.scales[row], np.asarray(np.isfinite(self.channels).all(axis=1))
        # Where a row is not full, scales are 0 and the block means nothing.
        return np.asarray(np.isfinite(scales).all(axis=-1) & (fine[self.blocks[row]] | (scales == 0).all(axis=-1)))
