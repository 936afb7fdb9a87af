"""What stage 2 needs of the target, written into the store so that it runs where the target is not.

Called by worker 0 before its first block. Layout: shared/store_layout.py, `target/`.
"""

from __future__ import annotations

from pathlib import Path

from shared.atomic import aside, publish_dir
from shared.target import Target
from shared.target_files import write_list
from shared.tensors import write_tensors
from stage1_extract.plan import is_exported


def export_target(target: Target, store: Path) -> None:
    """Write config, tokenizer with chat template, and head.safetensors, all or nothing.

    Tensors keep the target's dtype: embed_tokens.weight [V, H], lm_head.weight [V, H] unless tied, norm.weight [H].
    """
    if is_exported(store):
        return
    final = store / "target"
    tensors = {"embed_tokens.weight": target.embed_tokens_weight, "norm.weight": target.norm_weight}
    if not target.tied:
        tensors["lm_head.weight"] = target.lm_head_weight
    with aside(final) as temporary:
        target.model.config.save_pretrained(temporary)
        if target.model.generation_config is not None:
            target.model.generation_config.save_pretrained(temporary)
        target.tokenizer.save_pretrained(temporary)
        # One metadata key: with more their order in the file is random, and equal stores would differ in bytes.
        write_tensors(temporary / "head.safetensors", tensors, metadata={"format": "pt"})
        write_list(temporary)
        publish_dir(temporary, final)
