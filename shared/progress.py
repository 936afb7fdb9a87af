"""Progress a person can read: phase, counts, rate, ETA.

Workers write theirs into a heartbeat each (shared/reporter.py); the foreground command draws them (`Display`), with
rich on a terminal and plain lines elsewhere. Loops inside the foreground process use `progress`.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import click

from shared.beat import BeatState
from shared.errors import DiskFull
from shared.phases import DONE
from shared.reporter import Reporter, progress_path

__all__ = [
    "Bar",
    "Display",
    "Reporter",
    "Snapshot",
    "combine",
    "duration",
    "line",
    "output_fault",
    "progress",
    "progress_path",
    "readable_size",
    "say",
    "summary",
    "tell",
]

DRAW_EVERY_S = 0.25
PLAIN_LINE_EVERY_S = 5.0


@dataclass
class Snapshot:
    """What is shown at one moment, over all ranks."""

    phase: str
    done: float
    total: float | None
    unit: str
    rate: float
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the present rate, or None when unknown."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0.0) / self.rate


def combine(states: Sequence[BeatState], summed: bool) -> Snapshot | None:
    """Several ranks' beats as one: summed counts (independent workers) or the first rank's (ranks in step)."""
    if not states:
        return None
    first = min(states, key=lambda s: (s.phase == DONE, s.started)) if summed else states[0]
    same = [s for s in states if s.unit == first.unit] if summed else [first]
    totals = [s.total for s in same if s.total is not None]
    total = sum(totals) if len(totals) == len(same) else None
    rate = sum((s.done - s.first) / max(s.time - s.started, 1e-6) for s in same)
    return Snapshot(first.phase, sum(s.done for s in same), total, first.unit, rate, dict(first.numbers))


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 3m07s, 5h02m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def readable_size(size: float) -> str:
    """Bytes as people say them: 790 bytes, 53.69 MB, 5.25 GB, 1.2 TB."""
    for unit, divisor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= divisor:
            return f"{size / divisor:.4g} {unit}"
    return f"{size:,.0f} bytes"


def line(title: str, shot: Snapshot) -> str:
    """One plain line for a log file or a terminal that cannot draw."""
    total = "" if shot.total is None else f"/{shot.total:,.0f}"
    parts = [f"{title}: {shot.phase} {shot.done:,.0f}{total} {shot.unit}"]
    if shot.rate > 0:
        parts.append(f"{shot.rate:,.4g} {shot.unit}/s")
    if shot.eta_s is not None:
        parts.append(f"ETA {duration(shot.eta_s)}")
    parts.extend(f"{name} {_number(value)}" for name, value in shot.numbers.items())
    return "  ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Display:
    """Draws snapshots: a live bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._last_line = 0.0
        self._last_phase = ""
        self._live: Any = None
        self._bar: Any = None
        if sys.stderr.isatty():
            self._live, self._bar = _rich_bar(title)

    def show(self, shot: Snapshot) -> None:
        """Draw one snapshot; never raises when the terminal is gone."""
        try:
            self._draw(shot)
        except OSError:
            self._live = None
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process

    def _draw(self, shot: Snapshot) -> None:
        if self._live is not None:
            numbers = "  ".join(f"{k} {_number(v)}" for k, v in shot.numbers.items())
            self._live.update(
                self._bar,
                completed=shot.done,
                total=None if shot.total is None else int(shot.total),
                phase=shot.phase,
                unit=shot.unit,
                rate=f"{shot.rate:,.4g} {shot.unit}/s" if shot.rate > 0 else "",
                eta="" if shot.eta_s is None else f"ETA {duration(shot.eta_s)}",
                numbers=numbers,
            )
            return
        now = time.monotonic()
        if shot.phase != self._last_phase or now - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line, self._last_phase = now, shot.phase
            say(line(self.title, shot))

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()


def _rich_bar(title: str) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    live = Progress(
        TextColumn("[bold]{task.description}"),
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total} {task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[eta]}"),
        TextColumn("[dim]{task.fields[numbers]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar = live.add_task(title, total=None, phase="", unit="", rate="", eta="", numbers="")
    live.start()
    return live, bar


def say(text: str) -> None:
    """Print a line to stderr; a terminal that went away (closed ssh, broken pipe) never ends the run."""
    try:
        click.echo(text, err=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process


def tell(text: str) -> None:
    """Print a result to stdout; as with `say`, a reader that left (`| head`) never fails the work it is about.

    Raises DiskFull when stdout is a file and its disk is full: a result that was cut must not pass for one.
    """
    try:
        click.echo(text)
        sys.stdout.flush()
    except OSError as error:
        if (fault := output_fault(error)) is not None:
            raise fault from error
        # The descriptor too: the interpreter's own flush at exit would complain about what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def output_fault(error: OSError) -> DiskFull | None:
    """What a failed write to stdout means: None when its reader left (a closed pipe, a terminal that went away)."""
    if error.errno in (errno.EPIPE, errno.EIO):
        return None
    return DiskFull(f"the output cannot be written: {os.strerror(error.errno or 0)}; send it elsewhere")


class Bar:
    """Counts of a loop in the foreground process."""

    def __init__(self, display: Display, phase: str, total: float | None, unit: str) -> None:
        self._display, self._phase, self._total, self._unit = display, phase, total, unit
        self._started = time.monotonic()
        self._shown = 0.0
        self.done = 0.0
        self.numbers: dict[str, Any] = {}

    def advance(self, count: float = 1.0, **numbers: Any) -> None:
        """Add to the count and redraw at most four times a second."""
        self.done += count
        self.numbers.update(numbers)
        now = time.monotonic()
        if now - self._shown >= DRAW_EVERY_S:
            self._shown = now
            rate = self.done / max(now - self._started, 1e-6)
            self._display.show(Snapshot(self._phase, self.done, self._total, self._unit, rate, self.numbers))


@contextmanager
def progress(phase: str, total: float | None, unit: str, title: str = "dflash") -> Iterator[Bar]:
    """Show the progress of a loop: `with progress("tokenise", 100, "rows") as bar: bar.advance()`."""
    display = Display(title)
    try:
        yield Bar(display, phase, total, unit)
    finally:
        display.close()


def summary(title: str, pairs: Sequence[tuple[str, Any]]) -> None:
    """Print what a command made and where: a heading and aligned `name  value` lines, on stdout."""
    width = max((len(name) for name, _ in pairs), default=0)
    tell("\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in pairs)]))
