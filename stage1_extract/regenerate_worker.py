"""The main loop of `prepare --regenerate`: one process, one replica of the target, its share of the conversations.

Started by manifests/launch.py. Reads DIR/regenerate/{work.json,threads.jsonl}, appends answers to a file of its own;
the decoding is stage1_extract/decoding.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared import phases
from shared.atomic import disk_faults
from shared.chat import ChatRenderer, Messages
from shared.config import from_dict
from shared.conversations import Unusable
from shared.errors import Interrupted
from shared.reporter import Reporter, Ticks
from shared.target import Target, load_target, watch_layers
from shared.worker import stop_requested
from stage1_extract.config import PrepareConfig
from stage1_extract.decoding import Answer, Decoding, Request, decode
from stage1_extract.regenerate import Answers, Thread, answer_text, prompt_sha

logger = logging.getLogger(__name__)
_SAVE_EVERY_S = 1.0


class AnswerFile:
    """Appends answers, a lot at a time, durable before the next lot is decoded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._saved = time.monotonic()

    def add(self, doc_id: str, turn: int, prompt: list[int], answer: Answer) -> None:
        """Keep an answer for the next save."""
        self._lines.append(
            json.dumps(
                {
                    "doc": doc_id,
                    "turn": turn,
                    "prompt": prompt_sha(prompt),
                    "ids": answer.ids,
                    "finished": answer.finished,
                },
                ensure_ascii=False,
            )
        )

    def save(self, *, now: bool = False) -> None:
        """Write what was added, at most once a second unless `now`."""
        if not self._lines or (not now and time.monotonic() - self._saved < _SAVE_EVERY_S):
            return
        with disk_faults(self.path), self.path.open("ab") as file:
            # A newline in front closes the torn line of a killed predecessor; readers pass over blank lines.
            file.write(("\n" + "\n".join(self._lines) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._lines.clear()
        self._saved = time.monotonic()


def eos_ids(target: Target) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's (one or a list) and the tokenizer's."""
    given = getattr(target.model.generation_config, "eos_token_id", None)
    ids = {int(i) for i in (given if isinstance(given, (list, tuple)) else [given]) if i is not None}
    if target.tokenizer.eos_token_id is not None:
        ids.add(int(target.tokenizer.eos_token_id))
    return tuple(sorted(ids))


def row_seed(seed: int, doc_id: str, turn: int) -> int:
    """The sampling seed of one answer: a function of the run's seed and the conversation, not of a place in a batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{doc_id}\0{turn}".encode()).digest()[:8], "big")


def main(run_dir: Path, rank: int, world_size: int) -> None:
    """Answer this worker's threads, one turn of all of them at a time. Raises Interrupted when asked to stop."""
    folder = run_dir / "regenerate"
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    config, settings = from_dict(PrepareConfig, work["config"]), work["settings"]
    text = (folder / "threads.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line][rank::world_size]
    threads = [Thread(row["doc"], row["chunks"], row["tools"]) for row in rows]
    reporter = Reporter(run_dir, "regenerate", rank)
    device = (
        f"cuda:{rank % torch.cuda.device_count()}"
        if config.device in ("auto", "cuda") and torch.cuda.is_available()
        else config.device
    )
    target = load_target(config.target, dtype=config.dtype, device=device, report=reporter.update)
    tick = Ticks(reporter.inner)
    watch_layers(target, tick)
    decoding = Decoding(temperature=config.temperature, batch_size=config.batch_size, eos=eos_ids(target))
    logger.info(
        "target on %s as %s; %d conversations; answers end with %s",
        target.device,
        target.dtype,
        len(threads),
        decoding.eos,
    )

    answers = Answers(folder, settings).load()
    file = AnswerFile(folder / f"answers-{settings}-{rank}.jsonl")
    renderer = ChatRenderer(target.tokenizer, config.template_kwargs)
    histories: list[Messages | None] = [[] for _ in threads]
    for turn in range(max(len(thread.chunks) for thread in threads)):
        prompts = _prompts(threads, histories, turn, renderer, config.max_length)
        requests = [
            Request(
                i,
                prompt,
                min(config.max_new_tokens, config.max_length - len(prompt)),
                row_seed(config.seed, threads[i].doc_id, turn),
            )
            for i, prompt in prompts.items()
            if answers.get(threads[i].doc_id, turn, prompt) is None
        ]
        done, tokens, started = len(prompts) - len(requests), 0, time.monotonic()
        # Up to the first lot: a hybrid target's kernels for single tokens are tuned on it.
        phase = phases.STEP if turn else phases.WARM_UP
        reporter.update(phase, done, len(prompts), "answers", turn=turn + 1)
        for lot in decode(target, requests, decoding, _looking(tick)):
            for answer in lot:
                file.add(threads[answer.key].doc_id, turn, prompts[answer.key], answer)
                done, tokens = done + 1, tokens + len(answer.ids)
            file.save()
            rate = tokens / (time.monotonic() - started)
            reporter.update(phases.STEP, done, len(prompts), "answers", turn=turn + 1, tokens_per_second=round(rate))
        file.save(now=True)
        if stop_requested():
            raise Interrupted(
                f"regeneration stopped at {done} of {len(prompts)} answers; run the same command again to go on"
            )
        answers.load()
        _extend(threads, histories, turn, prompts, answers, renderer.tokenizer)


def _looking(tick: Callable[[], None]) -> Callable[[], bool]:
    """stop_requested, which the decoding asks every few tokens: a long answer without an end is progress too."""

    def look() -> bool:
        tick()
        return stop_requested()

    return look


def _prompts(
    threads: list[Thread], histories: list[Messages | None], turn: int, renderer: ChatRenderer, max_length: int
) -> dict[int, list[int]]:
    """Prompt ids of every thread that speaks in this turn; a thread whose prompt does not fit or render ends here."""
    prompts: dict[int, list[int]] = {}
    for i, thread in enumerate(threads):
        history = histories[i]
        if history is None or turn >= len(thread.chunks):
            continue
        histories[i] = history = history + thread.chunks[turn]
        try:
            ids = renderer.prompt_ids(history, thread.tools)
        except Unusable:
            ids = []
        if 0 < len(ids) < max_length:
            prompts[i] = ids
        else:
            histories[i] = None
    return prompts


def _extend(
    threads: list[Thread],
    histories: list[Messages | None],
    turn: int,
    prompts: dict[int, list[int]],
    answers: Answers,
    tokenizer: Any,
) -> None:
    """Put this turn's answers into the histories; an empty answer ends its thread."""
    for i, prompt in prompts.items():
        stored = answers.get(threads[i].doc_id, turn, prompt)
        assert stored is not None, "every prompt of a turn is answered before the next turn begins"
        said = answer_text(tokenizer, stored.ids, stored.finished)
        history = histories[i]
        histories[i] = (
            [*history, {"role": "assistant", "content": said}] if history is not None and said.strip() else None
        )
