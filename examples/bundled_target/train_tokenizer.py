"""Trains the bundled target's byte-level BPE tokenizer on its corpus and writes it as a Hugging Face tokenizer.

    python train_tokenizer.py --corpus CORPUS --out FOLDER [--vocab 3072]

Digits are split one by one, which keeps small models' arithmetic regular. `<|mask|>` is reserved: no text holds it, so
a drafter can use its embedding row for positions that are still to be filled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from common import CHAT_TEMPLATE, END_OF_TEXT, MASK, SPECIAL_TOKENS, TURN_END, TURN_START, read_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def texts(corpus: Path) -> Iterator[str]:
    """Training texts only. A group's alternatives differ in little, so one row of each group is enough."""
    seen: set[str] = set()
    for name in ("train.jsonl", "taught.jsonl"):
        path = corpus / name
        for row in read_rows(path) if path.exists() else []:
            if row["group"] not in seen and row.get("split", "train") == "train":
                seen.add(row["group"])
                yield row["question"]
                yield row["answer"]


def train(corpus: Path, vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=3072)
    args = parser.parse_args()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train(args.corpus, args.vocab),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(args.out)
    print(f"{len(fast)} tokens in {args.out}")


if __name__ == "__main__":
    main()
