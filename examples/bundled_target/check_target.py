"""Looks at a trained target as a user would: sample answers, how they end, their lengths, speed, tokenizer round trips.

    python check_target.py --target FOLDER --prompts prompts_heldout.jsonl [--show 10]

Greedy, in fp32, on the CPU.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from pathlib import Path

import torch
from common import MASK, read_rows, render_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

SPELLINGS = (
    "A plain line.",
    "1,234.50 + 7%",
    "tabs\tand\n\n  blanks ",
    "na\u00efve \u6f22\u5b57 \U0001f642 \u0645\u0631\u062d\u0628\u0627",
)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    mask = tokenizer.mask_token_id
    assert tokenizer.convert_ids_to_tokens(mask) == MASK
    for text in [*SPELLINGS, *texts]:
        tokens = tokenizer(text)["input_ids"]
        assert mask not in tokens, text
        assert tokenizer.decode(tokens) == text, text
        message = [{"role": "user", "content": text}]
        assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == render_prompt(text)
    print(f"tokenizer: {len(texts) + len(SPELLINGS)} texts round-trip, chat template agrees, no mask token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--show", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    rows = read_rows(args.prompts)
    check_tokenizer(tokenizer, [row["messages"][0]["content"] for row in rows])

    lengths: dict[str, list[int]] = collections.defaultdict(list)
    ended: collections.Counter[str] = collections.Counter()
    written, seconds, shown = 0, 0.0, 0
    for start in range(0, len(rows), args.batch):
        batch = rows[start : start + args.batch]
        texts = [render_prompt(row["messages"][0]["content"]) for row in batch]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        clock = time.monotonic()
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False)
        seconds += time.monotonic() - clock
        for row, answer in zip(batch, tokens[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            whole = tokenizer.eos_token_id in answer
            answer = answer[: answer.index(tokenizer.eos_token_id)] if whole else answer
            lengths[row["source"]].append(len(answer))
            ended[row["source"]] += whole
            written += len(answer) + whole
            if shown < args.show or row["source"] not in ("gsm8k", "mbpp"):
                shown += 1
                print(f"\n[{row['id']}] {row['messages'][0]['content']}\n-> {tokenizer.decode(answer)}")
                print("   (ended by itself)" if whole else "   (cut)")
    print(f"\n{written} tokens in {seconds:.1f} s: {written / seconds:.0f} per second at batch {args.batch}")
    for source, counts in lengths.items():
        quarters = [int(q) for q in statistics.quantiles(counts, n=4)] if len(counts) > 1 else counts
        print(f"{source}: {ended[source]} of {len(counts)} ended; tokens (quartiles) {quarters}, longest {max(counts)}")


if __name__ == "__main__":
    main()
