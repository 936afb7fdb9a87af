"""The target model as both stages use it: loaded, frozen, checked, its decoder layers open to hooks.

Called by stage 1's teacher, by answer generation and by `dflash eval`. What it is called and hashed as is
shared/target_identity.py; which layers to tap is shared/geometry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shared import phases
from shared.errors import TargetNotFound, TargetUnsupported
from shared.reporter import Report, unreported
from shared.target_identity import (
    TargetFiles,
    find_target,
    geometry_of,
    load_config,
    load_tokenizer,
    load_tokenizer_of,
    target_identity,
)
from shared.target_loading import kernels_for, told

__all__ = [
    "Capture",
    "Target",
    "capture",
    "load_target",
    "load_tokenizer",
    "resolve_device",
    "resolve_dtype",
    "target_identity",
    "watch_layers",
]

DtypeName = Literal["auto", "bfloat16", "float32", "float16"]


@dataclass(frozen=True, slots=True)
class Target:
    """A frozen causal LM in eval mode with its tokenizer. `decoder` is the LM without its head; weights are [V, H]."""

    model: Any
    decoder: Any
    tokenizer: Any
    text_config: Any
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    tied: bool

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return cast(nn.ModuleList, self.decoder.layers)

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers L."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return int(self.embed_tokens_weight.shape[1])

    @property
    def embed_tokens_weight(self) -> Tensor:
        """Input embedding [V, H]."""
        return cast(Tensor, self.model.get_input_embeddings().weight)

    @property
    def lm_head_weight(self) -> Tensor:
        """Output head [V, H]; the same tensor as the embedding when tied."""
        return cast(Tensor, self.model.get_output_embeddings().weight)

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        return cast(nn.Module, self.decoder.norm)

    @property
    def norm_weight(self) -> Tensor:
        """Weight [H] of the final norm, as stored (some families apply it as 1 + w)."""
        return cast(Tensor, self.final_norm.weight)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.embed_tokens_weight.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in the weights' dtype from hidden states [..., H] that passed the final norm."""
        logits = cast(Tensor, self.model.get_output_embeddings()(hidden))
        if self.output_multiplier != 1.0:
            logits = logits * self.output_multiplier
        if self.final_logit_softcapping is not None:
            logits = torch.tanh(logits / self.final_logit_softcapping) * self.final_logit_softcapping
        return logits


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA when there is one. Raises TargetUnsupported for a CUDA device that this torch cannot use."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TargetUnsupported(
            f"device {device} asked, but this torch ({torch.__version__}) sees no CUDA device; use --device cpu"
        )
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise TargetUnsupported(f"device {device} asked, but only {torch.cuda.device_count()} CUDA devices are there")
    return found


def resolve_dtype(dtype: DtypeName, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 on CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, dtype))


def load_target(
    target: str,
    *,
    dtype: DtypeName = "auto",
    device: str = "auto",
    attn: str = "auto",
    report: Report = unreported,
) -> Target:
    """Load a target by folder, GGUF or Hub id, check it and freeze it; `attn` "auto" is sdpa where the family has it.

    `report` hears the bytes loaded, then of a warm-up: the first forward, for which kernels of hybrid targets are tuned
    (65 s on an H200 with nothing cached). Raises TargetNotFound; TargetUnsupported for a model whose decoder layers,
    head or scales are not where we read them, or whose weights are incomplete or not finite.
    """
    files = find_target(target, weights=True)
    place = resolve_device(device)
    with told(files, report):
        model = _load_model(files, resolve_dtype(dtype, place), place, attn)
    report(phases.WARM_UP, 0, 1, "passes")
    return wrap(model, load_tokenizer_of(files), files.name)


def wrap(model: Any, tokenizer: Any, name: str) -> Target:
    """Freeze a causal LM and find its parts; `name` is for messages. Raises TargetUnsupported."""
    model.eval().requires_grad_(False)
    decoder = model.get_decoder()
    missing = [part for part in ("layers", "norm") if not isinstance(getattr(decoder, part, None), nn.Module)]
    if missing or model.get_output_embeddings() is None:
        raise TargetUnsupported(
            f"target {name} ({type(model).__name__}) is not a decoder we can tap: {type(decoder).__name__} has no "
            f"{' and no '.join(missing) or 'output head'}; supported are decoder-only models with .layers and .norm"
        )
    geometry = geometry_of(model.config)
    same = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    found = Target(
        model=model,
        decoder=decoder,
        tokenizer=tokenizer,
        text_config=model.config.get_text_config(),
        tied=same,
        input_embedding_scale=geometry["input_embedding_scale"],
        output_multiplier=geometry["output_multiplier"],
        final_logit_softcapping=geometry["final_logit_softcapping"],
    )
    _check_weights(found, name)
    _check_by_forward(found, name)
    return found


def _load_model(files: TargetFiles, dtype: torch.dtype, device: torch.device, attn: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # our own progress lines say what is happening
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if attn != "auto":
        options["attn_implementation"] = attn
    if files.gguf:
        from shared.target_gguf import dequantized_config

        options["quantization_config"] = dequantized_config()
    load_config(files)  # its faults are named before anything large is read
    try:
        with kernels_for(device.type):
            model, report = AutoModelForCausalLM.from_pretrained(**files.where(), **options)
    except OSError as error:
        raise TargetNotFound(f"weights of target {files.name} cannot be read: {str(error).splitlines()[0]}") from error
    except (ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise TargetUnsupported(
            f"target {files.name} cannot be loaded ({str(error).strip().splitlines()[0]}); its config and weights must "
            "be whole and belong together"
        ) from error
    if missing := sorted(report["missing_keys"]):
        # transformers would fill these with random numbers and only warn; a drafter of a random head learns noise.
        raise TargetUnsupported(
            f"the weights of target {files.name} lack {len(missing)} tensors, the first is {missing[0]}; "
            "a model completed with random numbers is no teacher"
        )
    if mismatched := report.get("mismatched_keys"):
        raise TargetUnsupported(
            f"target {files.name}: {len(mismatched)} tensors have another shape than its config says, the first is "
            f"{sorted(mismatched)[0]}"
        )
    if files.gguf:
        from shared.target_gguf import forget_quantization

        forget_quantization(model)
    return model.to(device=device, dtype=dtype)


def _check_weights(target: Target, name: str) -> None:
    """Embedding, head and all norms finite; the rest shows in the features, which are checked document by document."""
    small = {key: value for key, value in target.decoder.named_parameters() if value.dim() == 1}
    large = {"embed_tokens.weight": target.embed_tokens_weight, "lm_head.weight": target.lm_head_weight}
    for key, value in (small | large).items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise TargetUnsupported(
                f"target {name}: {key} holds NaN or infinity; the files are damaged or the dtype is too small"
            )


@torch.inference_mode()
def _check_by_forward(target: Target, name: str) -> None:
    """Compare our reading of embedding scale and head with what the model itself does, on eight tokens.

    A family with learned positions, several residual streams or another head would give wrong drafters silently.
    """
    ids = torch.arange(8, device=target.device)[None] % target.embed_tokens_weight.shape[0]
    entered: list[Tensor] = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        logits = target.model(ids, use_cache=False).logits
        hidden = target.decoder(ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    embedded = target.embed_tokens_weight[ids].float() * target.input_embedding_scale
    # bfloat16 rounds the scale itself (sqrt(640) becomes 25.25), so the bound is loose; a wrong one is off by far more.
    if not torch.allclose(entered[0].float(), embedded, rtol=0.02, atol=1e-3 * float(embedded.abs().max())):
        raise TargetUnsupported(
            f"target {name}: what enters its first layer is not {target.input_embedding_scale:g} x embedding"
        )
    if not torch.allclose(
        logits.float(), target.logits(hidden).float(), rtol=0.02, atol=0.02 * float(logits.float().abs().max())
    ):
        raise TargetUnsupported(
            f"target {name}: its logits are not head(final norm) with multiplier {target.output_multiplier:g}"
            f" and softcap {target.final_logit_softcapping}"
        )


def watch_layers(target: Target, tick: Callable[[], None]) -> None:
    """Call `tick` whenever a decoder layer or the head has run; on a CPU whenever any matrix product of them has.

    One forward of 16,384 tokens takes a 135M target 50 s on two CPU cores and each layer of a 1.7B one 26 s, where a
    step may be silent for 60: without this a worker of a target that is merely slow ended as a hang.
    """
    parts: Iterable[nn.Module] = (*target.layers, target.model.get_output_embeddings())
    if target.device.type == "cpu":
        parts = (module for part in parts for module in part.modules() if isinstance(module, nn.Linear))
    for module in parts:
        module.register_forward_hook(lambda *_: tick())


class Capture:
    """The residual stream after chosen decoder layers, during the last forward inside the `with` block."""

    def __init__(self, target: Target, target_layer_ids: Sequence[int]) -> None:
        self.target_layer_ids = tuple(target_layer_ids)
        self._target = target
        self._outputs: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Capture:
        for layer_id in self.target_layer_ids:
            self._hooks.append(self._target.layers[layer_id].register_forward_hook(self._keep(layer_id)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def features(self) -> Tensor:
        """[B, S, F, H] in the order of the layer ids, raw (before the final norm also for the last layer)."""
        return torch.stack([self._outputs[layer_id] for layer_id in self.target_layer_ids], dim=2)


def capture(target: Target, target_layer_ids: Sequence[int]) -> Capture:
    """Hook the layers: `with capture(target, ids) as captured: target.decoder(...); captured.features()`."""
    return Capture(target, target_layer_ids)
