"""Every knob of `dflash train`, with its default, unit and help.

Read by cli.py (options), launch_train.py (checks) and train.py (the loop). No torch. Next: launch_train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config import knob
from shared.errors import ConfigRefused
from shared.store_files import beside

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}

# What may change between two starts of one run: it moves no number of the result beyond rounding.
FREE_FIELDS = frozenset(
    {
        "store",
        "partial",
        "run",
        "target",
        "nproc",
        "device",
        "micro_rows",
        "save_every",
        "keep",
        "eval_every",
        "log_every",
        "heldout_documents",
        "resume",
        "attention",
        "threads",
        "reader_threads",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of one training run. Raises ConfigRefused when two of them contradict each other."""

    store: str = knob(help="Teacher store made by `dflash extract`: a folder, or s3://BUCKET/PREFIX (gs://).")
    partial: bool = knob(
        False, help="Train from the blocks that a store has by now; the run keeps to these, whatever is added later."
    )
    run: Path | None = knob(
        None, help="Run folder; default: the store's name with -train, beside the store, or in runs for a bucket."
    )
    target: str | None = knob(None, help="Target you believe the store was made from; refused when it was not.")
    steps: int | None = knob(None, help="Optimizer steps; default: --epochs passes over the data.")
    epochs: int = knob(6, help="Passes over the training documents when --steps is not given.")
    nproc: int = knob(1, help="Processes, one per device.")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", help="auto: cuda when there is one.")
    attention: Literal["auto", "flex", "sdpa"] = knob("auto", help="auto: flex on cuda, sdpa on cpu. Never falls back.")
    dtype: Literal["auto", "bfloat16", "float32"] = knob(
        "auto", help="Compute dtype, weights stay float32; auto: bfloat16 on cuda, float32 on cpu."
    )
    threads: int | None = knob(None, help="Torch threads per process on a CPU; default: cores / processes.")

    reader_threads: int = knob(2, help="Threads per process that read documents for the batches to come.")

    batch_rows: int = knob(8, help="Rows per optimizer step, over all processes.")
    micro_rows: int | None = knob(None, help="Rows per forward pass and process; default: all of the process's rows.")
    max_length: int = knob(3072, help="Tokens per row; several documents share a row, longer ones are cut.")
    anchors: int = knob(512, help="Anchor slots per row, shared by its documents.")
    block_size: int = knob(16, help="Tokens per block, anchor included.")

    optimizer: Literal["adamw", "muon"] = knob("adamw", help="adamw is the paper's; muon learns in fewer steps.")
    learning_rate: float = knob(6e-4, help="Peak of the cosine.")
    warmup_ratio: float = knob(0.04, help="Share of the steps with a rising rate.")
    min_lr_ratio: float = knob(0.0, help="Last learning rate as a share of the peak.")
    weight_decay: float = knob(0.0, help="AdamW decay of the matrices.")
    clip: float = knob(1.0, help="Largest gradient norm.")
    gamma: float | None = knob(None, help="Slot k weighs exp(-(k-1)/gamma); default 7, 5, 4 for blocks of 16, 10, 8.")
    seed: int = knob(0, help="Of weights, order and anchors.")

    num_layers: int = knob(5, help="Drafter layers.")
    hidden_size: int | None = knob(
        None, help="Drafter width; the embedding is the target's, so only the target's width works."
    )
    intermediate_size: int | None = knob(None, help="MLP width; default: the target's.")
    num_heads: int | None = knob(None, help="Query heads; default 32, fewer below width 2048.")
    num_kv_heads: int | None = knob(None, help="Key/value heads; default 8, fewer below width 2048.")
    head_dim: int | None = knob(None, help="Head size; default 128, 64 below width 2048.")
    layer_types: tuple[str, ...] = knob(
        (), help="full_attention or sliding_attention for each layer; default: all full."
    )
    sliding_window: int | None = knob(None, help="Window of sliding layers in tokens, the query counted.")
    is_causal: bool | None = knob(None, help="Causal inside the block; default: exactly on sliding layers.")
    mask_token_id: int | None = knob(None, help="Default: the store's.")

    save_every: int = knob(500, help="Steps between checkpoints; the last step is always saved.")
    keep: int = knob(3, help="Newest checkpoints kept, besides the best.")
    eval_every: int = knob(500, help="Steps between held-out estimates; step 0 and the last are always estimated.")
    heldout_documents: int = knob(128, help="Held-out documents of the estimate, at most.")
    log_every: int = knob(10, help="Steps between metric records.")
    resume: bool = knob(True, help="Continue the run folder's newest complete checkpoint.")

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "nproc",
            "reader_threads",
            "batch_rows",
            "max_length",
            "anchors",
            "num_layers",
            "save_every",
            "keep",
            "eval_every",
            "log_every",
            "heldout_documents",
        ):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        for name in ("steps", "micro_rows", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.block_size < 2 or self.max_length <= self.block_size:
            raise ConfigRefused(
                f"--max-length {self.max_length} with --block-size {self.block_size}: a block has at least "
                "2 tokens and a row is longer than a block"
            )
        for name, low, high in (("warmup_ratio", 0, 1), ("min_lr_ratio", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise ConfigRefused(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must lie in {low}..{high}"
                )
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.gamma is not None and not self.gamma > 0:
            raise ConfigRefused(f"--gamma is {self.gamma}; it must be above 0 (a large one weighs all slots alike)")
        if self.device == "cpu" and self.attention == "flex":
            raise ConfigRefused("--attention flex on a CPU: flex_attention has no backward there; use sdpa or auto")
        self._check_rows()

    def _check_rows(self) -> None:
        if self.batch_rows % self.nproc:
            raise ConfigRefused(
                f"--batch-rows {self.batch_rows} is not a multiple of --nproc {self.nproc}; "
                "every process takes the same number of rows"
            )
        rows = self.batch_rows // self.nproc
        if self.micro_rows is not None and rows % self.micro_rows:
            raise ConfigRefused(f"--micro-rows {self.micro_rows} does not divide the {rows} rows of a process")

    def rows_per_pass(self, world_size: int) -> int:
        """Rows of one forward pass in one of `world_size` processes."""
        rows = self.batch_rows // world_size
        return rows if self.micro_rows is None else min(self.micro_rows, rows)

    def decay_gamma(self) -> float:
        """The loss decay: given, published for the block size, or in the published proportion to it."""
        if self.gamma is not None:
            return self.gamma
        return PUBLISHED_GAMMA.get(self.block_size, (self.block_size - 1) / (15 / 7))

    def run_dir(self) -> Path:
        """The run folder: --run, or `<store stem>-train` beside the store (in `runs` when that lies in a bucket)."""
        if self.run is not None:
            return self.run
        return beside(self.store, "-train")

    def geometry(self, identity: Mapping[str, Any], mask_token_id: int) -> dict[str, Any]:
        """Overrides for drafter_config.drafter_geometry from these knobs and the store's identity."""
        target: Mapping[str, Any] = identity.get("target") or {}
        return {
            "block_size": self.block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": tuple(identity["target_layer_ids"]),
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "layer_types": self.layer_types or None,
            "sliding_window": self.sliding_window,
            "is_causal": self.is_causal,
            "vocab_size": identity.get("vocab_size"),
            "num_target_layers": identity.get("num_hidden_layers"),
            **{
                name: target.get(name)
                for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
            },
        }
