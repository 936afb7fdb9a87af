"""Which token stands for "not known yet" in the drafter's blocks: asked for, or a spare row of the target's embedding.

Called by stage1_extract/extract.py before anything large is loaded. Never falls back to pad or eos: a drafter trained
with those learns to draft endings.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.chat import as_token_ids
from shared.errors import MaskTokenInUse, MaskTokenMissing, MaskTokenOutOfRange


def choose_mask_token(tokenizer: Any, vocab_size: int, occurrences: np.ndarray[Any, Any], asked: int | None) -> int:
    """The mask token id; `occurrences` int64 [V] counts each id in the prepared rows.

    Order: the one asked for; the tokenizer's own mask token; the first embedding row beyond the tokenizer; the highest
    special token that is no bos, eos, pad or unk and that neither the rows nor the chat template use.
    Raises MaskTokenMissing, MaskTokenOutOfRange, MaskTokenInUse.
    """
    meanings = _meanings(tokenizer)
    if asked is not None:
        return _check_asked(asked, vocab_size, occurrences, meanings)
    own = getattr(tokenizer, "mask_token_id", None)
    first_spare = max(tokenizer.get_vocab().values()) + 1
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = sorted((int(i) for i, token in added.items() if token.special), reverse=True)
    in_template = _template_ids(tokenizer)
    for candidate in [own, first_spare, *special]:
        if candidate is None or candidate in meanings or candidate in in_template or candidate >= vocab_size:
            continue
        if not occurrences[candidate]:
            return int(candidate)
    raise MaskTokenMissing(
        f"no mask token: the tokenizer has none, its {first_spare} tokens leave no spare row of {vocab_size}, and "
        "every special token is in use; pass --mask-token-id with an id that never occurs in text"
    )


def _check_asked(asked: int, vocab_size: int, occurrences: np.ndarray[Any, Any], meanings: dict[int, str]) -> int:
    if not 0 <= asked < vocab_size:
        raise MaskTokenOutOfRange(
            f"mask_token_id {asked}, but the target's embedding has rows 0..{vocab_size - 1}; pass one of those"
        )
    if asked in meanings:
        raise MaskTokenInUse(
            f"mask_token_id {asked} is the tokenizer's {meanings[asked]} token; pass an id without a meaning"
        )
    if occurrences[asked]:
        raise MaskTokenInUse(
            f"mask_token_id {asked} occurs {int(occurrences[asked])} times in the prepared rows; pass an id that never "
            "occurs"
        )
    return asked


def _meanings(tokenizer: Any) -> dict[int, str]:
    """Ids that mean something to the tokenizer: {id: "eos"}."""
    names = ("unk", "bos", "pad", "eos")
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return {int(value): name for name, value in ids.items() if value is not None}


def _template_ids(tokenizer: Any) -> set[int]:
    """Ids that the chat template writes around a short conversation; empty without a template."""
    if not tokenizer.chat_template:
        return set()
    from jinja2.exceptions import TemplateError

    used: set[int] = set()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for messages in (turns, [{"role": "system", "content": "s"}, *turns]):
        try:
            used |= set(
                as_token_ids(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
            )
        except TemplateError:  # e.g. a template that knows no system role
            continue
    return used
