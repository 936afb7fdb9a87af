"""`dflash eval`: held-out prompts to acceptance lengths, by real decoding and with proof that the text is the target's.

Read top-down: load drafter and target, refuse a wrong pair, then for each data file decode, compare, time, write the
report and its record. The loops are decode.py, the counting is acceptance.py, the proof is lossless.py, the figures
and tables are evaluation_report.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from manifests.commit import Ledger
from manifests.runs import recorded
from shared.atomic import require_writable, write_json
from shared.chat import ChatRenderer
from shared.config import to_dict
from shared.errors import ConfigRefused, NotLossless
from shared.progress import Bar, progress, say
from shared.target import Target, load_target, resolve_device
from stage2_train.acceptance import acceptance_length
from stage2_train.config_eval import EvalConfig
from stage2_train.decode import Decoded, DecodedBatch, DecodeSettings, plain_decode, speculative_decode, unheard
from stage2_train.evaluation_report import Outcome, Work, build_report, record_of, report_file, show
from stage2_train.lossless import Difference, first_difference, tie_tolerance
from stage2_train.prompts import Prompt, PromptLimits, PromptSet, data_files, read_prompts
from stage2_train.subject import Subject, load_subject
from stage2_train.target_decoder import decoder_class

SAY_EVERY_S = 20.0


def evaluate(config: EvalConfig) -> list[dict[str, Any]]:
    """Evaluate every data file; returns their reports, which are also in OUT/evaluations.

    Raises CheckpointMismatch, StoreMismatch, the data and target errors before any decoding; NotLossless after all
    reports are written.
    """
    subject = load_subject(config)
    require_writable(subject.out)
    files = data_files(config.data)
    reports: list[dict[str, Any]] = []
    with recorded(subject.out, "eval", to_dict(config)) as run_id:
        ledger = Ledger(subject.out, f"eval-{run_id}")
        work = open_work(config, subject)
        kwargs = config.template_kwargs()
        renderer = ChatRenderer(work.target.tokenizer, subject.template_kwargs if kwargs is None else kwargs)
        limits = PromptLimits(config.limit, longest_prompt(work), work.target.embed_tokens_weight.shape[0])
        # All files are read before the first is decoded: a fault in the last one shows now.
        for prompts in [read_prompts(path, renderer, limits) for path in files]:
            started = time.time()
            report = build_report(work, prompts, decode_file(work, prompts))
            report["seconds"] = time.time() - started
            path = report_file(subject, report["name"])
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, report)
            ledger.append(record_of(report, run_id, str(path.relative_to(subject.out))))
            reports.append(report)
        show(reports, subject, as_json=config.json)
        refuse_other_text(reports, subject)
    return reports


def open_work(config: EvalConfig, subject: Subject) -> Work:
    """Load the target, put the drafter beside it and fix how texts are decoded. Raises ConfigRefused."""
    block_size = subject.drafter.config.block_size
    if config.block_size is not None and not 2 <= config.block_size <= block_size:
        raise ConfigRefused(
            f"--block-size {config.block_size} but the drafter was trained with {block_size}: it knows no slot beyond "
            f"that; use 2..{block_size}"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    target = load_target(subject.target, dtype=config.dtype, device=str(device))
    # Half precision overflows in some drafters (0.06 of 15 tokens accepted), so only bfloat16 is followed down.
    dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
    drafter = subject.drafter.to(device=target.device, dtype=dtype)
    settings = DecodeSettings(
        block_size=config.block_size or block_size,
        max_new_tokens=config.max_new_tokens,
        eos_token_ids=eos_token_ids(target),
        temperature=config.temperature,
        seed=config.seed,
    )
    rows = config.batch_size or (32 if target.device.type == "cuda" else 8)
    return Work(config, subject, target, drafter, settings, min(rows, decoder_class(target).max_rows or rows))


def eos_token_ids(target: Target) -> frozenset[int]:
    """Every token that ends an answer: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(target.model, "generation_config", None), target.text_config, target.tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(token) for token in found)


def longest_prompt(work: Work) -> int:
    """Tokens a prompt may have so that every position of its text and of the last drafts exists."""
    positions = int(work.target.text_config.max_position_embeddings)
    return positions - work.settings.max_new_tokens - (1 + work.drafts)


def decode_file(work: Work, prompts: PromptSet) -> Outcome:
    """Decode all prompts speculatively and the checked ones also plainly, compare, and time the first ones."""
    config, count = work.config, len(prompts.prompts)
    greedy_check = config.check and config.temperature == 0
    checked = min(config.check_prompts or count, count) if greedy_check else 0
    alone: dict[int, tuple[DecodedBatch, DecodedBatch | None]] = {}
    texts: dict[int, Decoded] = {}
    outcome = Outcome(checked=checked)
    warm_up(work, prompts.prompts)
    with progress(f"decode {prompts.name}", total=count, unit="prompts", title="eval") as bar:
        for batch in batches(prompts.prompts, work.rows):
            ids = [prompts.prompts[i].ids for i in batch]
            fast = speculative_decode(work.target, work.drafter, ids, work.settings, within(bar, work, "the drafter"))
            texts.update(zip(batch, fast.texts, strict=True))
            chosen = {i: texts[i] for i in batch if i < checked}
            slow = compare(work, prompts, chosen, outcome, within(bar, work, "the target alone"))
            if work.rows == 1:
                alone[batch[0]] = (fast, slow)
            bar.advance(len(batch), **so_far(texts.values(), outcome))
    outcome.texts = [texts[i] for i in range(count)]
    outcome.speed = measure_speed(work, prompts.prompts[: config.timed_prompts], alone)
    return outcome


def within(bar: Bar, work: Work, writer: str) -> Callable[[int], None]:
    """Show how far a batch is, from its start. One row is timed as it is decoded, and short: nothing then."""
    if work.rows == 1:
        return unheard

    def show(tokens: int) -> None:
        bar.advance(0, now=f"{tokens:,} tokens by {writer}")

    show(0)
    return show


def compare(
    work: Work, prompts: PromptSet, texts: dict[int, Decoded], outcome: Outcome, written: Callable[[int], None]
) -> DecodedBatch | None:
    """Decode these prompts plainly and add to `outcome` where speculation wrote something else."""
    if not texts:
        return None
    chosen = [prompts.prompts[i] for i in texts]
    slow = plain_decode(work.target, [prompt.ids for prompt in chosen], work.settings, written)
    tolerance = tie_tolerance(work.target.dtype, work.config.tie_tolerance)
    for prompt, own, text in zip(chosen, slow.texts, texts.values(), strict=True):
        difference = first_difference(work.target, prompt.id, prompt.ids, (own.tokens, text.tokens), tolerance)
        if difference is not None:
            outcome.differences.append(difference)
    return slow


def batches(prompts: Sequence[Prompt], rows: int) -> list[list[int]]:
    """Prompt numbers in groups of `rows`, alike in length so that little is padded; one by one in file order."""
    order = list(range(len(prompts)))
    if rows > 1:
        order.sort(key=lambda i: len(prompts[i].ids))
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def warm_up(work: Work, prompts: Sequence[Prompt]) -> None:
    """Let a GPU load its kernels before anything is timed."""
    if work.target.device.type == "cuda":
        short = DecodeSettings(block_size=work.settings.block_size, max_new_tokens=4, eos_token_ids=frozenset())
        speculative_decode(work.target, work.drafter, [prompts[0].ids], short)
        plain_decode(work.target, [prompts[0].ids], short)


def measure_speed(
    work: Work, prompts: Sequence[Prompt], alone: dict[int, tuple[DecodedBatch, DecodedBatch | None]]
) -> dict[str, Any]:
    """Tokens per second at batch 1 over these prompts, after the first token; `alone` holds runs already made."""
    seconds, tokens = [0.0, 0.0], [0, 0]
    said = -math.inf
    for i, prompt in enumerate(prompts):
        if i not in alone and time.monotonic() - said >= SAY_EVERY_S:  # no bar: its thread would be timed as well
            said = time.monotonic()
            say(f"eval: time at batch 1  {i}/{len(prompts)} prompts")
        fast, slow = alone.get(i, (None, None))
        fast = fast or speculative_decode(work.target, work.drafter, [prompt.ids], work.settings)
        slow = slow or plain_decode(work.target, [prompt.ids], work.settings)
        for kind, batch in enumerate((fast, slow)):
            seconds[kind] += batch.decode_seconds
            tokens[kind] += len(batch.texts[0].tokens) - 1
    fast_rate, slow_rate = (n / s if n and s else None for n, s in zip(tokens, seconds, strict=True))
    return {
        "tokens_per_second": fast_rate,
        "plain_tokens_per_second": slow_rate,
        "speedup": fast_rate / slow_rate if fast_rate and slow_rate else None,
        "timed_prompts": len(prompts),
    }


def so_far(texts: Iterable[Decoded], outcome: Outcome) -> dict[str, Any]:
    """The numbers beside the progress bar."""
    length = acceptance_length([text.cycles for text in texts])
    return {} if length is None else {"acceptance_length": length, "differences": len(outcome.differences)}


def refuse_other_text(reports: Sequence[dict[str, Any]], subject: Subject) -> None:
    """Raise NotLossless when a greedy text differs from the target's own by more than a numerical tie."""
    wrong = [(report, item) for report in reports for item in (report["check"] or {}).get("mismatches", [])]
    if wrong:
        report, first = wrong[0]
        raise NotLossless(
            f"{len(wrong)} greedy texts are not the target's own; the first: {report['name']}, "
            f"{Difference(**first).sentence()}; all are listed in {report_file(subject, report['name'])}"
        )
