"""Comparing trainings by real decoding: many `dflash` commands at once, acceptance length, paired intervals.

Used by precision.py and objectives.py. No torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

from shared.errors import Interrupted

# Two-sided 95 % points of Student's t for 1..9 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Counts = np.ndarray[Any, Any]


def counts_of(report: Mapping[str, Any]) -> Counts:
    """[prompts, 2] of one evaluation report: tokens kept by verify cycles, cycles."""
    return np.asarray([[sum(text["kept"]), len(text["kept"])] for text in report["results"]], dtype=np.float64)


def pooled(counts: Counts) -> float:
    """Acceptance length over prompts: tokens / cycles."""
    return float(counts[..., 0].sum() / counts[..., 1].sum())


def bootstrap_ratio(pairs: Sequence[tuple[Counts, Counts]], draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over seeds of the ratio second / first, over prompts drawn again.

    One draw takes the same prompts for both arms and all seeds, since they were decoded from the same ones.
    """
    rng = np.random.default_rng(seed)
    prompts = len(pairs[0][0])
    drawn = []
    for _ in range(draws):
        chosen = rng.integers(0, prompts, prompts)
        drawn.append(np.mean([pooled(second[chosen]) / pooled(first[chosen]) for first, second in pairs]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % t interval of the mean over seeds; unbounded for a single seed."""
    if len(values) < 2:
        return float("-inf"), float("inf")
    half = _T95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def places(gpus: int, per_gpu: int) -> list[dict[str, str]]:
    """Environments of the commands that run side by side: `per_gpu` on each of the first `gpus` visible GPUs.

    With no GPU, `per_gpu` commands share the machine as it is.
    """
    if gpus == 0:
        return [{} for _ in range(per_gpu)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:gpus] if visible else [str(number) for number in range(gpus)]
    return [{"CUDA_VISIBLE_DEVICES": name} for _, name in itertools.product(range(per_gpu), names)]


def run_all(
    jobs: Mapping[Path, Sequence[str]],
    where: Sequence[Mapping[str, str]],
    basis: Mapping[Path, str] | None = None,
    deadline: float | None = None,
) -> None:
    """Run `dflash` commands, as many at a time as there are places, each into its log.

    A command that ended well before is not run again: its mark lies beside its log, and names what `basis` says for
    that log. At the `deadline` (time.monotonic) what runs is asked to stop, and a training then saves where it is.
    A command that fails is run once more, and continues where it saved: of trainings that share a GPU eight at a time
    one in five died of "unspecified launch failure". The log of the first try stays, named .first-try.
    Raises SystemExit after the others have ended, naming a command that failed, or saying that time was up.
    """
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for place in where:
        free.put(place)

    def one(item: tuple[Path, Sequence[str]]) -> tuple[Path, int, float]:
        log, arguments = item
        mark, print_of = log.with_suffix(".done"), _print_of((basis or {}).get(log, ""), arguments)
        if mark.exists() and mark.read_text() == print_of:
            return log, 0, 0.0
        place = free.get()
        started = time.monotonic()
        try:
            code = _command(log, arguments, place, deadline)
            if code not in (0, Interrupted.exit_code):
                log.replace(log.with_suffix(".first-try"))
                click.echo(f"  {log.stem}: exit {code} after {time.monotonic() - started:.0f} s, tried once more")
                code = _command(log, arguments, place, deadline)
        finally:
            free.put(place)
        if code == 0:
            mark.write_text(print_of)
        return log, code, time.monotonic() - started

    with ThreadPoolExecutor(len(where)) as pool:
        ended = []
        for log, code, seconds in pool.map(one, jobs.items()):
            ended.append((log, code))
            click.echo(f"  {log.stem}: " + (f"exit {code}, {seconds:.0f} s" if seconds or code else "done before"))
    failed = [(log, code) for log, code in ended if code not in (0, Interrupted.exit_code)]
    if failed:
        log, code = failed[0]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise SystemExit(f"{len(failed)} commands failed; {log} ended with {code}:\n{tail}")
    if unfinished := sum(code != 0 for _, code in ended):
        raise SystemExit(f"time is up with {unfinished} commands unfinished; the same command continues")


def _print_of(basis: str, arguments: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([basis, *arguments]).encode()).hexdigest()


def _command(log: Path, arguments: Sequence[str], place: Mapping[str, str], deadline: float | None) -> int:
    """Exit code of one command; that of an interruption when its time was up before or while it ran."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        return Interrupted.exit_code
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "shared", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **place},
        )
        try:
            return process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()
            # What ends by the signal itself (an evaluation has nothing to save) is as interrupted as what says so.
            return process.wait() and Interrupted.exit_code


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """A run's evaluation reports, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("evaluations/*.json"))]


def read_counts(folder: Path) -> Counts:
    """`counts_of` over all prompts of a run's evaluations, file after file."""
    return np.concatenate([counts_of(report) for report in read_reports(folder)])
