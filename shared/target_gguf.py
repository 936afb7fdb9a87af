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


# GGUF's names of the special tokens' ids, and the tokenizer's.
_SPECIAL = {
    "tokenizer.ggml.bos_token_id": "bos_token",
    "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token",
    "tokenizer.ggml.padding_token_id": "pad_token",
}


def restore_tokenizer(tokenizer: Any, gguf_file: Path) -> None:
    """Put back what the GGUF route drops: the splitting of digits (SmolLM), and the special tokens the file names.

    The file names its pre-tokenizer in `tokenizer.ggml.pre`; "smollm" means: every digit alone, then byte level.
    Without it 4 % of real texts got other tokens than the model was trained on. transformers 5.17 also took
    <|im_start|> for SmolLM's end token, so that no answer ever ended; 5.24 reads the file's.
    """
    import gguf
    from tokenizers import pre_tokenizers

    reader = gguf.GGUFReader(str(gguf_file))
    for name, attribute in _SPECIAL.items():
        if (field := reader.get_field(name)) is not None:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(int(field.contents())))
    field = reader.get_field("tokenizer.ggml.pre")
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
