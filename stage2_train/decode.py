"""Speculative decoding with a DFlash drafter, and the target's own step-by-step decoding to compare with.

One loop, read top-down: prefill, then cycles of draft - verify - commit until every text has ended. Both loops use the
same target_decoder, so that their difference in speed is the drafter's. Called by stage2_train.evaluate; read
target_decoder.py (the target's cache) and draft_cache.py (the drafter's) next.

Shapes: R rows (prompts decoded together), B block size, D drafts of a block (B-1; B with shifted labels), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.errors import NonFinite
from shared.target import Target
from stage2_train.acceptance import Cycle
from stage2_train.drafter import Drafter, embed_blocks, logits
from stage2_train.target_decoder import open_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How a text is continued; `max_new_tokens` counts the prefill's token, `temperature` 0 is greedy."""

    block_size: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Decoded:
    """One continuation. `tokens` may hold any id, the mask's included: nothing is stripped from the target's words."""

    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    ended_by_eos: bool = False
    done: bool = False

    def extend(self, tokens: Sequence[int], settings: DecodeSettings) -> int:
        """Append up to and with the first end-of-sequence token or the limit; returns how many were kept."""
        before = len(self.tokens)
        for token in tokens:
            if self.done:
                break
            self.tokens.append(token)
            self.ended_by_eos = token in settings.eos_token_ids
            self.done = self.ended_by_eos or len(self.tokens) >= settings.max_new_tokens
        return len(self.tokens) - before


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The texts of rows decoded together and the seconds spent before and after the first token."""

    texts: list[Decoded]
    prefill_seconds: float
    decode_seconds: float


def unheard(_tokens: int) -> None:
    """Nobody wants to know how far a batch is."""


@torch.inference_mode()
def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    written: Callable[[int], None] = unheard,
) -> DecodedBatch:
    """Continue the prompts; greedy output is the target's own, sampled output has the target's distribution.

    `written` hears the tokens of all rows after the prefill and every cycle: on a CPU a batch takes minutes. Raises
    NonFinite when target or drafter give no finite logits.
    """
    rows, block_size, config = len(prompts), settings.block_size, drafter.config
    first = config.first_draft
    embed, head = (weight.to(drafter.fc.weight.dtype) for weight in (target.embed_tokens_weight, target.lm_head_weight))
    generator = torch.Generator(target.device).manual_seed(settings.seed)
    capacity = max(map(len, prompts)) + settings.max_new_tokens + 1 + block_size - first
    texts = [Decoded() for _ in prompts]

    started = _now(target)
    decoder = open_decoder(target, config.target_layer_ids, rows=rows, capacity=capacity)
    context = drafter.new_cache(rows, capacity)
    out = decoder.prefill(prompts)
    require_finite(out.logits, "the target's logits after the prompts")
    assert out.features is not None
    drafter.extend(context, out.features.to(embed.dtype), torch.tensor(decoder.lengths))
    anchors, _ = pick(out.logits, settings.temperature, generator)
    for text, (token,) in zip(texts, anchors.tolist(), strict=True):
        text.extend([token], settings)
    prefilled = _now(target)

    masks = torch.full((rows, block_size - 1), config.mask_token_id, device=target.device)
    checked = False
    while not all(text.done for text in texts):
        written(sum(len(text.tokens) for text in texts))
        positions = context.next_positions(block_size)
        hidden = drafter.draft(context, embed_blocks(torch.cat((anchors, masks), 1), embed, config), positions)
        # Two-dimensional: on a sliced [R, D, H] F.linear becomes a batched product that copies the whole head first.
        draft_logits = logits(hidden[:, first:].flatten(0, 1), head, config).unflatten(0, (rows, -1))
        if not checked:
            require_finite(draft_logits, "the drafter's logits")
            checked = True
        drafts, draft_probs = pick(draft_logits, settings.temperature, generator)
        out = decoder.verify(torch.cat((anchors, drafts), 1))
        accepted, anchors = judge(out.logits, drafts, draft_probs, settings.temperature, generator)
        # The cycle's only wait for the device: everything the host must know, in one copy.
        counts = []
        for text, (n, bonus, *block) in zip(texts, torch.cat((accepted, anchors, drafts), 1).tolist(), strict=True):
            kept = text.extend([*block[:n], bonus], settings)
            if kept:  # an ended row keeps its place and is verified in vain until the others have ended
                text.cycles.append(Cycle(accepted=n, kept=kept))
            counts.append(kept)
        assert out.features is not None
        drafter.extend(context, out.features.to(embed.dtype), torch.tensor(counts))
        decoder.commit(counts)
    return DecodedBatch(texts, prefilled - started, _now(target) - prefilled)


@torch.inference_mode()
def plain_decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    written: Callable[[int], None] = unheard,
) -> DecodedBatch:
    """The target alone, one token per forward: the reference text and the reference speed. `written` as above."""
    generator = torch.Generator(target.device).manual_seed(settings.seed)
    capacity = max(map(len, prompts)) + settings.max_new_tokens + 1
    texts = [Decoded() for _ in prompts]

    started = _now(target)
    decoder = open_decoder(target, (), rows=len(prompts), capacity=capacity)
    out = decoder.prefill(prompts)
    require_finite(out.logits, "the target's logits after the prompts")
    tokens, _ = pick(out.logits, settings.temperature, generator)
    for text, (token,) in zip(texts, tokens.tolist(), strict=True):
        text.extend([token], settings)
    prefilled = _now(target)

    while not all(text.done for text in texts):
        written(sum(len(text.tokens) for text in texts))
        live = [int(not text.done) for text in texts]
        tokens, _ = pick(decoder.verify(tokens).logits, settings.temperature, generator)
        decoder.commit(live)
        for text, (token,) in zip(texts, tokens.tolist(), strict=True):
            text.extend([token], settings)
    return DecodedBatch(texts, prefilled - started, _now(target) - prefilled)


def pick(raw: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Tokens [R, N] from logits [R, N, V], each on its own, and the distribution they came from (None when greedy)."""
    if temperature == 0:
        return raw.argmax(-1), None
    probabilities = distribution(raw, temperature)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator)
    return drawn.view(raw.shape[:2]), probabilities


def distribution(raw: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float32."""
    return torch.softmax(raw.float() / temperature, dim=-1)


def judge(
    raw: Tensor, drafts: Tensor, draft_probs: Tensor | None, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """How many drafts pass [R, 1] and the target's token after them [R, 1].

    `raw` [R, D+1, V] are the target's logits at the anchor and the drafts, place i judging drafts[:, i] ([R, D]).
    Greedy: the common prefix with the argmax. Sampled: draft d passes iff u * q(d) < p(d); the first that fails is
    replaced by a draw from max(p - q, 0) renormalised, and after D passes one more token is drawn from p (Leviathan et
    al., 2023).
    """
    if draft_probs is None:
        choices = raw.argmax(-1)
        accepted = (choices[:, :-1] == drafts).long().cumprod(1).sum(1, keepdim=True)
        return accepted, choices.gather(1, accepted)
    wanted = distribution(raw, temperature)
    p = wanted[:, :-1].gather(2, drafts[..., None])[..., 0]
    q = draft_probs.gather(2, drafts[..., None])[..., 0]
    u = torch.rand(p.shape, generator=generator, device=p.device)
    accepted = (u * q < p).long().cumprod(1).sum(1, keepdim=True)
    index = accepted[..., None].expand(-1, 1, wanted.shape[2])
    p_next = wanted.gather(1, index)[:, 0]
    # After a full block nothing was refused: with q = 0 the residual is p itself.
    q_next = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).gather(1, index)[:, 0]
    residual = (p_next - q_next).clamp_(min=0)
    # p = q up to rounding leaves no residual (and a refusal has then probability 0 up to rounding): fall back to p.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return accepted, torch.multinomial(residual, 1, generator=generator)


def require_finite(values: Tensor, what: str) -> None:
    """Raise NonFinite when a value is NaN or infinite: argmax would still give a token, and a wrong one."""
    if not bool(torch.isfinite(values).all()):
        raise NonFinite(
            f"{what} are not finite in {values.dtype}; use --dtype bfloat16 or float32, and check the weights"
        )


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
