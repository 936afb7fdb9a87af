"""Which objective trains the drafter that is accepted most? Every arm and seed trained and decoded for real.

    python -m stage2_train.benchmarks.objectives --store S --target T --bench gsm8k.jsonl,mbpp.jsonl --out OUT \
        --arms ce-decay,ce-dpace,kl-decay,mixed-decay --seeds 0,1,2 --steps 600 --gpus 1 --per-gpu 6

An arm is LOSS-WEIGHTING, with -teacher for labels from the teacher, or NAME=OPTIONS by --more-arms. All arms share
store, steps, orders, anchors and first weights of a seed. What is done already is not done again, so the same command
continues after an interruption. Prints acceptance length per arm and seed, ratios to the first arm with a
paired bootstrap interval over prompts and a t interval over seeds, and the winner.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from manifests.commit import latest, read
from shared.benchmarks.measure import table
from shared.config import knob, options_of
from shared.errors import ConfigRefused
from shared.progress import tell
from stage2_train.benchmarks.comparison import (
    Counts,
    bootstrap_ratio,
    places,
    pooled,
    read_counts,
    read_reports,
    run_all,
    seed_interval,
)

Runs = Mapping[str, Mapping[int, Path]]


def options_of_arm(text: str) -> tuple[str, list[str]]:
    """Name and `dflash train` options of an arm: "NAME=OPTIONS", or LOSS-WEIGHTING[-teacher]."""
    name, given, options = text.partition("=")
    if given:
        return name.strip(), options.split()
    loss, *rest = name.strip().split("-")
    if not rest or rest[1:] not in ([], ["teacher"]):
        raise ConfigRefused(f"arm {text!r} is neither LOSS-WEIGHTING[-teacher] nor NAME=OPTIONS")
    labels = ["--labels", "teacher"] if rest[1:] else []
    return name.strip(), ["--loss", loss, "--weighting", rest[0], *labels]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectivesConfig:
    """Settings of the comparison."""

    store: str = knob(help="Teacher store; kl, mixed and teacher labels need one with --topk.")
    target: str = knob(help="Model: folder, GGUF folder or Hub id.")
    bench: str = knob(help="Held-out prompt files, comma-separated.")
    out: Path = knob(help="Folder for runs and logs.")
    arms: tuple[str, ...] = knob(
        ("ce-decay", "ce-dpace", "kl-decay", "kl-dpace", "mixed-decay", "ce-uniform"),
        help="LOSS-WEIGHTING, with -teacher for labels from the teacher; the first is what others are compared to.",
    )
    more_arms: str | None = knob(None, help="Further ones as NAME=OPTIONS of `dflash train`, separated by semicolons.")
    seeds: tuple[int, ...] = knob((0, 1, 2), help="Training seeds.")
    steps: int = knob(600, help="Of every training.")
    limit: int = knob(128, help="Prompts per bench file.")
    max_new_tokens: int = knob(256, help="Tokens a decoded text may have.")
    gpus: int = knob(0, help="GPUs to spread over; 0: none.")
    per_gpu: int = knob(6, help="Trainings or evaluations at once on each.")
    budget_s: float | None = knob(None, help="Stop after so many seconds; the same command then continues.")
    train: str | None = knob(None, help="Options of `dflash train` for all arms, as one text.")
    evaluate: str = knob("--batch-size 128", help="Options of `dflash eval`, as one text.")

    def chosen(self) -> dict[str, list[str]]:
        """Arms by name. Raises ConfigRefused."""
        more = filter(str.strip, (self.more_arms or "").split(";"))
        return dict(options_of_arm(text) for text in [*self.arms, *more])

    def trainings(self) -> dict[tuple[str, int], list[str]]:
        """The `dflash` command of every arm and seed."""
        common = ["train", "--store", self.store, "--steps", str(self.steps), *(self.train or "").split()]
        return {
            (name, seed): [*common, "--run", str(self.run(name, seed)), "--seed", str(seed), *options]
            for name, options in self.chosen().items()
            for seed in self.seeds
        }

    def run(self, name: str, seed: int) -> Path:
        """The run folder of an arm and seed."""
        return self.out / f"{name}-seed{seed}"


@click.command()
@options_of(ObjectivesConfig)
def main(config: ObjectivesConfig) -> None:
    """Compare objectives by the acceptance length of the drafters they train."""
    trainings, where = config.trainings(), places(config.gpus, config.per_gpu)
    deadline = None if config.budget_s is None else time.monotonic() + config.budget_s
    tell(f"train {len(trainings)} drafters of {config.steps} steps, {len(where)} at once")
    logs = {config.out / "logs" / f"train-{name}-{seed}.log": options for (name, seed), options in trainings.items()}
    run_all(logs, where, deadline=deadline)
    tell("decode")
    evaluations, trained_by = {}, {}
    for (name, seed), training in trainings.items():
        log = config.out / "logs" / f"eval-{name}-{seed}.log"
        evaluations[log] = [
            *("eval", "--run", str(config.run(name, seed)), "--target", config.target, "--data", config.bench),
            *("--limit", str(config.limit), "--max-new-tokens", str(config.max_new_tokens)),
            *("--no-check", "--timed-prompts", "0", *config.evaluate.split()),
        ]
        trained_by[log] = " ".join(training)
    run_all(evaluations, where, trained_by, deadline)
    chosen = config.chosen()
    report(config.out, {name: {seed: config.run(name, seed) for seed in config.seeds} for name in chosen}, chosen)


def report(out: Path, runs: Runs, options: Mapping[str, Sequence[str]]) -> None:
    """Print the tables and the winner, and write them to OUT/objectives.json."""
    require_same_prompts([run for of_arm in runs.values() for run in of_arm.values()])
    counts = {name: {seed: read_counts(run) for seed, run in of_arm.items()} for name, of_arm in runs.items()}
    lengths = {name: [pooled(found) for found in of_arm.values()] for name, of_arm in counts.items()}
    estimates = {name: [_estimate(run) for run in of_arm.values()] for name, of_arm in runs.items()}
    first = next(iter(runs))
    seeds, prompts = list(counts[first]), len(next(iter(counts[first].values())))
    rows: list[dict[str, Any]] = []
    for name in sorted(lengths, key=lambda name: -statistics.mean(lengths[name])):
        compared = against(counts[name], counts[first])
        rows.append(
            {
                "arm": name,
                **{f"seed {seed}": f"{length:.4f}" for seed, length in zip(seeds, lengths[name], strict=True)},
                "mean": f"{statistics.mean(lengths[name]):.4f}",
                "95 % over seeds": _interval(seed_interval(lengths[name])),
                "estimate": f"{statistics.mean(estimates[name]):.3f}",
                f"/ {first}": f"{compared['ratio']:.4f}",
                "over prompts": _interval(compared["over_prompts"]),
                "over seeds": _interval(compared["over_seeds"]),
            }
        )
    tell(table(f"acceptance length by decoding, {prompts} prompts, {len(seeds)} seeds", rows))
    tell("  estimate: the last held-out estimate of the training; the two intervals on the right are of the ratio")
    verdict = winner(counts)
    tell(f"\n{verdict['sentence']}")
    kept = {"arms": dict(options), "lengths": lengths, "estimates": estimates, "winner": verdict, "table": rows}
    (out / "objectives.json").write_text(json.dumps(kept, indent=2))


def against(arm: Mapping[int, Counts], base: Mapping[int, Counts]) -> dict[str, Any]:
    """Mean over seeds of the arm's acceptance length relative to another's, with both 95 % intervals."""
    pairs = [(base[seed], arm[seed]) for seed in arm]
    ratios = [pooled(second) / pooled(first) for first, second in pairs]
    return {
        "ratio": statistics.mean(ratios),
        "over_prompts": bootstrap_ratio(pairs),
        "over_seeds": seed_interval(ratios),
    }


def winner(counts: Mapping[str, Mapping[int, Counts]]) -> dict[str, Any]:
    """The arm with the highest mean acceptance length, and whether its lead over the second is beyond chance.

    Intervals are of one comparison each: the best of many arms is a little flattered by being chosen.
    """
    means = {name: statistics.mean(pooled(found) for found in of_arm.values()) for name, of_arm in counts.items()}
    best, *others = sorted(means, key=lambda name: -means[name])
    if not others:
        return {"name": best, "sentence": f"only one arm: {best}, {means[best]:.4f}"}
    lead = against(counts[best], counts[others[0]])
    sure = [kind for kind in ("prompts", "seeds") if lead[f"over_{kind}"][0] > 1]
    beyond = f"beyond chance over {' and '.join(sure)}" if sure else "not beyond chance"
    sentence = (
        f"winner {best}, {means[best]:.4f}; {others[0]} {means[others[0]]:.4f}; ratio {lead['ratio']:.4f}, 95 % over "
        f"prompts {_interval(lead['over_prompts'])}, over seeds {_interval(lead['over_seeds'])}: {beyond}"
    )
    return {"name": best, "second": others[0], **lead, "sentence": sentence}


def require_same_prompts(runs: Sequence[Path]) -> None:
    """Raise SystemExit unless all runs were decoded on the same prompts: the comparison is pair by pair."""
    expected = None
    for run in runs:
        found = [(report["name"], text["id"]) for report in read_reports(run) for text in report["results"]]
        expected = found if expected is None else expected
        if found != expected or not found:
            raise SystemExit(f"{run} was decoded on {len(found)} prompts that are not those of {runs[0]}")


def _estimate(run: Path) -> float:
    """The last held-out acceptance estimate of a training; NaN when the store has no held-out document."""
    named = ("heldout", "acceptance_length_estimate")
    found = latest((r for r in read(run, "metrics") if (r["split"], r["name"]) == named), "global_step")
    return float(found[max(found)]["value"]) if found else float("nan")


def _interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.4f}..{pair[1]:.4f}"


if __name__ == "__main__":
    main()
