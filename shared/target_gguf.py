"""What a GGUF file needs beyond transformers' own loading: dense weights, and the tokenizer's digit splitting.

Called by shared/target.py and shared/target_identity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def dequantized_config() -> Any:
    """The quantisation config that makes transformers 5 give dense tensors (by default it keeps GGUF blocks packed)."""
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def restore_pre_tokenizer(tokenizer: Any, gguf_file: Path) -> None:
    """Put back the splitting of digits that the GGUF route drops for SmolLM tokenizers.

    The file names its pre-tokenizer in `tokenizer.ggml.pre`; "smollm" means: every digit alone, then byte level.
    Without it 4 % of real texts got other tokens than the model was trained on.
    """
    import gguf
    from tokenizers import pre_tokenizers

    field = gguf.GGUFReader(str(gguf_file)).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def forget_quantization(model: Any) -> None:
    """Drop the marks of the packed form from a dequantised model, so that its config saves as that of a plain one."""
    for owner, names in (
        (model, ("hf_quantizer", "is_quantized", "quantization_method")),
        (model.config, ("quantization_config",)),
    ):
        for name in names:
            owner.__dict__.pop(name, None)
