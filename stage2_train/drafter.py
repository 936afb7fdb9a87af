"""The drafter: a Qwen3-style decoder whose keys and values also come from the target's features.

The target's residual streams pass `fc` and `hidden_norm` once; every layer projects that context with its OWN k/v
weights, and only block slots are queries. Embedding and output head are the target's and are not stored here.
Used by train.py, estimate.py, decode.py. Read attention.py for the masks, draft_cache.py for drafting.

Shapes: R rows, S context tokens, Q block slots, F taps, H hidden, Ht target hidden, d head_dim.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from stage2_train.attention import Group, GroupedMask, Mask, Masks
from stage2_train.draft_cache import ContextCache
from stage2_train.drafter_config import DrafterConfig

# Of the kernel on GPUs, tile sizes included (fwd_BLOCK_M, bwd_num_warps, ...). Triton is pinned: flex_decoding would
# take over for short Q and refuses odd group sizes.
FLEX_OPTIONS: dict[str, Any] = {"BACKEND": "TRITON"}


class RMSNorm(nn.Module):
    """w * x / rms(x), computed in float32 and cast back to the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [R,1,T,head_dim] in float32 for positions [R,T].

    The frequencies are computed here and never stored: as a buffer they would be rounded by `.to(bfloat16)`,
    which shifts phases at large positions.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions[:, None, :, None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half (neox) rotary embedding over the full head: x [R,heads,T,d]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Block slots attend to [context; block] with one set of k/v weights for both."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim, self.theta = dim, config.rope_theta
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def context_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [R,nkv,T,d] of x [R,T,H] at positions [R,T], for context and block."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(keys, *rotary(positions, self.head_dim, self.theta)), values

    def attend(self, x: Tensor, positions: Tensor, k_ctx: Tensor, v_ctx: Tensor, mask: Mask) -> Tensor:
        """[R,Q,H] from block x [R,Q,H] over [context; block]; mask None means every key is visible."""
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        queries = rotate(queries, *rotary(positions, self.head_dim, self.theta))
        k_own, v_own = self.context_kv(x, positions)
        keys, values = torch.cat((k_ctx, k_own), dim=2), torch.cat((v_ctx, v_own), dim=2)
        return self.o_proj(attention(queries, keys, values, mask).transpose(1, 2).flatten(2))


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Grouped-query softmax attention [R,nh,Q,d]; the mask's type picks the kernel, nothing falls back.

    BlockMask: flex_attention. GroupedMask: SDPA per group. Tensor (bool, or additive in the dtype of the queries) or
    None: SDPA.
    """
    if isinstance(mask, BlockMask):
        options = FLEX_OPTIONS if queries.is_cuda else None
        found = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)  # type: ignore[arg-type]
        assert isinstance(found, Tensor)
        return found
    if isinstance(mask, GroupedMask):
        return torch.cat(
            [
                _sdpa(queries[:, :, group.queries], _seen(keys, group, mask), _seen(values, group, mask), group.mask)
                for group in mask.groups
            ],
            dim=2,
        )
    return _sdpa(queries, keys, values, mask)


def _seen(x: Tensor, group: Group, mask: GroupedMask) -> Tensor:
    own = slice(mask.context_length + group.queries.start, mask.context_length + group.queries.stop)
    return torch.cat((x[:, :, group.context], x[:, :, own]), dim=2)


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(queries, _widen(keys, group), _widen(values, group), attn_mask=mask)


def _widen(x: Tensor, group: int) -> Tensor:
    # One key/value head stays a view here; enable_gqa would copy it for every query head.
    rows, heads, length, dim = x.shape
    return x[:, :, None].expand(rows, heads, group, length, dim).reshape(rows, heads * group, length, dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R,Q,H] -> [R,Q,H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm block; the context is not normed again, updated, or passed through the MLP.

    The region that is compiled: it reads no layer number, so that one graph serves all layers of a kind.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.recompute = False

    def forward(
        self, hidden: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Mask
    ) -> Tensor:
        """[R,Q,H] block states -> [R,Q,H], with context [R,S,H] as keys and values only."""
        if not self.recompute:
            return self._block(hidden, positions, context, context_positions, mask)
        # Inside the compiled region: still one graph, and backward never calls compiled code from autograd's thread.
        # The layer draws no random numbers, so there is no state to restore.
        arguments = (hidden, positions, context, context_positions, mask)
        out: Tensor = checkpoint(self._block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    def _block(
        self, hidden: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Mask
    ) -> Tensor:
        return self.attend(hidden, positions, *self.self_attn.context_kv(context, context_positions), mask)

    def attend(self, hidden: Tensor, positions: Tensor, k_ctx: Tensor, v_ctx: Tensor, mask: Mask) -> Tensor:
        """The same with the context's keys and values already made (drafting keeps them)."""
        hidden = hidden + self.self_attn.attend(self.input_layernorm(hidden), positions, k_ctx, v_ctx, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Drafter(nn.Module):
    """fc, hidden_norm, layers, norm: exactly the published tensors (11 per layer + 3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.kinds = config.layer_kinds()

    def initialise(self, seed: int) -> Drafter:
        """Fresh weights, the same for a seed on every machine: matrices N(0, 0.02), norms 1.

        Every tensor has random numbers of its own, drawn side by side: 1.7 billion in one row take half a minute.
        """
        parameters = list(self.parameters())
        seeds = torch.randint(2**62, (len(parameters),), generator=torch.Generator().manual_seed(seed)).tolist()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_draw, parameters, seeds))
        return self

    def recompute_layers(self, on: bool) -> Drafter:
        """Whether backward runs each layer's forward again from its inputs, the only tensors then kept for it."""
        for layer in self.layers:
            layer.recompute = on  # type: ignore[assignment]
        return self

    def project_context(self, target_hidden: Tensor) -> Tensor:
        """Target features [R,S,F*Ht] (taps in ascending layer order) -> context [R,S,H]."""
        context: Tensor = self.hidden_norm(self.fc(target_hidden))
        return context

    def forward(
        self, context: Tensor, block_embeds: Tensor, context_positions: Tensor, block_positions: Tensor, masks: Masks
    ) -> Tensor:
        """Final-normed states [R,Q,H] of all block slots; slot k of anchor a predicts the token at a + k.

        context [R,S,H]; block_embeds [R,Q,H] (`embed_blocks`); positions [R,S], [R,Q] within the document; masks from
        attention.build_masks.
        """
        hidden = block_embeds
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            hidden = layer(hidden, block_positions, context, context_positions, masks[kind])
        final: Tensor = self.norm(hidden)
        return final

    def on_features(
        self,
        target_hidden: Tensor,
        block_embeds: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: Masks,
    ) -> Tensor:
        """`forward` from target features [R,S,F*Ht]: all that training runs, in one call for FSDP2 to wrap."""
        context = self.project_context(target_hidden)
        return self.forward(context, block_embeds, context_positions, block_positions, masks)

    def new_cache(self, rows: int, capacity: int) -> ContextCache:
        """An empty cache for drafting `rows` sequences on this drafter's device and dtype."""
        weight = self.fc.weight
        return ContextCache(self.config, rows, capacity, weight.device, weight.dtype)

    def extend(self, cache: ContextCache, target_hidden: Tensor, counts: Tensor | None = None) -> None:
        """Append target features [R,T,F*Ht] of the next T positions; `counts` [R] says how many are real in a row."""
        context = self.project_context(target_hidden)
        positions = cache.next_positions(context.shape[1])
        pairs = [layer.self_attn.context_kv(context, positions) for layer in self.layers]  # type: ignore[operator, union-attr]
        cache.append([k for k, _ in pairs], [v for _, v in pairs], counts)

    def draft(self, cache: ContextCache, block_embeds: Tensor, block_positions: Tensor) -> Tensor:
        """Final-normed states [R,B,H] of one block per row, on the cached context 0..anchor-1.

        block_embeds [R,B,H] of [anchor token, MASK, ...]; block_positions [R,B] = anchor + 0..B-1, with the anchor's
        position equal to the row's cached length.
        """
        hidden = block_embeds
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            keys, values, mask = cache.view(index, kind, block_embeds.shape[1])
            hidden = layer.attend(hidden, block_positions, keys, values, mask)  # type: ignore[operator]
        final: Tensor = self.norm(hidden)
        return final


@torch.no_grad()
def _draw(parameter: nn.Parameter, seed: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(seed)
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))


def embed_blocks(token_ids: Tensor, embed_tokens: Tensor, config: DrafterConfig) -> Tensor:
    """Embeddings of block ids [R,Q] from the target's frozen table [V,H], scaled when the target scales its own."""
    embeds = F.embedding(token_ids, embed_tokens)
    return embeds if config.input_embedding_scale == 1.0 else embeds * config.input_embedding_scale


def shape_logits(raw: Tensor, config: DrafterConfig) -> Tensor:
    """Multiplier and soft cap of a target that has them, on the head's raw products."""
    if config.output_multiplier != 1.0:
        raw = raw * config.output_multiplier
    if config.final_logit_softcapping is not None:
        raw = torch.tanh(raw / config.final_logit_softcapping) * config.final_logit_softcapping
    return raw


def logits(hidden: Tensor, lm_head_weight: Tensor, config: DrafterConfig) -> Tensor:
    """[..., H] final states -> [..., V] logits through the target's frozen head [V,H]."""
    return shape_logits(F.linear(hidden, lm_head_weight), config)
