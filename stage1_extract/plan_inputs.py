"""What `dflash plan` knows before it computes: sizes of the target, blocks of the rows, tokens/s of the target.

Called by stage1_extract/plan_report.py. Of a target only its config and the sizes of its tokenizer files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigRefused, TooManyShards
from shared.geometry import check_target_layer_ids, default_target_layer_ids
from shared.rows import PreparedRows
from shared.store import read_identity, require_same
from shared.target_identity import TargetFiles, find_target, geometry_of, load_config
from stage1_extract.config import PlanConfig
from stage1_extract.disk_plan import TOKENIZER_BYTES, Blocks
from stage1_extract.plan import done_blocks, is_exported, make_plan, remaining_blocks, require_same_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """Sizes of a target; `parameters` are those that work on one token, `counted` says where that number is from."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    tokenizer_bytes: int
    parameters: float
    counted: str

    def layer_ids(self, config: PlanConfig) -> tuple[int, ...]:
        """The tapped layers, chosen and checked as extract does. Raises LayerIdsOutOfRange."""
        if config.target_layer_ids:
            check_target_layer_ids(config.target_layer_ids, self.num_hidden_layers)
            return config.target_layer_ids
        return default_target_layer_ids(self.num_hidden_layers, config.num_taps)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFacts:
    """All blocks of the store, those that are still to be written, and whether its target/ is."""

    blocks: Blocks
    left: Blocks
    exported: bool


def target_facts(config: PlanConfig) -> TargetFacts:
    """From the target's config, or from the sizes given. Raises TargetNotFound, TargetUnsupported, ConfigRefused."""
    if config.target is None:
        hidden, layers, vocab = config.hidden_size or 0, config.num_hidden_layers or 0, config.vocab_size or 0
        counted = rough_parameters(hidden, layers, vocab)  # PlanConfig has refused what is missing or 0
        return TargetFacts(
            num_hidden_layers=layers,
            hidden_size=hidden,
            vocab_size=vocab,
            tied=False,
            tokenizer_bytes=TOKENIZER_BYTES,
            parameters=config.parameters or counted,
            counted="as given" if config.parameters else "12 x layers x hidden^2 + vocabulary x hidden",
        )
    files = find_target(config.target)
    loaded = load_config(files)
    sizes = geometry_of(loaded)
    if config.topk > sizes["vocab_size"]:
        raise ConfigRefused(f"topk {config.topk} is more than the target's {sizes['vocab_size']} tokens")
    parameters, counted_by = (config.parameters, "as given") if config.parameters else _count(loaded, sizes)
    return TargetFacts(
        num_hidden_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        tied=sizes["tie_word_embeddings"],
        tokenizer_bytes=tokenizer_bytes(files),
        parameters=parameters,
        counted=counted_by,
    )


def rough_parameters(hidden_size: int, num_hidden_layers: int, vocab_size: int) -> float:
    """12 L H^2 + V H: attention of 4 H^2 and an MLP of 8 H^2 a layer, and the head. 20 % off is usual."""
    return 12.0 * num_hidden_layers * hidden_size**2 + vocab_size * hidden_size


def _count(loaded: Any, sizes: dict[str, Any]) -> tuple[float, str]:
    try:
        return working_parameters(loaded.get_text_config()), "counted from its config"
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        rough = rough_parameters(sizes["hidden_size"], sizes["num_hidden_layers"], sizes["vocab_size"])
        return (
            rough,
            f"12 x layers x hidden^2 + vocabulary x hidden; its model cannot be built ({type(error).__name__})",
        )


def working_parameters(text_config: Any) -> float:
    """Parameters that are multiplied for each token: all but an untied input embedding, of experts the chosen ones.

    The model is built without memory (device "meta"), so that no architecture needs a formula of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config)
    experts = next(
        (
            value
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (value := getattr(text_config, name, None))
        ),
        1,
    )
    share = (getattr(text_config, "num_experts_per_tok", None) or experts) / experts
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return float(
        sum(
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
            if parameter is not embedding or parameter is head
        )
    )


def tokenizer_bytes(files: TargetFiles) -> int:
    """Size of the tokenizer files beside a target; a GGUF file holds its own, then about what is usual."""
    names = ("tokenizer*", "*.jinja", "vocab.*", "merges.txt")
    found = {path for name in names for path in files.folder.glob(name) if path.is_file()}
    return sum(path.stat().st_size for path in found) if found and not files.gguf else TOKENIZER_BYTES


def work_facts(config: PlanConfig, identity: dict[str, Any]) -> WorkFacts:
    """Blocks of the rows, or even ones; blocks that a store at --out has already are not counted as left.

    `identity` is the part of the store's identity that a plan knows. Raises StoreMismatch as extract would for a begun
    store of other settings, TooManyShards, and what prepared rows raise.
    """
    if config.data is None:
        tokens, documents = int(config.tokens or 0), int(config.documents or 0)  # PlanConfig has refused 0
        _require_rows(config, documents, "--documents")
        blocks = Blocks.even(tokens, documents, config.block_tokens)
        return WorkFacts(blocks=blocks, left=blocks, exported=False)
    rows = PreparedRows.open(config.data)
    _require_rows(config, rows.n_documents, str(config.data))
    plan = make_plan(rows.lengths.tolist(), config.block_tokens)
    blocks = Blocks.of_plan(rows.lengths, plan)
    if config.out is None or not done_blocks(config.out):
        return WorkFacts(blocks=blocks, left=blocks, exported=False)
    require_same(read_identity(config.out), identity | {"rows_sha256": rows.info["rows_sha256"]}, config.out)
    require_same_plan(config.out, plan)
    left = Blocks.of_plan(rows.lengths, plan, remaining_blocks(config.out, plan))
    return WorkFacts(blocks=blocks, left=left, exported=is_exported(config.out))


def _require_rows(config: PlanConfig, documents: int, where: str) -> None:
    if config.shards > documents:
        raise TooManyShards(f"--shards {config.shards} but {where} has {documents} rows; use {documents} or fewer")


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens/s of the target in one process, and where the number is from."""

    per_process: float
    source: str


def target_rate(config: PlanConfig, target: TargetFacts) -> Rate:
    """--tokens-per-second, or --teraflops / (2 * parameters): a multiplication and an addition for each parameter.

    Attention scores are left out: at a few thousand tokens they are a few per cent.
    """
    if config.tokens_per_second is not None:
        return Rate(config.tokens_per_second, "as given")
    count = target.parameters
    said = f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count:,.0f}"
    return Rate(
        config.teraflops * 1e12 / (2 * count),
        f"estimated: {config.teraflops:g} TFLOP/s by 2 x {said} parameters, {target.counted}; "
        "a measured rate goes into --tokens-per-second",
    )
