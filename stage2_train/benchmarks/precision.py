"""Does a drafter trained from an 8-bit store accept as much as one trained from the bf16 store?

    python -m stage2_train.benchmarks.precision --target T --rows ROWS --bench gsm8k.jsonl,mbpp.jsonl --out OUT

Extracts one store per precision from the same rows, trains both with the same seeds, orders and first weights, decodes
the same held-out prompts, and compares pairwise: acceptance length per seed, their ratio, a bootstrap interval over
prompts and a t interval over seeds. Runs the `dflash` commands; every step that is done already is not done again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from stage2_train.benchmarks.comparison import bootstrap_ratio, places, pooled, read_counts, run_all, seed_interval

PRECISIONS = ("bfloat16", "int8")


@click.command()
@click.option("--target", required=True, help="Model: folder, GGUF folder or Hub id.")
@click.option("--rows", required=True, type=click.Path(path_type=Path), help="Folder made by `dflash prepare`.")
@click.option("--bench", required=True, help="Held-out prompt files, comma-separated.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for stores, runs and logs.")
@click.option("--seeds", default="0,1,2", show_default=True, help="Training seeds, comma-separated.")
@click.option("--steps", default=600, show_default=True)
@click.option("--limit", default=128, show_default=True, help="Prompts per bench file.")
@click.option("--max-new-tokens", default=256, show_default=True)
@click.option("--shards", default=4, show_default=True, help="Extraction processes per store.")
@click.option("--parallel", default=6, show_default=True, help="Trainings or evaluations at once on this machine.")
@click.option("--train", "train_options", default="", help="Further options of `dflash train`, as one text.")
@click.option("--extract", "extract_options", default="--topk 16", show_default=True)
@click.option("--evaluate", "eval_options", default="--batch-size 128", show_default=True)
def main(
    target: str,
    rows: Path,
    bench: str,
    out: Path,
    seeds: str,
    steps: int,
    limit: int,
    max_new_tokens: int,
    shards: int,
    parallel: int,
    train_options: str,
    extract_options: str,
    eval_options: str,
) -> None:
    """Compare drafters trained from a bf16 and from an int8 store of the same rows."""
    chosen = [int(seed) for seed in seeds.split(",")]
    store: Callable[[str], Path] = lambda precision: out / f"{precision}.zarr"  # noqa: E731
    run: Callable[[str, int], Path] = lambda precision, seed: out / f"{precision}-seed{seed}"  # noqa: E731
    arms = [(precision, seed) for seed in chosen for precision in PRECISIONS]
    click.echo("extract")
    run_all(
        {
            out / "logs" / f"extract-{precision}.log": [
                *("extract", "--target", target, "--data", str(rows), "--out", str(store(precision))),
                *("--precision", precision, "--shards", str(shards), *extract_options.split()),
            ]
            for precision in PRECISIONS
        },
        places(0, len(PRECISIONS)),
    )
    click.echo("train")
    run_all(
        {
            out / "logs" / f"train-{precision}-{seed}.log": [
                *("train", "--store", str(store(precision)), "--run", str(run(precision, seed)), "--seed", str(seed)),
                *("--steps", str(steps), *train_options.split()),
            ]
            for precision, seed in arms
        },
        places(0, parallel),
    )
    click.echo("decode")
    run_all(
        {
            out / "logs" / f"eval-{precision}-{seed}.log": [
                *("eval", "--run", str(run(precision, seed)), "--target", target, "--data", bench),
                *("--limit", str(limit), "--max-new-tokens", str(max_new_tokens)),
                *("--no-check", "--timed-prompts", "0", *eval_options.split()),
            ]
            for precision, seed in arms
        },
        places(0, parallel),
    )
    report(out, {seed: (run("bfloat16", seed), run("int8", seed)) for seed in chosen})


def report(out: Path, runs: Mapping[int, tuple[Path, Path]]) -> None:
    """Print the table and write it to OUT/precision.json."""
    pairs = [(read_counts(first), read_counts(second)) for first, second in runs.values()]
    ratios = [pooled(second) / pooled(first) for first, second in pairs]
    click.echo("\nseed  bf16    int8    int8/bf16")
    for seed, (first, second), ratio in zip(runs, pairs, ratios, strict=True):
        click.echo(f"{seed:>4}  {pooled(first):.4f}  {pooled(second):.4f}  {ratio:.4f}")
    over_prompts, over_seeds = bootstrap_ratio(pairs), seed_interval(ratios)
    click.echo(f"mean ratio {statistics.mean(ratios):.4f} over {len(pairs)} seeds and {len(pairs[0][0])} prompts")
    click.echo(f"95 % over prompts (bootstrap) {over_prompts[0]:.4f} .. {over_prompts[1]:.4f}")
    click.echo(f"95 % over seeds (Student's t)  {over_seeds[0]:.4f} .. {over_seeds[1]:.4f}")
    between = [pooled(first) for first, _ in pairs]
    if len(between) > 1:
        spread = statistics.stdev(between) / statistics.mean(between)
        click.echo(f"for scale: the bf16 seeds differ from each other by {100 * spread:.2f} % (standard deviation)")
    sizes = {
        precision: sum(p.stat().st_size for p in (out / f"{precision}.zarr" / "blocks").rglob("*") if p.is_file())
        for precision in PRECISIONS
    }
    click.echo(
        f"bytes: bf16 {sizes['bfloat16']:,}, int8 {sizes['int8']:,}, ratio {sizes['int8'] / sizes['bfloat16']:.4f}"
    )
    result = {"ratios": ratios, "over_prompts": over_prompts, "over_seeds": over_seeds, "bytes": sizes}
    (out / "precision.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
