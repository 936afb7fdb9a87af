"""Blocks and batches are functions of the lengths alone; a mask token never means anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_target import make_tokenizer

from shared.errors import MaskTokenInUse, MaskTokenMissing, MaskTokenOutOfRange, StoreDamaged, StoreMismatch
from stage1_extract.mask_token import choose_mask_token
from stage1_extract.plan import Plan, load_plan, make_batches, make_plan, save_plan, settle_plan

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 2000))
def test_blocks_hold_every_document_once_in_order(lengths: list[int], block_tokens: int) -> None:
    plan = make_plan(lengths, block_tokens)
    blocks = [list(plan.documents_of(block)) for block in range(plan.num_blocks)]
    assert [document for block in blocks for document in block] == list(range(len(lengths)))
    for block in blocks[:-1]:
        assert sum(lengths[i] for i in block) >= block_tokens
        assert sum(lengths[i] for i in block[:-1]) < block_tokens
    assert blocks[-1]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 2000))
def test_batches_hold_every_document_once_and_fit(lengths: list[int], batch_tokens: int) -> None:
    batches = make_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens


def test_a_plan_reads_back_and_never_changes(tmp_path: Path) -> None:
    assert load_plan(tmp_path) is None
    plan = settle_plan(tmp_path, [5, 5, 5, 5], 10)
    assert plan == Plan((0, 2, 4)) == load_plan(tmp_path)
    assert settle_plan(tmp_path, [5, 5, 5, 5], 10) == plan
    with pytest.raises(StoreMismatch, match="2 blocks over 4 documents"):
        settle_plan(tmp_path, [5, 5, 5], 10)
    save_plan(tmp_path, plan)
    (tmp_path / "plan.json").write_text('{"blocks": []}')
    with pytest.raises(StoreDamaged):
        load_plan(tmp_path)


def occurrences(*used: int, rows: int = 320) -> np.ndarray:  # type: ignore[type-arg]
    counts = np.zeros(rows, dtype=np.int64)
    counts[list(used)] = 3
    return counts


def test_the_first_spare_row_of_the_embedding_comes_first() -> None:
    assert choose_mask_token(make_tokenizer(), 320, occurrences(), None) == 300


def test_without_spare_rows_the_highest_unused_special_token() -> None:
    tokenizer = make_tokenizer()
    assert choose_mask_token(tokenizer, 300, occurrences(rows=300), None) == 4
    assert choose_mask_token(tokenizer, 300, occurrences(4, rows=300), None) == 3
    with pytest.raises(MaskTokenMissing, match="--mask-token-id") as caught:
        choose_mask_token(tokenizer, 300, occurrences(3, 4, rows=300), None)
    assert caught.value.exit_code == 23


def test_a_special_token_of_the_template_is_not_spare() -> None:
    template = "{% for m in messages %}<|unused_1|>{{ m['content'] }}<|im_end|>{% endfor %}"
    assert choose_mask_token(make_tokenizer(template), 300, occurrences(rows=300), None) == 3


def test_the_tokenizers_own_mask_token_is_preferred() -> None:
    tokenizer = make_tokenizer()
    tokenizer.mask_token = "<|unused_0|>"
    assert choose_mask_token(tokenizer, 320, occurrences(), None) == 3
    assert choose_mask_token(tokenizer, 320, occurrences(3), None) == 300


def test_an_asked_id_must_exist_and_mean_nothing() -> None:
    tokenizer = make_tokenizer()
    assert choose_mask_token(tokenizer, 320, occurrences(), 319) == 319
    for asked in (-1, 320):
        with pytest.raises(MaskTokenOutOfRange, match=r"0\.\.319"):
            choose_mask_token(tokenizer, 320, occurrences(), asked)
    for asked, meaning in ((0, "unk"), (1, "bos"), (2, "eos")):
        with pytest.raises(MaskTokenInUse, match=meaning):
            choose_mask_token(tokenizer, 320, occurrences(), asked)
    with pytest.raises(MaskTokenInUse, match="3 times"):
        choose_mask_token(tokenizer, 320, occurrences(77), 77)
