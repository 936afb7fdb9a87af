"""`python -m manifests.benchmarks.supervision`: what it costs to be watched.

Two prices: what a worker pays for each report and each sign of life, and what the supervisor takes of the host while it
watches so many workers: its share of a core, its memory, one sample. The workers here do nothing but report, a
hundred times a second; the watched loop is manifests/supervise.py, started as `dflash train` starts it.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from manifests.launch import start_supervisor
from manifests.launch_spec import LaunchSpec
from manifests.runs import recording
from shared import phases
from shared.atomic import write_json
from shared.beat import Beat
from shared.benchmarks.measure import table
from shared.config import knob, options_of, to_dict
from shared.errors import ConfigRefused, Interrupted, WorkerFailed
from shared.kernel import Kernel
from shared.progress import tell
from shared.reporter import Reporter
from shared.samples import Sampler
from shared.worker import stop_requested

_STEP_S = 0.01
_SETTLED_S = 3.0
_CALLS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """Settings of the benchmark."""

    dir: Path | None = knob(None, help="Folder on the disk to measure; default: a temporary one.")
    workers: int = knob(8, help="Workers that one supervisor watches.")
    seconds: float = knob(20.0, help="How long the supervisor is watched.")
    step_seconds: float = knob(0.25, help="The step of which the costs are a share.")
    json: Path | None = knob(None, help="Also write all numbers to this file.")

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigRefused(f"--workers is {self.workers}; it must be at least 1")
        for name in ("seconds", "step_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigRefused(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")


def report_only(run_dir: Path, rank: int, world_size: int) -> None:
    """A worker that does nothing but report, until it is asked to stop."""
    reporter, step = Reporter(run_dir, "train", rank), 0
    while not stop_requested():
        step += 1
        reporter.update(phases.STEP, step, None, "steps", loss=1.0 / step, learning_rate=6e-4)
        time.sleep(_STEP_S)
    raise Interrupted(f"stopped at step {step} of a benchmark")


def cost_of_calls(folder: Path) -> dict[str, float]:
    """Median seconds of one report with three numbers, and of one sign of life."""
    reporter = Reporter(folder, "bench", 0)
    beat = Beat.create(folder / "alive.beat")
    steps = iter(range(_CALLS * 2))
    found = {
        "report": _median(
            lambda: reporter.update(phases.STEP, next(steps), 1e6, "steps", loss=2.5, learning_rate=6e-4, accepted=3.1)
        ),
        "alive": _median(beat.alive),
    }
    beat.close()
    return found


def _median(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def cost_of_a_sample(folder: Path, workers: int) -> float:
    """Median processor seconds of one look at the host and so many processes."""
    sampler = Sampler(Kernel(), folder)
    try:
        ranks = dict.fromkeys(range(workers), os.getpid())
        seconds = []
        for _ in range(100):
            started = time.thread_time()
            sampler.sample(ranks)
            seconds.append(time.thread_time() - started)
        return statistics.median(seconds)
    finally:
        sampler.close()


def watch_a_supervisor(folder: Path, workers: int, seconds: float) -> dict[str, float]:
    """Share of one core and peak bytes of a supervisor with `workers` that report a hundred times a second."""
    spec = LaunchSpec(
        run_dir=folder,
        role="train",
        entry="manifests.benchmarks.supervision:report_only",
        num_workers=workers,
        environment={"OMP_NUM_THREADS": "1"},
    )
    with recording(folder, "train", {}) as run:
        started = start_supervisor(run, spec)
    started.signals.restore()
    try:
        time.sleep(_SETTLED_S)
        before, begun = _on_cpu(started.pid), time.monotonic()
        time.sleep(seconds)
        used, passed = _on_cpu(started.pid) - before, time.monotonic() - begun
        peak = _peak(started.pid)
    except OSError as error:
        raise WorkerFailed(f"the supervisor of {folder} ended while it was measured: {error}") from error
    finally:
        with suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGTERM)
        os.waitpid(started.pid, 0)
    return {"share": used / passed, "peak": peak}


def _on_cpu(pid: int) -> float:
    """Seconds that all threads of a process have run: in nanoseconds, where /proc/PID/stat counts hundredths."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _peak(pid: int) -> float:
    """The most bytes that a process ever had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1]) * 1024


def measured(config: SupervisionConfig, folder: Path) -> list[dict[str, Any]]:
    """The rows of the table; `of a step` is a share of `--step-seconds`, over all workers for the supervisor."""
    calls = cost_of_calls(folder)
    sample = cost_of_a_sample(folder, config.workers)
    watched = watch_a_supervisor(folder / "run", config.workers, config.seconds)
    step = config.step_seconds

    def row(what: str, cost: str, share: float | None) -> dict[str, Any]:
        return {"what": what, "cost": cost, "of a step": "" if share is None else f"{share:.4%}"}

    return [
        row("one report of a worker (each step)", f"{calls['report'] * 1e6:.1f} us", calls["report"] / step),
        row("one sign of life (each second)", f"{calls['alive'] * 1e6:.2f} us", calls["alive"]),
        row(
            f"supervisor of {config.workers} workers",
            f"{watched['share']:.2%} of a core",
            watched["share"] / config.workers,
        ),
        row("  of it one sample (each second)", f"{sample * 1e3:.2f} ms", None),
        row("  its memory", f"{watched['peak'] / 1e6:.1f} MB", None),
        row(
            "all together, per worker", "", calls["report"] / step + calls["alive"] + watched["share"] / config.workers
        ),
    ]


@click.command()
@options_of(SupervisionConfig)
def main(config: SupervisionConfig) -> None:
    """Print what watching costs."""
    with tempfile.TemporaryDirectory(prefix="supervision-", dir=config.dir) as folder:
        rows = measured(config, Path(folder))
    tell(table(f"watching {config.workers} workers; shares of a step of {config.step_seconds:g} s", rows))
    if config.json is not None:
        write_json(config.json, {"config": to_dict(config), "rows": rows})


if __name__ == "__main__":
    main()
