"""The drafter's geometry: what is in config.json, and the defaults for a target.

Read by every file of stage 2. No torch: the training command refuses a wrong geometry before anything loads.
Next: drafter.py (the module), attention.py (who sees whom).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from shared.errors import ConfigRefused
from stage2_train.layer_types import LAYER_TYPES


@dataclass(frozen=True)
class LayerKind:
    """What a layer's queries may see: `causal` inside the block; `window` in tokens, the query included, or None."""

    causal: bool
    window: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """All sizes and switches of a drafter; `to_hf_config` is the published config.json.

    `is_causal` None means: causal inside the block exactly on sliding layers (what DFlash-1 checkpoints do).
    `shift_labels`: slot k predicts token a + k + 1 of anchor a instead of a + k, so that slot 0 drafts too.
    `slot_0`: slot 0 was trained; None means: exactly with shifted labels.
    Raises ConfigRefused when two fields contradict each other.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    shift_labels: bool = False
    slot_0: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or ("full_attention",) * self.num_hidden_layers)
        object.__setattr__(self, "slot_0", self.shift_labels if self.slot_0 is None else self.slot_0)
        for name in (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "head_dim",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigRefused(f"drafter {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigRefused(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} "
                "key/value heads evenly; make the first a multiple of the second"
            )
        if self.head_dim % 2:
            raise ConfigRefused(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if self.block_size < 2:
            raise ConfigRefused(f"block_size {self.block_size} leaves no token to draft; use at least 2")
        if self.shift_labels and not self.slot_0:
            raise ConfigRefused(
                "shifted labels without slot 0: it predicts the first token after the anchor, and nothing else does"
            )
        if not self.target_layer_ids:
            raise ConfigRefused("target_layer_ids is empty; a drafter reads at least one layer of its target")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigRefused(
                f"mask_token_id {self.mask_token_id} has no embedding: the vocabulary has {self.vocab_size} rows"
            )
        self._check_layers()

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigRefused(
                f"{len(self.layer_types)} layer types {list(self.layer_types)} for "
                f"{self.num_hidden_layers} layers; give one for each layer"
            )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ConfigRefused(f"unknown layer types {unknown}; known: {list(LAYER_TYPES)}")
        sliding = "sliding_attention" in self.layer_types
        if sliding and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigRefused(
                f"sliding layers need a window of at least 1 token; sliding_window is {self.sliding_window}"
            )

    @property
    def first_draft(self) -> int:
        """The first slot whose state drafts a token: 0 with shifted labels, else 1 (slot 0 knows only its anchor)."""
        return 0 if self.shift_labels else 1

    def layer_kind(self, layer: int) -> LayerKind:
        """Causality and window of one layer; window 1 means the query sees only itself."""
        sliding = self.layer_types[layer] == "sliding_attention"
        causal = sliding if self.is_causal is None else self.is_causal
        return LayerKind(causal=causal, window=self.sliding_window if sliding else None)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """`layer_kind` of every layer, in order."""
        return tuple(self.layer_kind(layer) for layer in range(self.num_hidden_layers))

    def to_hf_config(self) -> dict[str, Any]:
        """config.json as z-lab's code, vLLM, SGLang, llama.cpp and MLX read it.

        Written twice where readers differ: rope_theta beside rope_parameters, block_size nested and on top.
        """
        sliding = "sliding_attention" in self.layer_types
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            # transformers derives all-full layers from a missing max_window_layers and drops the window
            # unless use_sliding_window is set, so all four are always explicit.
            "layer_types": list(self.layer_types),
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": dflash,
        }
        if self.is_causal is not None:
            config["is_causal"] = dflash["causal"] = self.is_causal
        if self.slot_0:
            dflash |= {"shift_labels": self.shift_labels, "slot_0": True}
        if self.shift_labels:
            # The speculators format's word for it; a server that knows the word refuses or honours it.
            config["sample_from_anchor"] = dflash["sample_from_anchor"] = True
        for name, neutral in (
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("final_logit_softcapping", None),
        ):
            if getattr(self, name) != neutral:
                config[name] = dflash[name] = getattr(self, name)
        return config

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a config.json of ours or a published one; nested dflash_config wins over the top level.

        Raises ConfigRefused naming a required key that is missing (target_layer_ids is never guessed).
        """
        nested: Mapping[str, Any] = config.get("dflash_config") or {}

        def read(name: str, default: Any = None) -> Any:
            return nested.get(name, config.get(name, default))

        for name in ("target_layer_ids", "mask_token_id"):
            if read(name) is None:
                raise ConfigRefused(
                    f"this config.json has no {name}, neither on top nor in dflash_config; "
                    "a drafter is unusable without it"
                )
        causal = config.get("is_causal", nested.get("causal"))
        return cls(
            hidden_size=config["hidden_size"],
            target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            block_size=read("block_size", 16),
            mask_token_id=read("mask_token_id"),
            target_layer_ids=tuple(read("target_layer_ids")),
            num_target_layers=config.get("num_target_layers") or 0,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta(config),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            layer_types=tuple(config.get("layer_types") or ()),
            sliding_window=config.get("sliding_window"),
            is_causal=causal,
            shift_labels=bool(read("shift_labels", read("sample_from_anchor", False))),
            slot_0=read("slot_0"),
            input_embedding_scale=read("input_embedding_scale", 1.0),
            output_multiplier=read("output_multiplier", 1.0),
            final_logit_softcapping=read("final_logit_softcapping"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a target's config.json (multimodal ones nest it)."""
    return cast(Mapping[str, Any], config.get("text_config") or config)


def rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base, from the old key, the new one, or the new one nested per layer type; 10000 when absent.

    transformers 5 writes only rope_parameters; a reader of the old key alone would silently get 10000.
    """
    if config.get("rope_theta"):
        return float(config["rope_theta"])
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    nested = parameters.get("full_attention")
    if isinstance(nested, Mapping):
        parameters = nested
    return float(parameters.get("rope_theta") or 10000.0)


def drafter_geometry(target_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> DrafterConfig:
    """The drafter for a target: the published geometry at published sizes, a smaller one below hidden size 2048.

    `target_config` is the target's config.json; `overrides` must hold block_size, mask_token_id and target_layer_ids
    and may hold any other field (None values are ignored). Heads are NOT the target's: 32/8 of 128 is what all
    published drafters use, and partial rotary or mrope must not be inherited.
    """
    target = text_config(target_config)
    given = {name: value for name, value in overrides.items() if value is not None}
    target_hidden = int(target["hidden_size"])
    hidden = int(given.get("hidden_size", target_hidden))
    layers = int(given.get("num_hidden_layers", 5))
    if hidden >= 2048:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    else:
        key_value_heads = max(1, hidden // 256)
        heads = {"num_attention_heads": 4 * key_value_heads, "num_key_value_heads": key_value_heads, "head_dim": 64}
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "num_hidden_layers": layers,
        "intermediate_size": int(target.get("intermediate_size") or 3 * hidden),
        **heads,
        "vocab_size": int(target["vocab_size"]),
        "num_target_layers": int(target["num_hidden_layers"]),
        "rope_theta": rope_theta(target),
        "rms_norm_eps": float(target.get("rms_norm_eps") or 1e-6),
        "max_position_embeddings": int(target.get("max_position_embeddings") or 32768),
        "bos_token_id": _token_id(target_config, "bos_token_id"),
        "eos_token_id": _token_id(target_config, "eos_token_id"),
        "pad_token_id": _token_id(target_config, "pad_token_id"),
        "tie_word_embeddings": bool(target_config.get("tie_word_embeddings", target.get("tie_word_embeddings", False))),
    }
    return DrafterConfig(**{**fields, **given})


def _token_id(config: Mapping[str, Any], name: str) -> Any:
    # Multimodal configs keep the chat ids on top and the text ids nested: the chat's end is what serving stops at.
    return config.get(name) if config.get(name) is not None else text_config(config).get(name)
