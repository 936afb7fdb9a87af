"""What stage 2 needs of the target, written into the store so that it runs where the target is not.

Called by worker 0 before its first block. Layout: shared/store_layout.py, `target/`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from shared.atomic import disk_faults, publish_dir, temporary_dir
from shared.target import Target
from stage1_extract.plan import is_exported


def export_target(target: Target, store: Path) -> None:
    """Write config, tokenizer with chat template, and head.safetensors, all or nothing.

    Tensors keep the target's dtype: embed_tokens.weight [V, H], lm_head.weight [V, H] unless tied, norm.weight [H].
    """
    if is_exported(store):
        return
    final = store / "target"
    temporary = temporary_dir(final)
    tensors = {"embed_tokens.weight": target.embed_tokens_weight, "norm.weight": target.norm_weight}
    if not target.tied:
        tensors["lm_head.weight"] = target.lm_head_weight
    with disk_faults(final):
        try:
            target.model.config.save_pretrained(temporary)
            if target.model.generation_config is not None:
                target.model.generation_config.save_pretrained(temporary)
            target.tokenizer.save_pretrained(temporary)
            # One metadata key: with more their order in the file is random, and equal stores would differ in bytes.
            host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
            save_file(host, temporary / "head.safetensors", metadata={"format": "pt"})
            publish_dir(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
