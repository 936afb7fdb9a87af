"""Builds the bundled target's corpus, and the prompt files that ship beside it, from folders of JSON-lines prompts.

    python build_corpus.py --data DATA --out CORPUS [--prompts BUNDLED]

DATA holds train/*.jsonl and bench/*.jsonl with the fields id, source, license, messages and, where known, reference.
CORPUS receives
  train.jsonl  question and answer, with a `group`: rows of one group are alternatives, of which an epoch takes one;
  val.jsonl    training sources held out, for choosing between runs;
  test.jsonl   benchmark problems, for the reported loss;
  ask.jsonl    prompts without an answer, for teacher.py (`split` says where the answer goes).
BUNDLED receives prompts_train.jsonl and prompts_heldout.jsonl.

Everything is drawn from one seed, so the same inputs give the same files.
"""

from __future__ import annotations

import argparse
import random
import re
import textwrap
from pathlib import Path

from augment import rewrites
from common import SPECIAL_TOKENS, Row, read_rows, write_rows

GENERAL = ("arena-hard-v0.1", "oasst-prompts", "self-instruct-user", "self-instruct-seed")
BOXED_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."
OPENING = (
    "Let's solve this problem step by step. First, let's write down what we know, and then work through the steps one "
    "at a time."
)
CLOSING = "I hope this helps! Let me know if you have any other questions about this problem."
CODE_LEADS = (
    "Here is a Python function that solves the task:",
    "You can use this function:",
    "Here is the code:",
)
# Longer prompts (pasted articles, logs) are beyond what a model of this size can use.
LONGEST_PROMPT = 700


def boxed_answer(reference: str) -> str:
    """gsm8k's solution as numbered steps, without calculator marks, ending in the boxed result.

    The fixed sentences around the steps are of the kind that larger chat models write; a drafter learns them first.
    """
    text, _, final = reference.rpartition("####")
    text = re.sub(r"<<[^<>]*>>", "", text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    steps = [f"Step {number}: {line}" for number, line in enumerate((line for line in lines if line), 1)]
    result = final.strip().replace(",", "")
    answer = f"Putting these steps together, the answer to this question is {result}."
    return "\n\n".join([OPENING, *steps, answer, f"Therefore, the final answer is \\boxed{{{result}}}.", CLOSING])


def code_answer(reference: str, lead: str) -> str:
    """mbpp's solution as a Python block: LF line ends, four-space tabs, no trailing blanks."""
    text = reference.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    lines = [line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines()]
    body = "\n".join(lines)
    return (
        f"{lead}\n\n```python\n{body}\n```\n\nThis function takes the given input and returns the result.\n\n{CLOSING}"
    )


def prompt_of(row: Row) -> str:
    return str(row["messages"][0]["content"]).strip()


def example(row: Row, question: str, answer: str, group: str) -> Row:
    return {
        "group": group,
        "source": row["source"],
        "license": row["license"],
        "question": question,
        "answer": answer,
    }


def math_examples(rows: list[Row], rng: random.Random, variants: int) -> list[Row]:
    """The problems as published, and rewrites of each with other numbers in the same group."""
    out = []
    for row in rows:
        question = prompt_of(row)
        problem = question.removesuffix(BOXED_REQUEST).rstrip()
        out.append(example(row, question, boxed_answer(row["reference"]), row["id"]))
        for new_problem, new_reference in rewrites(problem, row["reference"], rng, variants, 6 * variants):
            new_question = f"{new_problem}\n{BOXED_REQUEST}"
            out.append(example(row, new_question, boxed_answer(new_reference), row["id"]))
    return out


def code_examples(rows: list[Row]) -> list[Row]:
    """The lead sentence follows from the prompt, so that equal prompts get equal answers."""
    return [
        example(row, prompt_of(row), code_answer(row["reference"], CODE_LEADS[len(prompt_of(row)) % 3]), row["id"])
        for row in rows
    ]


def shipped(row: Row) -> Row:
    """A prompt row as it is shipped: no reference, no extra fields."""
    return {
        "id": row["id"],
        "source": row["source"],
        "license": row["license"],
        "messages": [{"role": "user", "content": prompt_of(row)}],
    }


def load(folder: Path, name: str, rng: random.Random) -> list[Row]:
    """One source, shuffled; rows with a special token or an overlong prompt are dropped."""
    rows = [
        row
        for row in read_rows(folder / f"{name}.jsonl")
        if len(prompt_of(row)) <= LONGEST_PROMPT
        and not any(token in prompt_of(row) + str(row.get("reference", "")) for token in SPECIAL_TOKENS)
    ]
    rng.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and bench/")
    parser.add_argument("--out", type=Path, required=True, help="corpus folder to write")
    parser.add_argument("--prompts", type=Path, help="folder for the shipped prompt files")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--variants", type=int, default=6, help="number rewrites of each maths problem")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    train, bench = args.data / "train", args.data / "bench"

    maths, code = load(train, "gsm8k-train", rng), load(train, "mbpp-train", rng)
    bench_maths, bench_code = load(bench, "gsm8k", rng), load(bench, "mbpp", rng)
    general = {name: load(train, name, rng) for name in GENERAL}
    # Held-out general prompts: short everyday requests, which is what the demo shows.
    demo_general = [row for name in ("oasst-prompts", "self-instruct-user") for row in general[name][:4]]
    val_general = [row for name in GENERAL for row in general[name][4:14]]
    train_general = [row for name in GENERAL for row in general[name][14:]]

    write_rows(args.out / "train.jsonl", math_examples(maths[200:], rng, args.variants) + code_examples(code[20:]))
    write_rows(args.out / "val.jsonl", math_examples(maths[:200], rng, 0) + code_examples(code[:20]))
    write_rows(args.out / "test.jsonl", math_examples(bench_maths, rng, 0) + code_examples(bench_code))
    splits = ((train_general, "train"), (val_general, "val"), (demo_general, "test"))
    ask = [{**shipped(row), "split": split} for rows, split in splits for row in rows]
    write_rows(args.out / "ask.jsonl", ask)
    print(f"{len(maths)} maths, {len(code)} code, {len(ask)} prompts to ask")

    if args.prompts is not None:
        heldout = [*bench_maths[:32], *bench_code[:8], *demo_general]
        everyday = [row for row in train_general if row["source"] != "arena-hard-v0.1"]
        drafter = [*maths[200:1400], *code[20:170], *rng.sample(everyday, 150)]
        rng.shuffle(drafter)
        write_rows(args.prompts / "prompts_heldout.jsonl", map(shipped, heldout))
        write_rows(args.prompts / "prompts_train.jsonl", map(shipped, drafter))


if __name__ == "__main__":
    main()
