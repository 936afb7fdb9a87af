"""Lets an instruction-tuned teacher answer the prompts that have no reference answer, and invent further prompts.

    python teacher.py --teacher FOLDER --ask CORPUS/ask.jsonl --out CORPUS/taught.jsonl

Steps, in the order of their worth, until `--budget-s` is spent:
  1. greedy answers to the given prompts;
  2. the teacher writes user prompts of its own (it is given an empty user turn) and answers them greedily;
  3. sampled answers to the given training prompts.
An answer that did not end by itself, or that repeats itself, is dropped. Written for one GPU; it also runs on a CPU.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import SPECIAL_TOKENS, TURN_END, Row, read_rows, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# The cache argument's name differs between versions of transformers.
PARAMETERS = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE_ARGUMENT = "cache" if "cache" in PARAMETERS else "past_key_values"
SYSTEM = "You are a helpful assistant. Answer briefly, in a few short and clear sentences."
# Openings for invented prompts: they steer the empty user turn towards varied everyday requests.
OPENINGS = (
    "What is", "What are", "How do I", "How can I", "How does", "Why do", "Why is", "Can you explain", "Explain",
    "Describe", "Write a short", "Write a", "Give me", "List", "Tell me about", "Who was", "When did", "Where is",
    "What is the difference between", "Suggest", "Summarize", "Is it", "I want to", "I am", "My", "Please",
    "Write a Python function", "Write a sentence", "Compare", "Name",
)  # fmt: skip


@dataclass
class Teacher:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str
    batch: int
    deadline: float
    end: int

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def complete(self, prompts: list[str], new_tokens: int, temperature: float) -> list[str | None]:
        """Completes each prompt; None where the teacher did not end by itself, or no time was left."""
        out: list[str | None] = [None] * len(prompts)
        # Prompts of one length go together, so that little is padding; the shortest, which are the most useful, first.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), self.batch):
            if self.late():
                break
            chosen = order[start : start + self.batch]
            texts = self.decode_batch([prompts[i] for i in chosen], new_tokens, temperature)
            for i, text in zip(chosen, texts, strict=True):
                out[i] = text
            ended = sum(text is not None for text in texts)
            print(f"{len(chosen)} prompts, {ended} ended, {self.deadline - time.monotonic():.0f} s left", flush=True)
        return out

    @torch.inference_mode()
    def decode_batch(self, prompts: list[str], new_tokens: int, temperature: float) -> list[str | None]:
        """Decodes one batch; rows that have ended leave it, so that the stragglers cost little."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        rows = list(range(len(prompts)))
        written: list[list[int]] = [[] for _ in prompts]
        ended: set[int] = set()
        cache = DynamicCache(config=self.model.config)
        for _ in range(new_tokens):
            step = {"input_ids": tokens, "attention_mask": mask, CACHE_ARGUMENT: cache, "use_cache": True}
            tokens = pick(self.model(**step, logits_to_keep=1).logits[:, -1].float(), temperature)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if token == self.end:
                    ended.add(row)
                elif row not in ended:
                    written[row].append(token)
            keep = [i for i, row in enumerate(rows) if row not in ended]
            if not keep or self.late():
                break
            # Rows that have ended are cleared out once they are a tenth of the batch.
            if len(keep) <= 0.9 * len(rows):
                index = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(index)
                tokens, mask, rows = tokens[index], mask[index], [rows[i] for i in keep]
            tokens = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        return [self.tokenizer.decode(text).strip() if i in ended else None for i, text in enumerate(written)]

    def answers(self, questions: list[str], new_tokens: int, temperature: float) -> list[str | None]:
        prompts = [chat(question) for question in questions]
        return [text if text and sound(text) else None for text in self.complete(prompts, new_tokens, temperature)]

    def invent(self, count: int, temperature: float) -> list[str]:
        """User prompts of the teacher's own, without repeats."""
        openings = [OPENINGS[i % len(OPENINGS)] for i in range(count)]
        prompts = [f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{opening}" for opening in openings]
        found: dict[str, str] = {}
        for opening, rest in zip(openings, self.complete(prompts, 60, temperature), strict=True):
            # The rest lost its leading blank; only an opening that ends a word can need it back.
            text = f"{opening} {rest}" if rest and rest[0].isalnum() else f"{opening}{rest}"
            if rest and 15 <= len(text) <= 300 and sound(text):
                found.setdefault(text.casefold(), text)
        return list(found.values())


def chat(question: str) -> str:
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def sound(text: str) -> bool:
    """False for texts that hold special tokens or broken characters, or that loop."""
    if any(token in text for token in SPECIAL_TOKENS) or "\ufffd" in text or len(text) < 3:
        return False
    if re.search(r"(?m)^(A|Q|Answer|Question):", text):
        return False
    words = text.casefold().split()
    phrases = collections.Counter(zip(*(words[i:] for i in range(4)), strict=False))
    return not phrases or max(phrases.values()) <= 3


def pick(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The next token of each row: the likeliest at temperature 0, else drawn from the fifty likeliest."""
    if not temperature:
        return logits.argmax(dim=-1)
    values, indices = logits.topk(50, dim=-1)
    drawn = torch.multinomial((values / temperature).softmax(dim=-1), 1)
    return indices.gather(1, drawn).squeeze(1)


def taught(row: Row, question: str, answer: str | None, group: str) -> list[Row]:
    if answer is None:
        return []
    kept = {key: row[key] for key in ("source", "license", "split")}
    return [{"group": group, **kept, "question": question, "answer": answer, "written_by": "teacher"}]


def load(folder: Path, batch: int, budget: float) -> Teacher:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    deadline = time.monotonic() + budget
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    return Teacher(model, tokenizer, device, batch, deadline, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="Hugging Face folder; ChatML is assumed")
    parser.add_argument("--ask", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--invent", type=int, default=6000, help="prompts for the teacher to invent")
    parser.add_argument("--samples", type=int, default=2, help="sampled answers to each training prompt")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--longest-prompt", type=int, default=700, help="characters of the longest prompt to ask")
    parser.add_argument("--budget-s", type=float, default=130.0)
    parser.add_argument("--limit", type=int, help="use only the first prompts (for a trial)")
    parser.add_argument("--seed", type=int, default=20261129)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    teacher = load(args.teacher, args.batch, args.budget_s)
    asked = read_rows(args.ask)[: args.limit]
    asked = [row for row in asked if len(row["messages"][0]["content"]) <= args.longest_prompt]
    questions = [row["messages"][0]["content"] for row in asked]
    rows: list[Row] = []

    for row, question, answer in zip(asked, questions, teacher.answers(questions, args.new_tokens, 0.0), strict=True):
        rows += taught(row, question, answer, row["id"])
    print(f"{len(rows)} greedy answers", flush=True)
    write_rows(args.out, rows)

    own = {"source": "invented-by-teacher", "license": "Apache-2.0", "split": "train"}
    given = {question.casefold() for question in questions}
    invented = [question for question in teacher.invent(args.invent, 0.9) if question.casefold() not in given]
    for i, (question, answer) in enumerate(zip(invented, teacher.answers(invented, args.new_tokens, 0.0), strict=True)):
        # Every fiftieth is kept back, so that the loss on such prompts can be watched.
        rows += taught({**own, "split": "val" if i % 50 == 0 else "train"}, question, answer, f"invented-{i}")
    print(f"{len(rows)} with {len(invented)} invented prompts", flush=True)
    write_rows(args.out, rows)

    trained = [row for row in asked if row["split"] == "train"]
    for _ in range(args.samples):
        texts = [row["messages"][0]["content"] for row in trained]
        for row, question, answer in zip(trained, texts, teacher.answers(texts, args.new_tokens, 0.8), strict=True):
            rows += taught(row, question, answer, row["id"])
    print(f"{write_rows(args.out, rows)} rows written", flush=True)


if __name__ == "__main__":
    main()
