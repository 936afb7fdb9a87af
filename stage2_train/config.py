"""Every knob of `dflash train`, with its default, unit and help.

Read by cli.py (options), launch_train.py (checks) and train.py (the loop). No torch. Next: launch_train.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config import knob, same_knob
from shared.errors import ConfigRefused
from shared.store_files import beside
from shared.supervision_knobs import SUPERVISION_FIELDS, SupervisionKnobs, check_supervision
from stage2_train.layer_types import expand_layer_types
from stage2_train.learning_rate import HIGHEST_LEARNING_RATE, Rate
from stage2_train.objectives import Objective

# SmolLM2's drafter holds 2 GB for a row of 3,072 tokens and 512 blocks: eight at once took all of a 24 GB host.
CPU_PASS = 16384
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
# Knobs that only one choice of another knob reads.
PART_OF = {
    "soft_weight": ("loss", "mixed"),
    "alpha": ("weighting", "dpace"),
    "gamma": ("weighting", "decay"),
    "decay_ratio": ("schedule", "wsd"),
    "decay_shape": ("schedule", "wsd"),
}

# What may change between two starts of one run: it moves no number of the result beyond rounding.
FREE_FIELDS = frozenset(
    {
        "store",
        "partial",
        "run",
        "target",
        "nproc",
        "parallel",
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
        "compile_cache",
        "prefetch",
        "tensorboard",
        "warm_start",  # compared by the weights it named: warm_start.py
        "activation_checkpointing",
        "on_disk_full",
    }
    | SUPERVISION_FIELDS
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
    parallel: Literal["ddp", "fsdp"] = knob(
        "ddp", help="ddp: every process holds the drafter; fsdp: a share of it, for less memory and more traffic."
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", help="auto: cuda when there is one.")
    attention: Literal["auto", "flex", "sdpa"] = knob("auto", help="auto: flex on cuda, sdpa on cpu. Never falls back.")
    dtype: Literal["auto", "bfloat16", "float32"] = knob(
        "auto", help="Compute dtype, weights stay float32; auto: bfloat16 on cuda, float32 on cpu."
    )
    threads: int | None = knob(None, help="Torch threads per process on a CPU; default: cores / processes.")

    compile_cache: Path | None = knob(
        None, help="Folder of compiled code for the next start; default: one of your own in the local temporary folder."
    )
    reader_threads: int = knob(2, help="Threads per process that read documents for the batches to come.")
    prefetch: int = knob(2, help="Steps per process that are read ahead and wait in main memory.")

    batch_rows: int = knob(8, help="Rows per optimizer step, over all processes.")
    micro_rows: int | None = knob(
        None,
        help="Rows per forward pass and process; default: all of the process's rows, on a CPU as many of them as have "
        f"{CPU_PASS:,} tokens and slots.",
    )
    max_length: int = knob(3072, help="Tokens per row; several documents share a row, longer ones are cut.")
    anchors: int = knob(512, help="Anchor slots per row, shared by its documents.")
    block_size: int = knob(16, help="Tokens per block, anchor included.")

    optimizer: Literal["adamw", "muon"] = knob("adamw", help="adamw is the paper's; muon learns in fewer steps.")
    learning_rate: float = knob(6e-4, help="Peak of the schedule.")
    schedule: Literal["cosine", "wsd"] = knob(
        "cosine", help="cosine: down from the warm-up on; wsd: at the peak until the last --decay-ratio of the steps."
    )
    decay_ratio: float = knob(0.2, help="wsd: share of the steps, at the end, with a falling rate.")
    decay_shape: Literal["linear", "sqrt"] = knob("sqrt", help="wsd: the fall with progress x, 1 - x or 1 - sqrt(x).")
    warmup_ratio: float = knob(0.04, help="Share of the steps with a rising rate.")
    min_lr_ratio: float = knob(0.0, help="Last learning rate as a share of the peak.")
    weight_decay: float = knob(0.0, help="AdamW decay of the matrices.")
    clip: float = knob(1.0, help="Largest gradient norm.")
    loss: Literal["auto", "ce", "kl", "mixed"] = knob(
        "auto",
        help="ce: of the labels; kl: from the teacher's stored top logits; mixed: both, see --soft-weight; auto: kl "
        "from a store that has them, else ce.",
    )
    soft_weight: float = knob(0.5, help="mixed: share of kl.")
    labels: Literal["data", "teacher"] = knob(
        "data", help="Tokens to predict: the documents', or at each place the one that the target finds most probable."
    )
    weighting: Literal["decay", "dpace", "uniform"] = knob(
        "dpace", help="Weights of a block's slots: by --gamma; by the drafter's own hit rates (D-PACE); all alike."
    )
    alpha: float = knob(0.5, help="dpace: smoothing of the hit rates, above 0.")
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
    layer_types: tuple[str, ...] = knob((), help="full or sliding for each layer (4xsliding,full); default: all full.")
    sliding_window: int | None = knob(None, help="Window of sliding layers in tokens, the query counted.")
    is_causal: bool | None = knob(None, help="Causal inside the block; default: exactly on sliding layers.")
    mask_token_id: int | None = knob(None, help="Default: the store's.")
    shift_labels: bool = knob(
        False, help="Slot k predicts token a+k+1 of anchor a, so that a block of B drafts B tokens, not B-1."
    )
    slot_0: bool | None = knob(None, help="Slot 0 counts in the loss; default: exactly with --shift-labels.")
    warm_start: Path | None = knob(
        None, help="First weights: a drafter folder (published or exported), a checkpoint or a run of this geometry."
    )
    activation_checkpointing: bool = knob(
        False, help="Run each layer's forward again in backward instead of keeping its activations."
    )

    save_every: int = knob(500, help="Steps between checkpoints; the last step is always saved.")
    keep: int = knob(3, help="Newest checkpoints kept, besides the best.")
    eval_every: int = knob(500, help="Steps between held-out estimates; step 0 and the last are always estimated.")
    heldout_documents: int = knob(128, help="Held-out documents of the estimate, at most.")
    log_every: int = knob(10, help="Steps between metric records.")
    tensorboard: bool = knob(True, help="Write TensorBoard event files, into the run's folder tensorboard.")
    resume: bool = knob(True, help="Continue the run folder's newest complete checkpoint.")

    on_disk_full: Literal["pause", "stop"] = knob(
        "pause", help="pause: end workers, start them when there is room. stop: end with the numbers (exit 41)."
    )
    restarts: int = same_knob(SupervisionKnobs, "restarts")
    hang_limit_scale: float = same_knob(SupervisionKnobs, "hang_limit_scale")
    detach: bool = same_knob(SupervisionKnobs, "detach")

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", expand_layer_types(self.layer_types))
        check_supervision(self.restarts, self.hang_limit_scale)
        for name in (
            "epochs",
            "nproc",
            "reader_threads",
            "prefetch",
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
        for name, low, high in (("warmup_ratio", 0, 1), ("min_lr_ratio", 0, 1), ("decay_ratio", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise ConfigRefused(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must lie in {low}..{high}"
                )
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.learning_rate > HIGHEST_LEARNING_RATE:
            raise ConfigRefused(f"--learning-rate is {self.learning_rate}; it must be at most {HIGHEST_LEARNING_RATE}")
        if not 0 <= self.weight_decay * self.learning_rate <= 1:  # an update takes this share of a weight off
            said = f"--weight-decay is {self.weight_decay} with --learning-rate {self.learning_rate}"
            raise ConfigRefused(f"{said}; it must lie in 0..{1 / self.learning_rate:.6g}, 1 / the rate")
        if self.device == "cpu" and self.attention == "flex":
            raise ConfigRefused("--attention flex on a CPU: flex_attention has no backward there; use sdpa or auto")
        self._check_idle()
        self.objective()
        self._check_rows(self.nproc)

    def _check_idle(self) -> None:
        """Raise ConfigRefused for a value that nothing would read: whoever gave it expects another run."""
        for name, (master, value) in PART_OF.items():
            given = getattr(self, name)
            if given != type(self).__dataclass_fields__[name].default and getattr(self, master) != value:
                raise ConfigRefused(
                    f"--{name.replace('_', '-')} {given} belongs to --{master} {value}, this is --{master} "
                    f"{getattr(self, master)}: leave it out or pass --{master} {value}"
                )

    def _check_rows(self, processes: int) -> None:
        rows, left = divmod(self.batch_rows, processes)
        if left:
            raise ConfigRefused(
                f"--batch-rows {self.batch_rows} is not a multiple of the {processes} processes; "
                "every process takes the same number of rows"
            )
        if self.micro_rows is not None and rows % min(self.micro_rows, rows):
            raise ConfigRefused(f"--micro-rows {self.micro_rows} does not divide the {rows} rows of a process")

    def require_processes(self, world_size: int) -> None:
        """Raise ConfigRefused when so many processes (torchrun's, or --nproc of our launcher) cannot share the work."""
        self._check_rows(world_size)
        if self.parallel == "fsdp" and world_size == 1:
            raise ConfigRefused("--parallel fsdp with 1 process: there is nobody to share with; use ddp")

    def rows_per_pass(self, world_size: int, device_type: str) -> int:
        """Rows of one forward pass in one of `world_size` processes."""
        rows = self.batch_rows // world_size
        if self.micro_rows is not None:
            return min(self.micro_rows, rows)
        if device_type != "cpu":
            return rows
        most = CPU_PASS // (self.max_length + self.anchors * self.block_size)
        return max([1, *(part for part in range(1, rows + 1) if rows % part == 0 and part <= most)])

    def rate(self, total: int) -> Rate:
        """The learning-rate schedule of a run of `total` steps."""
        return Rate(
            total=total,
            peak=self.learning_rate,
            warmup_ratio=self.warmup_ratio,
            min_ratio=self.min_lr_ratio,
            schedule=self.schedule,
            decay_ratio=self.decay_ratio,
            decay=self.decay_shape,
        )

    def decay_gamma(self) -> float:
        """The loss decay: given, published for the block size, or in the published proportion to it."""
        if self.gamma is not None:
            return self.gamma
        return PUBLISHED_GAMMA.get(self.block_size, (self.block_size - 1) / (15 / 7))

    def settled(self, topk: int) -> TrainConfig:
        """These settings with the loss that auto means for a store with `topk` teacher logits a token.

        kl with dpace was accepted most in the comparison of objectives (README): 0.6 % above ce with dpace, 11 % above
        ce with decay.
        """
        return self if self.loss != "auto" else dataclasses.replace(self, loss="kl" if topk else "ce")

    def objective(self) -> Objective:
        """What the drafter is trained for. Raises ConfigRefused for values that make no sense.

        A run's own config names the loss: `settled` has put it in the place of auto.
        """
        return Objective(
            block_size=self.block_size,
            loss="kl" if self.loss == "auto" else self.loss,
            weighting=self.weighting,
            gamma=self.decay_gamma(),
            alpha=self.alpha,
            soft_weight=self.soft_weight,
            labels=self.labels,
            shift_labels=self.shift_labels,
            slot_0=self.shift_labels if self.slot_0 is None else self.slot_0,
        )

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
            "shift_labels": self.shift_labels,
            "slot_0": self.slot_0,
            "vocab_size": identity.get("vocab_size"),
            "num_target_layers": identity.get("num_hidden_layers"),
            **{
                name: target.get(name)
                for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
            },
        }
