"""The README.md of an exported drafter: what it belongs to, how it was made, what it reaches, how to serve it.

Called by stage2_train.export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from stage2_train.drafter_config import DrafterConfig

RECIPE = (
    "steps", "epochs", "batch_rows", "max_length", "anchors", "block_size", "loss", "weighting", "gamma", "optimizer",
    "learning_rate", "schedule", "warmup_ratio", "clip", "seed", "dtype",
)  # fmt: skip


def model_card(config: DrafterConfig, origin: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for people; everything in it is also in config.json or dflash_offline.json."""
    identity = origin["store"]["identity"]
    target = identity["target"]
    name = target["name"]
    weights = target.get("weights_sha256", "not recorded")
    parts = [
        f"# DFlash drafter for {name}",
        "Drafts a block of tokens at once for speculative decoding with the target below. It holds no embedding and no "
        "output head: both are the target's. With another target, or another revision of it, acceptance collapses.",
        "## Target",
        table(("", ""), [
            ("name", name), ("revision", target.get("revision") or "-"), ("weights", f"`{weights}`"),
            ("tokenizer", f"`{target.get('tokenizer_sha256', 'not recorded')}`"),
            ("layers tapped (0-based outputs)", ", ".join(map(str, config.target_layer_ids))),
            ("mask token id", config.mask_token_id), ("features", identity.get("dtype", "not recorded")),
        ]),
        "## Training",
        table(("", ""), [
            ("step", f"{origin['global_step']} of {origin['total_steps']}"),
            ("drafter layers", layers(config)),
            *first_weights(origin),
            ("documents, tokens", f"{identity.get('documents', '?')}, {identity.get('tokens', '?')}"),
            *((key, origin["config"][key]) for key in RECIPE if origin["config"].get(key) is not None),
        ]),
        "## Acceptance length", acceptance(evaluations),
        "## Serving", shifted(config.block_size) if config.shift_labels else serving(name, config.block_size),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def acceptance(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The measured lengths of this checkpoint, or that there are none."""
    if not evaluations:
        return "Not measured before this export (`dflash eval --run RUN --data FILE`)."
    rows = [
        (
            r["name"],
            r["prompts"],
            f"{r['acceptance_length']:.3f}",
            interval(r),
            *(dash(r[n]) for n in ("mismatches", "ties")),
        )
        for r in evaluations
    ]
    head = ("data", "prompts", "tokens per target step", "95 % interval", "texts that differ", "numerical ties")
    return ("By lossless decoding; the target's own token of each step counts, so 1 means that nothing is gained.\n\n"
            + table(head, rows))  # fmt: skip


def interval(record: Mapping[str, Any]) -> str:
    """`low - high`, or a dash for a single prompt."""
    low, high = record["acceptance_length_low"], record["acceptance_length_high"]
    return "-" if low is None else f"{low:.2f} - {high:.2f}"


def dash(value: object) -> object:
    """The value, or a dash for what was not measured."""
    return "-" if value is None else value


def layers(config: DrafterConfig) -> str:
    """Kinds of layers in their order: `4 x sliding 2048 causal, 1 x full`."""
    names = [
        ("full" if kind.window is None else f"sliding {kind.window}") + (" causal" if kind.causal else "")
        for kind in config.layer_kinds()
    ]
    return ", ".join(f"{len(list(group))} x {name}" for name, group in groupby(names))


def first_weights(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The row that says which drafter this one began as; none when it began with random weights."""
    start = origin.get("warm_start")
    return [("began as", f"{start['path']} (`{start['weights_sha256']}`)")] if start else []


def shifted(block_size: int) -> str:
    """What to do with a drafter that plain DFlash servers would misread."""
    return f"""Slot k of a block predicts token a + k + 1 of its anchor a: a block of {block_size} drafts {block_size}
tokens, slot 0 included (`shift_labels` in `dflash_config`; `sample_from_anchor` says the same). Servers of plain DFlash
do not read this: they take slot k for token a + k, nearly every draft is refused, and no gain is left. `dflash eval`
reads it."""


def serving(target: str, block_size: int) -> str:
    """Command lines; vLLM counts drafted tokens, SGLang counts the block with its anchor."""
    return f"""vLLM (`num_speculative_tokens` = block size - 1):

```
vllm serve {target} --speculative-config \\
  '{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {block_size - 1}}}'
```

SGLang (`--speculative-num-draft-tokens` = block size, the anchor counted):

```
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
  --speculative-draft-model-path THIS_FOLDER --speculative-num-draft-tokens {block_size}
```

Keep it in bfloat16: float16 overflows in some drafters."""


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
