"""Messages to token ids through the tokenizer's own chat template, and where the assistant speaks in them.

Stock templates carry no generation marks, so spans are found by rendering prefixes of the conversation.
Called by stage1_extract (prepare, regenerate) and by `dflash eval` (prompts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from shared.conversations import Unusable
from shared.errors import BadRow, NoAssistantTurn, NoChatTemplate

TrainOn = Literal["all", "last"]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedRow:
    """Token ids with a mask of equal length (1 = assistant's words and turn end).

    `turn` is the message index of the only supervised turn when the conversation had to be taken apart, else None.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turn: int | None = None


def require_chat_template(tokenizer: Any, where: str) -> None:
    """Raise NoChatTemplate unless the tokenizer can render a conversation; `where` names the target."""
    if not getattr(tokenizer, "chat_template", None):
        raise NoChatTemplate(
            f"the tokenizer of {where} has no chat template: add chat_template.jinja to that folder, use an instruct "
            "model, or give ready rows (input_ids and loss_mask)"
        )
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise NoChatTemplate(f"the chat template of {where} is broken in line {error.lineno}: {error}") from error
    except (TemplateError, TypeError, ValueError):
        return  # it refuses this one conversation; each row says so for itself


def as_token_ids(encoded: Any) -> list[int]:
    """The flat list in what a tokenizer returns: a list, a list of one list, a tensor or array, or a BatchEncoding.

    transformers 5 made `apply_chat_template` return a BatchEncoding, whose len() is its number of fields.
    """
    if hasattr(encoded, "keys"):
        encoded = encoded["input_ids"]
    if hasattr(encoded, "tolist"):
        encoded = encoded.tolist()
    ids = list(encoded)
    if len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = list(ids[0])
    return [int(token) for token in ids]


class ChatRenderer:
    """One tokenizer with its template and the template's own switches (e.g. enable_thinking)."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self.special_texts = {str(text) for text in tokenizer.all_special_tokens} | {
            t.content for t in added if t.special
        }

    def text(self, messages: Messages, tools: list[Any] | None = None, *, prompt: bool) -> str:
        """The template's text; `prompt` adds what precedes an answer. Raises Unusable when the template refuses."""
        from jinja2.exceptions import TemplateError

        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.template_kwargs
            )
        except (TemplateError, TypeError) as error:
            raise Unusable(
                "template_refused", BadRow, f"the chat template refuses this conversation: {error}"
            ) from error
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """Token ids of template text: special tokens come from the text alone, nothing is added or cut."""
        return as_token_ids(self.tokenizer(text, add_special_tokens=False, truncation=False))

    def prompt_ids(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """What the target reads before it answers."""
        return self.encode(self.text(messages, tools, prompt=True))

    def rows(self, messages: Messages, tools: list[Any] | None = None, train_on: TrainOn = "all") -> list[RenderedRow]:
        """Training rows of one conversation: one row, or one per assistant turn.

        The conversation is taken apart when the template renders earlier turns differently later on (thinking
        stripped from history, another end mark on the last turn): then no single rendering holds what the target
        saw at each turn. Raises Unusable (no_assistant_turn, assistant_first, unstable_template, template_refused).
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Unusable(
                "no_assistant_turn",
                NoAssistantTurn,
                "no assistant turn to learn from; add --regenerate to have the target answer",
            )
        if turns[0] == 0:
            raise Unusable(
                "assistant_first",
                BadRow,
                "the conversation starts with the assistant: there is no prompt before its words",
            )
        turns = turns[-1:] if train_on == "last" else turns
        full = self.text(messages, tools, prompt=False)
        spans = [self._span(messages, tools, turn, full) for turn in turns]
        if all(span is not None for span in spans):
            ids, mask = self._encode_with_spans(full, [span for span in spans if span is not None])
            return [RenderedRow(input_ids=ids, loss_mask=mask)]
        rows = []
        for turn in turns:
            history = messages[: turn + 1]
            text = self.text(history, tools, prompt=False)
            span = self._span(history, tools, turn, text)
            if span is None:
                raise Unusable(
                    "unstable_template",
                    BadRow,
                    f"the prompt before message {turn} is not a prefix of the conversation with it: the template "
                    "rewrites its own prompt (try --chat-template-kwargs, e.g. '{\"enable_thinking\": false}')",
                )
            ids, mask = self._encode_with_spans(text, [span])
            rows.append(RenderedRow(input_ids=ids, loss_mask=mask, turn=turn))
        return rows

    def _span(self, messages: Messages, tools: list[Any] | None, turn: int, full: str) -> tuple[int, int] | None:
        """Characters [start, end) of one assistant turn in `full`; None when `full` does not contain its renderings."""
        prompt = self.text(messages[:turn], tools, prompt=True)
        upto = full if turn == len(messages) - 1 else self.text(messages[: turn + 1], tools, prompt=False)
        if not (full.startswith(upto) and upto.startswith(prompt)):
            return None
        return len(prompt), len(prompt) + self._turn_length(
            upto[len(prompt) :], str(messages[turn].get("content") or "")
        )

    def _turn_length(self, turn_text: str, content: str) -> int:
        """Characters of a turn up to and with its end token; what follows that (a newline) is not spoken."""
        # The first place of the content, not the last: "d" also occurs in <|im_end|>.
        found = turn_text.find(content.strip())
        after_content = found + len(content.strip()) if found >= 0 else 0
        found_ends = ((turn_text.rfind(text, after_content), text) for text in self.special_texts if text)
        ends = [at + len(text) for at, text in found_ends if at >= 0]
        return max(ends, default=len(turn_text))

    def _encode_with_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Ids of `text` and the mask of its character spans.

        Tokenised piece by piece at the span edges: at inference the prompt is tokenised before the answer exists, so
        no token may straddle them. Tokenizers that mark the start of every text (the pieces then do not decode to the
        whole) are tokenised whole and masked by offsets; a straddling token is not supervised.
        """
        ids: list[int] = []
        mask: list[int] = []
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        for number, (start, end) in enumerate(pairwise(edges)):
            piece = self.encode(text[start:end]) if end > start else []
            ids += piece
            mask += [number % 2] * len(piece)
        whole = self.encode(text)
        if ids == whole or self.tokenizer.decode(ids) == self.tokenizer.decode(whole):
            return ids, mask
        offsets = self.tokenizer(text, add_special_tokens=False, truncation=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        inside = [int(any(start <= a and b <= end and a < b for start, end in spans)) for a, b in offsets]
        return whole, inside


def render_prompt(tokenizer: Any, messages: Messages, **template_kwargs: Any) -> list[int]:
    """Token ids of a conversation with the generation prompt added. Raises BadRow when the template refuses it."""
    try:
        return ChatRenderer(tokenizer, template_kwargs).prompt_ids(messages)
    except Unusable as verdict:
        raise verdict.error(verdict.detail) from verdict


def render_with_loss_mask(tokenizer: Any, messages: Messages, **template_kwargs: Any) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of one conversation, all assistant turns supervised.

    Raises NoAssistantTurn; BadRow for a template that refuses it or needs one row per turn (use ChatRenderer.rows).
    """
    try:
        rows = ChatRenderer(tokenizer, template_kwargs).rows(messages)
    except Unusable as verdict:
        raise verdict.error(verdict.detail) from verdict
    if len(rows) > 1:
        raise BadRow("this chat template needs one row per assistant turn")
    return rows[0].input_ids, rows[0].loss_mask
