"""Every knob of stage 1, declared once: default, help text and command-line option. No torch here.

Read by stage1_extract/cli.py; the worker gets its config back from the store's plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config import knob
from shared.errors import ConfigRefused

Dtype = Literal["auto", "bfloat16", "float32", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """Settings of `dflash prepare`."""

    data: tuple[Path, ...] = knob(help="JSON lines files.", argument=True)
    target: str = knob(help="Target model: local folder, folder with one GGUF file, or Hub id.")
    out: Path = knob(help="Folder for the prepared rows.")
    regenerate: bool = knob(False, help="Have the target write the answers (a drafter must learn its target's words).")
    max_length: int = knob(2048, help="Longest row in tokens; longer ones are cut at the end and counted.")
    block_size: int = knob(16, help="Block size of the drafter in tokens; shorter rows are refused.")
    heldout: float = knob(0.05, help="Share of conversations kept out of training (at least one of two or more).")
    heldout_rows: int | None = knob(None, help="Number of conversations kept out of training, instead of --heldout.")
    on_bad_row: Literal["refuse", "skip"] = knob(
        "refuse", help="refuse: read all rows, then stop with counts. skip: record each and go on."
    )
    max_rows: int | None = knob(None, help="Use this many conversations, drawn over all files by --seed.")
    seed: int = knob(0, help="Seed of the held-out split, of --max-rows, and of sampling.")
    train_on: Literal["all", "last"] = knob("all", help="Supervise all assistant turns or only the last one.")
    chat_template_kwargs: str = knob(
        "{}", help="JSON object given to the chat template, e.g. '{\"enable_thinking\": false}'."
    )
    max_new_tokens: int = knob(512, help="--regenerate: longest answer in tokens.")
    temperature: float = knob(0.0, help="--regenerate: 0 is greedy; otherwise sample at this temperature.")
    batch_size: int | None = knob(
        None, help="--regenerate: conversations decoded at once per process (default: what memory allows)."
    )
    shards: int = knob(1, help="--regenerate: processes, each with its own target on its own device.")
    device: str = knob("auto", help="--regenerate: auto, cpu, cuda, cuda:N.")
    dtype: Dtype = knob("auto", help="--regenerate: auto is bfloat16 on CUDA, float32 on CPU.")

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigRefused("no data file given; pass one or more JSON lines files")
        if self.block_size < 2:
            raise ConfigRefused(
                f"block_size {self.block_size}: a block is an anchor and at least one draft token, so 2 or more"
            )
        if self.max_length < self.block_size:
            raise ConfigRefused(
                f"max_length {self.max_length} is below block_size {self.block_size}: no row could be used"
            )
        if not 0.0 <= self.heldout < 1.0:
            raise ConfigRefused(f"heldout {self.heldout} must lie in [0, 1)")
        for name in ("max_rows", "max_new_tokens", "batch_size", "shards"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigRefused(f"{name} {value} must be at least 1")
        if self.heldout_rows is not None and self.heldout_rows < 0:
            raise ConfigRefused(f"heldout_rows {self.heldout_rows} must not be negative")
        if self.temperature < 0.0:
            raise ConfigRefused(f"temperature {self.temperature} must not be negative")
        self.template_kwargs  # noqa: B018 - refuses text that is not a JSON object

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """`chat_template_kwargs` decoded. Raises ConfigRefused."""
        try:
            value = json.loads(self.chat_template_kwargs)
        except ValueError as error:
            raise ConfigRefused(f"chat_template_kwargs {self.chat_template_kwargs!r} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigRefused(f"chat_template_kwargs {self.chat_template_kwargs!r} must be a JSON object")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Settings of `dflash extract`."""

    target: str = knob(help="Target model: local folder, folder with one GGUF file, or Hub id.")
    data: Path = knob(help="Folder made by `dflash prepare`.")
    out: Path = knob(help="Teacher store to make or to go on with, e.g. runs/x.zarr.")
    shards: int = knob(1, help="Processes, each with its own replica of the target on its own device.")
    target_layer_ids: tuple[int, ...] = knob(
        (), help="Tapped layers, 0-based, output of that layer (default: even spread)."
    )
    num_taps: int = knob(5, help="Number of tapped layers when no ids are given.")
    topk: int = knob(64, help="Teacher logits kept per token (the largest ones, with the logsumexp over all).")
    mask_token_id: int | None = knob(
        None, help="Mask token of the drafter (default: a spare row of the target's embedding)."
    )
    batch_tokens: int = knob(16384, help="Most tokens in one forward, padding included.")
    block_tokens: int = knob(32768, help="Tokens in one stored block of whole documents, about.")
    last_hidden: bool = knob(True, help="Keep the last hidden state (after the final norm).")
    device: str = knob("auto", help="auto, cpu, cuda (process N takes GPU N), cuda:N.")
    dtype: Dtype = knob("auto", help="dtype of the forward: auto is bfloat16 on CUDA, float32 on CPU.")

    def __post_init__(self) -> None:
        for name in ("shards", "topk", "batch_tokens", "block_tokens", "num_taps"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"{name} {getattr(self, name)} must be at least 1")
