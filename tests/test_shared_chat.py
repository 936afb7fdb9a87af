"""The ids are the tokenizer's own rendering, and the mask is exactly what the assistant says plus its turn end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_target import ALTERNATING, THINKING, make_tokenizer
from transformers import BatchEncoding

from shared.chat import ChatRenderer, as_token_ids, render_prompt, render_with_loss_mask, require_chat_template
from shared.conversations import Unusable
from shared.errors import BadRow, NoAssistantTurn, NoChatTemplate

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def spoken(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    return str(tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag]))


SHAPES: list[Messages] = [
    [user("a"), assistant("b")],
    [{"role": "system", "content": "be brief"}, user("a"), assistant("b")],
    [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")],
    [user("a"), assistant("b"), user("c")],
    [user("a"), user("b"), assistant("c")],
    [user("a"), assistant("b"), assistant("c")],
    [user("a"), assistant("b"), {"role": "tool", "content": "42"}, assistant("it is 42")],
    [user("a"), assistant("")],
]


@pytest.mark.parametrize("messages", SHAPES)
def test_ids_are_the_tokenizers_own_rendering(messages: Messages) -> None:
    tokenizer = make_tokenizer()
    ids, mask = render_with_loss_mask(tokenizer, messages)
    assert ids == as_token_ids(tokenizer.apply_chat_template(messages, tokenize=True))
    assert spoken(tokenizer, ids, mask) == "".join(
        m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"
    )


@pytest.mark.parametrize("messages", SHAPES)
def test_the_prompt_is_the_tokenizers_own_rendering(messages: Messages) -> None:
    tokenizer = make_tokenizer()
    own = as_token_ids(tokenizer.apply_chat_template(messages[:1], tokenize=True, add_generation_prompt=True))
    assert render_prompt(tokenizer, messages[:1]) == own


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧 ok",
        "ok 👩‍👩‍👧",
        "漢字",
        "e\u0301 cafe\u0301",
        " leading",
        "trailing \n",
        "\n\nlines\n",
        "<|im_end|> inside",
        "a" * 50,
        "\ufffd",
        "\u200d",
    ],
)
def test_the_mask_is_exact_at_the_edges_of_a_span(text: str) -> None:
    tokenizer = make_tokenizer()
    ids, mask = render_with_loss_mask(tokenizer, [user("漢👍"), assistant(text), user("👍"), assistant(text)])
    assert spoken(tokenizer, ids, mask) == (text + "<|im_end|>") * 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=3))
def test_any_text_is_masked_exactly(turns: list[tuple[str, str]]) -> None:
    tokenizer = make_tokenizer()
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    ids, mask = render_with_loss_mask(tokenizer, messages)
    # Positions found the slow way: the prompt before each turn, tokenised alone, ends where the turn begins.
    assert spoken(tokenizer, ids, mask) == "".join(answer + "<|im_end|>" for _, answer in turns)
    for turn in range(1, len(messages), 2):
        prompt = render_prompt(tokenizer, messages[:turn])
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt)] == 1
        assert mask[len(prompt) - 1] == 0


def test_pad_equal_to_eos_masks_nothing_by_id() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, mask = render_with_loss_mask(tokenizer, [user("a"), assistant("b"), user("c"), assistant("d")])
    ends = [flag for token, flag in zip(ids, mask, strict=True) if token == tokenizer.eos_token_id]
    assert ends == [0, 1, 0, 1]


def test_a_template_that_drops_earlier_thinking_gives_one_row_per_turn() -> None:
    tokenizer = make_tokenizer(THINKING)
    messages = [user("a"), assistant("<think>x</think>\nb"), user("c"), assistant("<think>y</think>\nd")]
    rows = ChatRenderer(tokenizer).rows(messages)
    assert [row.turn for row in rows] == [1, 3]
    assert [spoken(tokenizer, row.input_ids, row.loss_mask) for row in rows] == [
        "<think>x</think>\nb<|im_end|>",
        "<think>y</think>\nd<|im_end|>",
    ]
    for row in rows:
        assert row.turn is not None
        prompt = render_prompt(tokenizer, messages[: row.turn])
        assert row.input_ids[: len(prompt)] == prompt
        assert row.loss_mask[: len(prompt)] == [0] * len(prompt)
    with pytest.raises(BadRow, match="one row per assistant turn"):
        render_with_loss_mask(tokenizer, messages)
    (last,) = ChatRenderer(tokenizer).rows(messages, train_on="last")
    assert spoken(tokenizer, last.input_ids, last.loss_mask) == "<think>y</think>\nd<|im_end|>"


def test_only_the_last_turn_is_supervised_on_request() -> None:
    tokenizer = make_tokenizer()
    (row,) = ChatRenderer(tokenizer).rows([user("a"), assistant("b"), user("c"), assistant("d")], train_on="last")
    assert spoken(tokenizer, row.input_ids, row.loss_mask) == "d<|im_end|>"


def test_a_turn_end_that_is_not_the_eos_and_text_that_repeats() -> None:
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    ids, mask = render_with_loss_mask(tokenizer, [user("yes"), assistant("yes"), user("yes"), assistant("yes")])
    # No special token ends this turn, so its end is everything up to the next turn.
    assert spoken(tokenizer, ids, mask) == "yes<end>\n" * 2


def test_a_template_whose_last_turn_ends_differently_is_taken_apart() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|endoftext|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    rows = ChatRenderer(tokenizer).rows([user("a"), assistant("b"), user("c"), assistant("d")])
    assert [spoken(tokenizer, row.input_ids, row.loss_mask) for row in rows] == ["b<|endoftext|>", "d<|endoftext|>"]


def test_a_template_that_rewrites_its_own_prompt_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    with pytest.raises(Unusable) as caught:
        ChatRenderer(make_tokenizer(template)).rows([user("a"), assistant("b")])
    assert (caught.value.reason, caught.value.error) == ("unstable_template", BadRow)


def test_a_conversation_the_template_rejects_is_a_bad_row_not_a_crash() -> None:
    tokenizer = make_tokenizer(ALTERNATING)
    with pytest.raises(BadRow, match="roles must alternate"):
        render_prompt(tokenizer, [user("a"), user("b")])
    with pytest.raises(BadRow, match="roles must alternate"):
        render_with_loss_mask(tokenizer, [user("a"), user("b"), assistant("c")])


def test_no_assistant_turn_and_an_assistant_without_a_prompt() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(NoAssistantTurn) as caught:
        render_with_loss_mask(tokenizer, [user("a")])
    assert caught.value.exit_code == 13
    with pytest.raises(BadRow, match="starts with the assistant"):
        render_with_loss_mask(tokenizer, [assistant("a"), user("b"), assistant("c")])


def test_template_switches_reach_the_template() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and thinking is defined and not thinking %}{{ '<t></t>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if thinking is defined and not thinking %}{{ '<t></t>' }}{% endif %}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    ids, mask = render_with_loss_mask(tokenizer, [user("a"), assistant("b")], thinking=False)
    assert "<t></t>" in tokenizer.decode(ids)
    assert spoken(tokenizer, ids, mask) == "b<|im_end|>"


def test_every_kind_of_tokenizer_result_gives_the_same_ids() -> None:
    ids = [5, 6, 7]
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": [1, 1, 1]})
    for result in (
        ids,
        (5, 6, 7),
        [ids],
        torch.tensor(ids),
        torch.tensor([ids]),
        np.array(ids),
        encoding,
        {"input_ids": [ids]},
    ):
        assert as_token_ids(result) == ids


def test_a_tokenizer_that_marks_the_start_of_every_text_is_masked_by_offsets() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(
        ["user hello there assistant fine thanks"] * 3,
        trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}"
        "{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    messages = [user("hello there"), assistant("fine thanks")]
    ids, mask = render_with_loss_mask(tokenizer, messages)
    assert ids == as_token_ids(tokenizer.apply_chat_template(messages, tokenize=True))
    assert spoken(tokenizer, ids, mask).strip() == "fine thanks</s>"


def test_a_tokenizer_without_a_template_is_refused_with_what_to_do() -> None:
    with pytest.raises(NoChatTemplate, match="some-target has no chat template") as caught:
        require_chat_template(make_tokenizer(None), "some-target")
    assert caught.value.exit_code == 21
    require_chat_template(make_tokenizer(), "some-target")
