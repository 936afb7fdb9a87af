"""One conversation to prepared documents: rendered with its mask, cut to length, checked.

Called by stage1_extract/prepare.py; the rendering itself is shared/chat.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from shared.chat import ChatRenderer, TrainOn
from shared.conversations import RowFault, Unusable
from shared.errors import AllMasked, BadRow, RowTooShort
from shared.rows import Document
from stage1_extract.collect import Named


class Tokeniser:
    """Turns conversations into documents and keeps the counts that belong into the summary."""

    def __init__(
        self, renderer: ChatRenderer | None, *, vocab_size: int, max_length: int, block_size: int, train_on: TrainOn
    ) -> None:
        self.renderer = renderer
        self.vocab_size, self.max_length, self.block_size, self.train_on = vocab_size, max_length, block_size, train_on
        self.counts: Counter[str] = Counter()

    def documents(self, named: Named) -> list[Document | RowFault]:
        """All documents of one conversation, or the faults in their place."""
        row = named.conversation
        if row.input_ids is not None and row.loss_mask is not None:
            return [self.finish(named, row.input_ids, row.loss_mask)]
        assert row.messages is not None
        assert self.renderer is not None
        try:
            rendered = self.renderer.rows(row.messages, row.tools, self.train_on)
        except Unusable as verdict:
            return [verdict.at(row.source_file, row.line_number, named.doc_id)]
        if rendered[0].turn is not None:
            self.counts["taken_apart"] += 1
        return [self.finish(named, each.input_ids, each.loss_mask, each.turn) for each in rendered]

    def finish(
        self, named: Named, input_ids: Sequence[int], loss_mask: Sequence[int], turn: int | None = None
    ) -> Document | RowFault:
        """Check and cut one row; `turn` distinguishes the documents of a conversation that was taken apart."""
        row = named.conversation
        doc_id = named.doc_id if turn is None else f"{named.doc_id}#{turn}"
        try:
            self._check(input_ids, loss_mask)
        except Unusable as verdict:
            return verdict.at(row.source_file, row.line_number, doc_id)
        truncated = len(input_ids) > self.max_length
        self.counts["truncated"] += truncated
        return Document(
            doc_id=doc_id,
            source=row.source_file,
            line=row.line_number,
            truncated=truncated,
            input_ids=np.asarray(input_ids[: self.max_length], dtype=np.int32),
            loss_mask=np.asarray(loss_mask[: self.max_length], dtype=np.uint8),
            detail={"conversation": named.doc_id} | ({} if turn is None else {"turn": turn}),
        )

    def _check(self, input_ids: Sequence[int], loss_mask: Sequence[int]) -> None:
        length, first = len(input_ids), next((i for i, flag in enumerate(loss_mask) if flag), None)
        if length < self.block_size:
            raise Unusable("row_too_short", RowTooShort, f"{length} tokens, fewer than one block of {self.block_size}")
        if first is None:
            raise Unusable("all_masked", AllMasked, f"none of its {length} tokens is supervised")
        if first >= self.max_length:
            raise Unusable(
                "answer_beyond_max_length",
                AllMasked,
                f"its first supervised token is number {first} of {length}, beyond max_length {self.max_length}",
            )
        if not any(loss_mask[1 : self.max_length]):
            # The first token of a row has no context, so no block can predict it.
            raise Unusable(
                "all_masked", AllMasked, f"only the first of its {length} tokens is supervised, and nothing precedes it"
            )
        largest = max(input_ids)
        if largest >= self.vocab_size:
            raise Unusable(
                "ids_out_of_range",
                BadRow,
                f"token id {largest}, but the target's vocabulary has {self.vocab_size} rows",
            )
