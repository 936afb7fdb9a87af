"""Play the fault matrix and print its score sheet: `python tests/fault_matrix.py --seeds 20`.

Each row is one fault in one phase: how often it was played, the right name, the names given, and the longest times from
the fault to its event and to its verdict. `--mutations` takes each source of evidence away from what the runs left and
prints what is then said. The scenarios are in fault_scenarios.py, how one is played in fault_run.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from fault_hosts import why_not
from fault_marks import Result, marks
from fault_mutations import Mutated, mutate, table
from fault_run import Scenario, made_ready, staged
from fault_scenarios import BY_NAME, SCENARIOS

from shared.phases import SCALE_VARIABLE
from shared.progress import tell


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    os.environ.pop(SCALE_VARIABLE, None)  # each scenario has its own
    chosen = [s for s in SCENARIOS if not options.only or any(part in s.name for part in options.only)]
    seeds = range(options.seed, options.seed + options.seeds)
    jobs = [Job(*case, seed) for case in _cases(chosen, options.phases, options.quick) for seed in seeds]
    begun = time.monotonic()
    played = _kept(options.results)
    todo = [job for job in jobs if job not in played]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for job, (result, changed) in zip(todo, pool.map(partial(_play, options=options), todo), strict=True):
            played[job] = result, changed
            _keep(options.results, result, changed)
            if result.wrong:
                tell(f"WRONG  {job.scenario} / {job.phase} / seed {job.seed}: {'; '.join(result.wrong)}")
            if options.verbose and job.seed == seeds[-1]:
                tell(row([played[one][0] for one in jobs if one[:2] == job[:2]]))
    results = [played[job][0] for job in jobs]
    mutated = [change for job in jobs for change in played[job][1]]
    tell(sheet(results))
    for scenario in chosen:
        if reason := why_not(scenario.needs):
            tell(f"not played: {scenario.name}: {reason}")
    if options.mutations:
        tell(table(mutated))
    wrong = sum(not result.right for result in results) + sum(not change.allowed for change in mutated)
    tell(f"{len(results)} runs, {len(todo)} of them in {time.monotonic() - begun:,.0f} s now; {wrong} wrong")
    return 1 if wrong else 0


class Job(NamedTuple):
    """One run to play."""

    scenario: str
    phase: str
    seed: int


def _kept(path: Path | None) -> dict[Job, tuple[Result, list[Mutated]]]:
    """What an earlier command played and wrote down."""
    if path is None or not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        tuples = {name: tuple(values["result"][name]) for name in ("ranks", "wrong")}
        result = Result(**{**values["result"], **tuples})
        changed = [Mutated(**change) for change in values["mutated"]]
        found[Job(result.scenario, result.phase, result.seed)] = result, changed
    return found


def _keep(path: Path | None, result: Result, changed: Sequence[Mutated]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"result": asdict(result), "mutated": [asdict(change) for change in changed]}) + "\n")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how often each fault is played in each phase")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", action="append", help="scenarios whose name has this in it; may be repeated")
    parser.add_argument("--phases", type=lambda text: text.split(","), help="load,compile,step,checkpoint")
    parser.add_argument("--quick", action="store_true", help="what `make test` plays")
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at a time")
    parser.add_argument("--mutations", action="store_true", help="take evidence away too")
    parser.add_argument("--keep", type=Path, help="keep the run folders of wrong answers here")
    parser.add_argument("--results", type=Path, help="write each result here too; a command that was killed goes on")
    parser.add_argument("--verbose", action="store_true", help="print each row when it is there")
    return parser.parse_args(arguments)


def _cases(chosen: Sequence[Scenario], phases: Sequence[str] | None, quick: bool) -> Iterator[tuple[str, str]]:
    for scenario in chosen:
        if why_not(scenario.needs) or (quick and not scenario.quick):
            continue
        for phase in [quick_phase(scenario)] if quick else scenario.phases:
            if phases is None or phase in phases or len(scenario.phases) == 1:
                yield scenario.name, phase


def quick_phase(scenario: Scenario) -> str:
    """The one phase that `make test` plays: not always the same one, but always where a hang is found soon."""
    soon = [phase for phase in scenario.phases if phase != "compile" or not scenario.name.startswith(_HANGS)]
    return soon[sum(map(ord, scenario.name)) % len(soon)]


_HANGS = ("GIL", "wait", "busy", "SIGSTOP")


def _play(job: Job, options: argparse.Namespace) -> tuple[Result, list[Mutated]]:
    name, phase, seed = job
    scenario = BY_NAME[name]
    folder = Path(tempfile.mkdtemp(prefix="dflash-fault-"))
    changed: list[Mutated] = []
    try:
        with staged(scenario, phase, seed, folder / "run") as live:
            result = marks(live, phase, seed)
            if options.mutations:
                changed = mutate(live, phase, seed)
            if options.keep and (result.wrong or not all(change.allowed for change in changed)):
                kept = options.keep / f"{name}-{phase}-{seed}".replace(" ", "_").replace("/", "_")
                shutil.copytree(
                    folder / "run", kept, ignore=shutil.ignore_patterns("pipe-*", "ballast"), dirs_exist_ok=True
                )
    except Exception:  # noqa: BLE001 - one scenario that cannot be played must not end the others
        ready = made_ready(scenario, phase, seed, folder / "run")
        trace = (traceback.format_exc(limit=-4),)
        expected = ready.scenario.expect.code
        nothing = {"named": "(not played)", "ranks": (), "confidence": "", "event_s": None, "verdict_s": None}
        result = Result(scenario=name, phase=phase, seed=seed, expected=expected, wrong=trace, **nothing)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result, changed


HEAD = ("scenario", "phase", "seeds", "expected", "named", "right", "event s", "verdict s")
WIDTHS = (48, 10, 5, 20, 44, 7, 8, 9)


def sheet(results: Sequence[Result]) -> str:
    """The score sheet: a row per scenario and phase, the slowest of all seeds, and the sum."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.scenario, result.phase), []).append(result)
    right = sum(result.right for result in results)
    total = f"named correctly: {right} of {len(results)} ({right / max(1, len(results)):.1%})"
    return "\n".join([_line(HEAD), _line(["-" * (width - 1) for width in WIDTHS]), *map(row, rows.values()), "", total])


def row(results: Sequence[Result]) -> str:
    """One fault in one phase."""
    first = results[0]
    names = Counter(f"{result.named} ({result.confidence})" for result in results)
    said = ", ".join(f"{name} x{count}" if len(names) > 1 else name for name, count in names.most_common())
    right = sum(result.right for result in results)
    return _line(
        [
            first.scenario,
            first.phase,
            str(len(results)),
            first.expected,
            said,
            "right" if right == len(results) else f"{right}/{len(results)}",
            _slowest([result.event_s for result in results]),
            _slowest([result.verdict_s for result in results]),
        ]
    )


def _slowest(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{max(known):.2f}" if known else "-"


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
