"""The figures of one evaluated file: report dict, manifest record, screen tables.

Called by stage2_train.evaluate. The definitions of the figures are in acceptance.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manifests.records import EvaluationRecord
from shared.config import to_dict
from shared.errors import NothingLeft
from shared.progress import summary, tell
from shared.target import Target
from stage2_train.acceptance import (
    acceptance_length,
    acceptance_length_macro,
    acceptance_per_position,
    bootstrap_interval,
    mean_cycles,
)
from stage2_train.config_eval import EvalConfig
from stage2_train.decode import Decoded, DecodeSettings
from stage2_train.drafter import Drafter
from stage2_train.lossless import Difference, tie_tolerance
from stage2_train.prompts import PromptSet
from stage2_train.subject import Subject

DEFINITION = (
    "tokens kept after the prefill's token / verification cycles, pooled over prompts; the target's own token of each "
    "cycle counts, tokens after an end-of-sequence token or beyond max_new_tokens do not"
)


@dataclass(frozen=True, slots=True)
class Work:
    """Everything a data file is evaluated with; `rows` prompts are decoded together."""

    config: EvalConfig
    subject: Subject
    target: Target
    drafter: Drafter
    settings: DecodeSettings
    rows: int

    @property
    def drafts(self) -> int:
        """Tokens drafted in a cycle."""
        return self.settings.block_size - self.drafter.config.first_draft


@dataclass(slots=True)
class Outcome:
    """What decoding one file gave: texts in the order of its prompts, the first `checked` of them compared."""

    checked: int
    texts: list[Decoded] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    speed: dict[str, Any] = field(default_factory=dict)


def build_report(work: Work, prompts: PromptSet, outcome: Outcome) -> dict[str, Any]:
    """All figures of one file as JSON values. Raises NothingLeft when no text had a second token."""
    cycles = [text.cycles for text in outcome.texts]
    length = acceptance_length(cycles)
    if length is None:
        raise NothingLeft(
            f"{prompts.path}: every text of {len(cycles)} prompts ended with its first token, so no cycle was run; "
            "use a larger --max-new-tokens or other prompts"
        )
    plain, conditional = acceptance_per_position(cycles, work.drafts)
    interval = bootstrap_interval(cycles, seed=work.settings.seed)
    subject = work.subject
    return {
        "name": evaluation_name(work, prompts),
        "data": str(prompts.path),
        "time": time.time(),
        "checkpoint": str(subject.checkpoint),
        "global_step": subject.global_step,
        "untrained": subject.untrained,
        "target": subject.target_identity,
        "config": to_dict(work.config),
        "decoding": {
            "block_size": work.settings.block_size,
            "drafts": work.drafts,
            "batch_size": work.rows,
            "dtype": str(work.target.dtype),
            "device": str(work.target.device),
            "eos_token_ids": sorted(work.settings.eos_token_ids),
        },
        "definition": DEFINITION,
        "prompts": len(prompts.prompts),
        "skipped": dict(prompts.skipped),
        "notes": dict(prompts.notes),
        "acceptance_length": length,
        "acceptance_length_interval": None if interval is None else asdict(interval),
        "acceptance_length_macro": acceptance_length_macro(cycles),
        "acceptance_per_position": plain,
        "acceptance_per_position_given_previous": conditional,
        "mean_cycles": mean_cycles(cycles),
        "mean_new_tokens": sum(len(text.tokens) for text in outcome.texts) / len(outcome.texts),
        "ended_by_eos": sum(text.ended_by_eos for text in outcome.texts) / len(outcome.texts),
        **outcome.speed,
        "check": _check(work, outcome),
        "results": [
            {
                "id": prompt.id,
                "prompt_tokens": len(prompt.ids),
                "new_tokens": len(text.tokens),
                "ended_by_eos": text.ended_by_eos,
                "accepted": [cycle.accepted for cycle in text.cycles],
                "kept": [cycle.kept for cycle in text.cycles],
            }
            for prompt, text in zip(prompts.prompts, outcome.texts, strict=True)
        ],
    }


def evaluation_name(work: Work, prompts: PromptSet) -> str:
    """The data file's name, with what differs from greedy decoding at the trained block size."""
    name = prompts.name
    if work.settings.block_size != work.drafter.config.block_size:
        name += f"-b{work.settings.block_size}"
    return name if work.settings.temperature == 0 else f"{name}-t{work.settings.temperature:g}"


def _check(work: Work, outcome: Outcome) -> dict[str, Any] | None:
    if not outcome.checked:
        return None
    ties = [asdict(difference) for difference in outcome.differences if difference.tie]
    mismatches = [asdict(difference) for difference in outcome.differences if not difference.tie]
    return {
        "prompts": outcome.checked,
        "equal": outcome.checked - len(outcome.differences),
        "ties": ties,
        "mismatches": mismatches,
        "tie_tolerance": tie_tolerance(work.target.dtype, work.config.tie_tolerance),
    }


def report_file(subject: Subject, name: str) -> Path:
    """Where the report of one evaluation lies; evaluating the same step again replaces it."""
    step = "untrained" if subject.untrained else f"step-{subject.global_step:08d}"
    return subject.out / "evaluations" / f"{name}-{step}.json"


def record_of(report: dict[str, Any], run_id: str, path: str) -> EvaluationRecord:
    """The manifest's line for a report."""
    interval, check = report["acceptance_length_interval"] or {}, report["check"]
    kept = ("untrained", "acceptance_length_macro", "speedup", "ended_by_eos", "mean_cycles", "skipped", "decoding")
    detail = {name: report[name] for name in (*kept, "data")}
    return EvaluationRecord(
        run_id=run_id,
        name=report["name"],
        global_step=report["global_step"],
        prompts=report["prompts"],
        acceptance_length=report["acceptance_length"],
        acceptance_length_low=interval.get("low"),
        acceptance_length_high=interval.get("high"),
        tokens_per_second=report["tokens_per_second"],
        plain_tokens_per_second=report["plain_tokens_per_second"],
        mismatches=None if check is None else len(check["mismatches"]),
        ties=None if check is None else len(check["ties"]),
        path=path,
        detail=detail,
    )


def show(reports: Sequence[dict[str, Any]], subject: Subject, *, as_json: bool) -> None:
    """Print the tables and the closing block, or one JSON object for each file's figures (without the prompts)."""
    if as_json:
        tell(json.dumps([{k: v for k, v in report.items() if k != "results"} for report in reports], indent=2))
        return
    from rich.console import Console

    console = Console() if Console().is_terminal else Console(width=140)
    with console.capture() as captured:
        console.print(_table(reports))
        console.print(_positions(reports))
    tell(captured.get().rstrip("\n"))
    for report in reports:
        check = report["check"] or {"ties": [], "mismatches": []}
        for item in [*check["mismatches"], *check["ties"]]:
            tell(f"{report['name']}: {Difference(**item).sentence()}")
        for what, count in {**report["skipped"], **report["notes"]}.items():
            tell(f"{report['name']}: {count} prompts {what.replace('_', ' ')}")
    drafter = f"{subject.checkpoint} (step {subject.global_step})"
    if subject.untrained:
        drafter = f"first weights of the run of {subject.checkpoint}"
    summary(
        "evaluated",
        [
            ("drafter", drafter),
            ("target", subject.target),
            ("acceptance length", "tokens per target step, the target's own token counted; 1 = nothing gained"),
            ("reports", subject.out / "evaluations"),
        ],
    )


def _table(reports: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    numbers = ("prompts", "accepted", "95 %", "per prompt", "cycles", "tokens", "ended", "tok/s", "plain", "speed-up")
    table = Table("data", *(_right(name) for name in numbers), "greedy text")
    for report in reports:
        interval = report["acceptance_length_interval"]
        table.add_row(
            report["name"],
            str(report["prompts"]),
            f"[bold]{report['acceptance_length']:.3f}",
            "-" if interval is None else f"{interval['low']:.2f}-{interval['high']:.2f}",
            f"{report['acceptance_length_macro']:.3f}",
            f"{report['mean_cycles']:.1f}",
            f"{report['mean_new_tokens']:.1f}",
            f"{report['ended_by_eos']:.0%}",
            _number(report["tokens_per_second"], ".1f"),
            _number(report["plain_tokens_per_second"], ".1f"),
            _number(report["speedup"], ".2f"),
            _verdict(report["check"]),
        )
    return table


def _positions(reports: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    drafts = max(len(report["acceptance_per_position"]) for report in reports)
    table = Table("P(draft accepted)", *(_right(str(draft)) for draft in range(1, drafts + 1)))
    for report in reports:
        shares = report["acceptance_per_position"]
        table.add_row(report["name"], *(_number(share, ".2f").removeprefix("0") for share in shares))
    return table


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _verdict(check: dict[str, Any] | None) -> str:
    if check is None:
        return "not compared"
    if check["mismatches"]:
        return f"[red]{len(check['mismatches'])} of {check['prompts']} DIFFER"
    ties = f", {len(check['ties'])} ties" if check["ties"] else ""
    return f"{check['equal']} of {check['prompts']} equal{ties}"
