"""Every knob of stage 1, declared once: default, help text and command-line option. No torch here.

Read by stage1_extract/cli.py and cli_plan.py; the worker gets its config back from the store's plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config import knob, same_knob
from shared.errors import ConfigRefused
from shared.supervision_knobs import SupervisionKnobs, check_supervision

Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Precision = Literal["bfloat16", "int8"]
LastHidden = Literal["auto", "bfloat16", "int8", "none"]
OnDiskFull = Literal["pause", "stop", "wait"]
StoredLastHidden = Literal["bfloat16", "int8", "none"]


def resolve_last_hidden(last_hidden: LastHidden, precision: Precision) -> StoredLastHidden:
    """ "auto" is the precision of the taps."""
    return precision if last_hidden == "auto" else last_hidden


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
    precision: Precision = knob(
        "bfloat16", help="Stored precision of the taps; int8 (channel scale x token scale) takes about half the disk."
    )
    last_hidden: LastHidden = knob(
        "auto",
        help="Stored precision of the last hidden state (after the final norm); none: leave it out; auto: as "
        "--precision.",
    )
    device: str = knob("auto", help="auto, cpu, cuda (process N takes GPU N), cuda:N.")
    dtype: Dtype = knob("auto", help="dtype of the forward: auto is bfloat16 on CUDA, float32 on CPU.")
    on_disk_full: OnDiskFull = knob(
        "pause",
        help="pause: refuse a plan that does not fit; end workers when the disk fills later, start them when there is "
        "room. stop: end with the numbers (exit 41). wait: start anyhow, workers hold the work until there is room.",
    )
    disk_reserve_gb: float | None = knob(
        None, help="GB of the disk to leave free (default: 1, but at most 5 % of the disk)."
    )
    restarts: int = same_knob(SupervisionKnobs, "restarts")
    hang_limit_scale: float = same_knob(SupervisionKnobs, "hang_limit_scale")
    detach: bool = same_knob(SupervisionKnobs, "detach")

    def __post_init__(self) -> None:
        check_supervision(self.restarts, self.hang_limit_scale)
        for name in ("shards", "topk", "batch_tokens", "block_tokens", "num_taps"):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"{name} {getattr(self, name)} must be at least 1")
        if self.disk_reserve_gb is not None and not self.disk_reserve_gb >= 0:
            raise ConfigRefused(f"disk_reserve_gb {self.disk_reserve_gb} must be 0 or more")

    @property
    def resolved_last_hidden(self) -> StoredLastHidden:
        """`last_hidden` with "auto" replaced by `precision`; this is what the store's identity holds."""
        return resolve_last_hidden(self.last_hidden, self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Settings of `dflash plan`; what decides the size is what `dflash extract` takes."""

    target: str | None = knob(None, help="Target model as for extract; only its config is read.")
    data: Path | None = knob(None, help="Folder made by `dflash prepare`; or say --tokens and --documents.")
    out: Path | None = knob(None, help="Where the store would lie: its disk is checked, and what is there counts.")
    tokens: float | None = knob(None, help="Without --data: tokens, e.g. 1.6e9.")
    documents: float | None = knob(None, help="Without --data: documents.")
    hidden_size: int | None = knob(None, help="Without --target: its hidden size.")
    num_hidden_layers: int | None = knob(None, help="Without --target: its layers.")
    vocab_size: int | None = knob(None, help="Without --target: its tokens.")
    num_taps: int = same_knob(ExtractConfig, "num_taps")
    target_layer_ids: tuple[int, ...] = same_knob(ExtractConfig, "target_layer_ids")
    topk: int = same_knob(ExtractConfig, "topk")
    precision: Precision = same_knob(ExtractConfig, "precision")
    last_hidden: LastHidden = same_knob(ExtractConfig, "last_hidden")
    block_tokens: int = same_knob(ExtractConfig, "block_tokens")
    shards: int = same_knob(ExtractConfig, "shards")
    dtype: Dtype = same_knob(ExtractConfig, "dtype")
    disk_reserve_gb: float | None = same_knob(ExtractConfig, "disk_reserve_gb")
    tokens_per_second: float | None = knob(
        None, help="Tokens/s of the target in one process (default: --teraflops by 2 x parameters)."
    )
    teraflops: float = knob(300.0, help="Effective TFLOP/s of one process, for the estimate of tokens/s.")
    parameters: float | None = knob(
        None, help="Parameters at work on a token, e.g. 27e9 (default: counted from the target's config)."
    )
    disk_gbps: float | None = knob(None, help="GB/s of the disk at --out, for all processes together.")
    measure_disk: bool = knob(False, help="Measure it: write and fsync 256 MB at --out.")
    epochs: int = knob(6, help="Passes over the data in training (the default of train).")
    train_tokens_per_second: float | None = knob(
        None, help="Tokens/s of training in one process; an epoch then takes at least that long."
    )
    disk_price_per_tb_month: float | None = knob(None, help="Price of a TB for a month (730 h), in any currency.")
    gpu_price_per_hour: float | None = knob(None, help="Price of one process's GPU for an hour, in the same currency.")
    json: bool = knob(False, help="One JSON object on stdout.")

    def __post_init__(self) -> None:
        self._require_each_once()
        for name in (
            *("tokens", "documents", "hidden_size", "num_hidden_layers", "vocab_size", "num_taps", "topk", "shards"),
            *("block_tokens", "epochs"),
        ):
            value = getattr(self, name)
            if value is not None and not (1 <= value <= 1e15 and value == int(value)):
                raise ConfigRefused(f"{_option(name)} {value} must be a whole number in 1..1e15")
        for name in ("tokens_per_second", "teraflops", "parameters", "disk_gbps", "train_tokens_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigRefused(f"{_option(name)} {value} must be above 0")
        for name in ("disk_price_per_tb_month", "gpu_price_per_hour"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigRefused(f"{_option(name)} {value} must not be negative")
        if self.tokens is not None and self.documents is not None and self.documents > self.tokens:
            raise ConfigRefused(f"--documents {self.documents:,.0f} is more than --tokens {self.tokens:,.0f}")
        if self.vocab_size is not None and self.topk > self.vocab_size:
            raise ConfigRefused(f"--topk {self.topk} is more than --vocab-size {self.vocab_size}")

    def _require_each_once(self) -> None:
        """Every fact must come from one place: two may disagree, none leaves nothing to work with."""
        for source, facts in (
            ("data", ("tokens", "documents")),
            ("target", ("hidden_size", "num_hidden_layers", "vocab_size")),
        ):
            given = [_option(name) for name in facts if getattr(self, name) is not None]
            lacking = [_option(name) for name in facts if getattr(self, name) is None]
            if getattr(self, source) is not None and given:
                raise ConfigRefused(f"{_option(source)} says what {' and '.join(given)} would; leave one of them out")
            if getattr(self, source) is None and lacking:
                raise ConfigRefused(f"{_option(source)} is not given, so {' and '.join(lacking)} must be")
        pairs = (("tokens_per_second", "parameters"), ("measure_disk", "disk_gbps"))
        for first, second in pairs:
            if getattr(self, first) and getattr(self, second):
                raise ConfigRefused(f"{_option(first)} and {_option(second)} say the same; leave one of them out")
        if self.measure_disk and self.out is None:
            raise ConfigRefused("--measure-disk needs --out: the place whose disk is measured")
        if (self.disk_price_per_tb_month is None) != (self.gpu_price_per_hour is None):
            raise ConfigRefused(
                "--disk-price-per-tb-month and --gpu-price-per-hour must be given together or not at all"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
