"""Trains the bundled target, a small Qwen3-architecture causal LM, from scratch; writes a Hugging Face folder.

    python train_target.py --corpus CORPUS --tokenizer FOLDER --out FOLDER [--epochs 40] [--dropout 0.2]

An epoch takes one row of every group of the corpus (see build_corpus.py), in batches of rows of like length, padded on
the right: a causal model never looks at padding on the right, so no attention mask is needed and every text is seen at
the positions it has in use. The learning rate falls along a cosine to zero at the last step. `--budget-s` bounds the
wall time: where it is the tighter limit, the schedule follows the clock instead, and the log says so.
The losses in the log and in training.json are of the weights as written (bf16), per answer token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Row, read_rows, render_answer, render_prompt
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

IGNORE = -100
MATHS = "gsm8k-train"
Output = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass
class Text:
    """One tokenised conversation; `prompt` tokens come before the answer."""

    tokens: torch.Tensor
    prompt: int
    source: str


def encode(rows: list[Row], tokenizer: PreTrainedTokenizerBase, longest: int) -> dict[str, list[Text]]:
    """Tokenises rows by group; overlong ones are dropped rather than cut, since the end mark is at their end."""
    prompts = tokenizer([render_prompt(row["question"]) for row in rows])["input_ids"]
    answers = tokenizer([render_answer(row["answer"]) for row in rows])["input_ids"]
    groups: dict[str, list[Text]] = defaultdict(list)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        if len(prompt) + len(answer) <= longest:
            groups[row["group"]].append(Text(torch.tensor(prompt + answer), len(prompt), row["source"]))
    return dict(groups)


def to_batch(texts: list[Text], pad: int, prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, next-token labels and loss weights; the width is a multiple of 32 to keep the shapes few."""
    lengths = torch.tensor([len(text.tokens) for text in texts])[:, None]
    prompts = torch.tensor([text.prompt for text in texts])[:, None]
    width = -(-int(lengths.max()) // 32) * 32
    inputs = torch.full((len(texts), width), pad)
    for i, text in enumerate(texts):
        inputs[i, : len(text.tokens)] = text.tokens
    # Position i predicts token i + 1.
    place = torch.arange(1, width + 1)
    labels = torch.where(place < lengths, inputs.roll(-1, dims=1), IGNORE)
    weights = torch.where(place < prompts, prompt_weight, 1.0) * (place < lengths)
    return inputs, labels, weights


def batches(texts: list[Text], tokens: int, rng: random.Random) -> list[list[Text]]:
    """Batches of about `tokens` padded tokens, rows of like length together, in random order."""
    # The noise keeps the same rows from meeting in every epoch.
    ordered = sorted(texts, key=lambda text: len(text.tokens) * rng.uniform(0.9, 1.1))
    out: list[list[Text]] = [[]]
    widest = 0
    for text in ordered:
        widest = max(widest, len(text.tokens))
        if out[-1] and widest * (len(out[-1]) + 1) > tokens:
            out.append([])
            widest = len(text.tokens)
        out[-1].append(text)
    rng.shuffle(out)
    return out


def epoch_texts(groups: dict[str, list[Text]], rng: random.Random) -> list[Text]:
    """One text per group; maths originals are favoured over their rewrites, which can read oddly."""
    out = []
    for texts in groups.values():
        if texts[0].source == MATHS:
            out.append(texts[0] if rng.random() < 0.3 else rng.choice(texts))
        else:
            # The few code and general texts would drown among the maths problems otherwise.
            out += [rng.choice(texts), rng.choice(texts)]
    return out


def build_model(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attention_dropout=args.dropout,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def scale_outputs(model: Qwen3ForCausalLM) -> None:
    """Shrinks the layers' output matrices at the start, so that the residual stream does not grow with depth."""
    for layer in model.model.layers:
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            matrix.data.mul_((2 * len(model.model.layers)) ** -0.5)


def add_dropout(model: Qwen3ForCausalLM, rate: float) -> None:
    """Dropout of the embeddings and of each block's output: Qwen3 itself only drops attention weights."""

    def drop(module: torch.nn.Module, _: object, output: Output) -> Output:
        if not module.training:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate), *output[1:])
        return F.dropout(output, rate)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised; matrices of one shape are handled as one batch.

    The update is scaled to the size of AdamW's, so that one learning rate serves both optimizers.
    """

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[parameter.shape].append(parameter)
            for (rows, columns), parameters in shapes.items():
                gradients = torch.stack([parameter.grad for parameter in parameters])
                state = self.state[parameters[0]]
                velocity = state.setdefault("velocity", torch.zeros_like(gradients))
                velocity.lerp_(gradients, 1 - group["momentum"])
                updates = orthogonal(gradients.lerp_(velocity, group["momentum"]))
                scale = -group["lr"] * 0.2 * max(rows, columns) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates.to(gradients.dtype).unbind()), alpha=scale)


def orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Brings the singular values of each matrix near 1 by the quintic Newton-Schulz iteration that Muon uses."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def build_optimizers(
    model: Qwen3ForCausalLM, args: argparse.Namespace, device: str
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms; each with its peak learning rate."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    return [(Muon(matrices, args.muon_lr, args.weight_decay), args.muon_lr), (adam, args.lr)]


def fuse_norms() -> None:
    """Has Qwen3's RMSNorm use the fused kernel: the same function in one pass over memory instead of seven."""

    def forward(self: Qwen3RMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        scaled = F.rms_norm(hidden_states.float(), self.weight.shape, self.weight.float(), self.variance_epsilon)
        return scaled.to(hidden_states.dtype)

    Qwen3RMSNorm.forward = forward  # type: ignore[method-assign]


def token_losses(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")


@torch.inference_mode()
def answer_loss(
    model: Qwen3ForCausalLM, groups: dict[str, list[Text]], pad: int, device: str
) -> dict[str, tuple[float, int]]:
    """Mean loss and number of answer tokens by source, over the first text of each group."""
    model.eval()
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    by_source: dict[str, list[Text]] = defaultdict(list)
    for texts in groups.values():
        by_source[texts[0].source].append(texts[0])
    for source, texts in by_source.items():
        for batch in batches(texts, 32_768, random.Random(0)):
            inputs, labels, weights = (t.to(device) for t in to_batch(batch, pad, 0.0))
            losses = token_losses(model, inputs, labels) * weights.flatten()
            total[source] += losses.sum().item()
            count[source] += int(weights.sum().item())
    model.train()
    return {source: (total[source] / count[source], count[source]) for source in total}


def overall(losses: dict[str, tuple[float, int]]) -> float:
    return sum(loss * count for loss, count in losses.values()) / max(1, sum(count for _, count in losses.values()))


def rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def stream(groups: dict[str, list[Text]], args: argparse.Namespace, pad: int) -> Iterator[tuple[float, Any]]:
    """All batches with the share of the run that lies behind each."""
    rng = random.Random(args.seed)
    for epoch in range(args.epochs):
        plan = batches(epoch_texts(groups, rng), args.batch_tokens, rng)
        for i, batch in enumerate(plan):
            yield (epoch + i / len(plan)) / args.epochs, to_batch(batch, pad, args.prompt_weight)


def fit(
    model: Qwen3ForCausalLM, groups: dict[str, list[Text]], args: argparse.Namespace, pad: int, device: str,
    evaluate: Callable[[], float],
) -> dict[str, Any]:  # fmt: skip
    optimizers = build_optimizers(model, args, device)
    start, seen, steps, next_look, by_clock = time.monotonic(), 0, 0, 0.0, False
    history = []
    model.train()
    for by_steps, batch in stream(groups, args, pad):
        elapsed = (time.monotonic() - start) / args.budget_s
        by_clock = by_clock or elapsed > by_steps + 0.05
        progress = max(by_steps, elapsed)
        if progress >= 1:
            break
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_factor(progress, 0.03)
        inputs, labels, weights = (t.to(device, non_blocking=True) for t in batch)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            losses = token_losses(model, inputs, labels)
        loss = (losses * weights.flatten()).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps, seen = steps + 1, seen + inputs.numel()
        if progress >= next_look:
            held_out = evaluate()
            history.append({"step": steps, "train": round(loss.item(), 4), "held_out": round(held_out, 4)})
            clock = time.monotonic() - start
            print(
                f"{progress:4.0%} step {steps} train {loss.item():.3f} held-out {held_out:.3f} {clock:.0f} s",
                flush=True,
            )
            next_look = progress + args.look_every
    return {
        "steps": steps,
        "padded_tokens": seen,
        "seconds": round(time.monotonic() - start, 1),
        "schedule": "clock" if by_clock else "steps",
        "history": history,
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    model.config.attention_dropout = 0.0
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False, max_new_tokens=256
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Only what describes the tokenizer: not how it was loaded here; and the class name that every version knows.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only", "backend")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="trained folder of the same shape and tokenizer to go on from")
    shape = parser.add_argument_group("shape")
    for name, value in (("layers", 8), ("hidden", 256), ("intermediate", 384), ("heads", 4), ("kv-heads", 2)):
        shape.add_argument(f"--{name}", type=int, default=value)
    shape.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak rate")
    parser.add_argument("--muon-lr", type=float, default=6e-3, help="Muon's peak rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--prompt-weight", type=float, default=0.3, help="loss weight of the prompts' tokens")
    parser.add_argument("--longest", type=int, default=640, help="tokens of the longest text")
    parser.add_argument("--budget-s", type=float, default=900.0)
    parser.add_argument("--look-every", type=float, default=0.1, help="share of the run between held-out losses")
    parser.add_argument("--limit", type=int, help="use only the first groups (for a trial)")
    parser.add_argument("--seed", type=int, default=20261129)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    pad = tokenizer.pad_token_id
    taught_file = args.corpus / "taught.jsonl"
    taught = read_rows(taught_file) if taught_file.exists() else []

    def rows(split: str) -> list[Row]:
        return read_rows(args.corpus / f"{split}.jsonl") + [row for row in taught if row["split"] == split]

    train, val, test = (encode(rows(split), tokenizer, args.longest) for split in ("train", "val", "test"))
    if args.limit:
        train, val, test = (dict(list(groups.items())[: args.limit]) for groups in (train, val, test))
    unique = sum(len(text.tokens) for texts in train.values() for text in texts)
    model = build_model(tokenizer, args)
    if args.start is None:
        scale_outputs(model)
    else:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32).state_dict())
    fuse_norms()
    add_dropout(model, args.dropout)
    model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(train)} groups, {unique:,} tokens, {device}", flush=True)
    report = fit(model, train, args, pad, device, lambda: overall(answer_loss(model, val, pad, device)))

    # Round once to bf16, then measure what was rounded, in fp32.
    model = model.to(torch.bfloat16)
    save(model, tokenizer, args.out)
    model = model.float()
    torch.set_float32_matmul_precision("highest")
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    report |= {"parameters": parameters, "unique_training_tokens": unique, "settings": settings}
    for name, groups in (("val", val), ("test", test)):
        losses = answer_loss(model, groups, pad, device)
        report[name] = {"all": round(overall(losses), 4)} | {k: [round(v, 4), n] for k, (v, n) in losses.items()}
        print(name, report[name], flush=True)
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
