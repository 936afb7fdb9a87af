"""Every knob of `dflash eval` and `dflash export`, with default, unit and help. No torch.

Read by cli_eval.py (options), evaluate.py and export.py (the work).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config import knob
from shared.errors import ConfigRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Settings of one evaluation. Raises ConfigRefused when a value cannot be used."""

    run: Path = knob(help="Run folder (its newest checkpoint), checkpoint folder, or exported folder.")
    data: tuple[Path, ...] = knob(
        help="Held-out prompts, comma-separated: JSON lines files, folders of them, or prepared folders."
    )
    target: str | None = knob(None, help="Folder, GGUF or Hub id; default: where the store says its target was.")
    out: Path | None = knob(
        None, help="Folder for results; default: the run folder, beside an exported folder RUN-eval."
    )
    limit: int | None = knob(None, help="Prompts per data file, from its start; default: all.")
    max_new_tokens: int = knob(256, help="Tokens a text may have.")
    temperature: float = knob(0.0, help="0 is greedy; otherwise true rejection sampling at this temperature.")
    block_size: int | None = knob(None, help="Tokens per block, anchor included; at most, and by default, as trained.")
    seed: int = knob(0, help="Of sampling and of the bootstrap.")
    batch_size: int | None = knob(None, help="Prompts decoded together; default: CPU 8, GPU 32, hybrid targets 1.")
    untrained: bool = knob(False, help="Measure the drafter at its seeded first weights instead.")
    check: bool = knob(True, help="Compare greedy texts with the target's own, token for token.")
    check_prompts: int | None = knob(None, help="Compare the first N prompts of each file; default: all.")
    timed_prompts: int = knob(4, help="Prompts per file timed one at a time, speculative and plain; 0: no timing.")
    tie_tolerance: float | None = knob(
        None, help="Logit gap up to which a difference is a tie; default: bfloat16 0.25, float16 0.03, float32 0.001."
    )
    chat_template_kwargs: str | None = knob(
        None, help="JSON object for the chat template, e.g. '{\"enable_thinking\": false}'; default: the store's."
    )
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = knob(
        "auto", help="auto: bfloat16 on CUDA, float32 on CPU."
    )
    device: str = knob("auto", help="auto, cpu, cuda, cuda:N.")
    threads: int | None = knob(None, help="Torch threads on a CPU; default: torch's own. On a busy machine 1 is best.")
    json: bool = knob(False, help="Print the results as JSON instead of tables.")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "limit", "batch_size", "check_prompts", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name in ("temperature", "timed_prompts", "tie_tolerance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {value}; it must not be negative")
        if not self.data:
            raise ConfigRefused("no data given; pass --data FILE[,FILE...]")
        self.template_kwargs()

    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs` decoded, None when not given. Raises ConfigRefused."""
        if self.chat_template_kwargs is None:
            return None
        try:
            value = json.loads(self.chat_template_kwargs)
        except ValueError as error:
            raise ConfigRefused(f"--chat-template-kwargs {self.chat_template_kwargs!r} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigRefused(f"--chat-template-kwargs {self.chat_template_kwargs!r} must be a JSON object")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """Settings of one export."""

    run: Path = knob(help="Run folder (its newest checkpoint) or checkpoint folder.")
    out: Path = knob(help="Folder to make: safetensors, config.json, README.md, dflash_offline.json.")
    dtype: Literal["bfloat16", "float32", "float16"] = knob(
        "bfloat16", help="Of the stored tensors; engines expect bfloat16 (float16 overflows in some drafters)."
    )
    overwrite: bool = knob(False, help="Replace an existing --out that holds another export.")
