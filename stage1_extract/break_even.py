"""When a store costs more than running the target again each epoch: hours, bytes x hours, money. Pure arithmetic.

Called by stage1_extract/plan_report.py with sizes from stage1_extract/disk_plan.py. With T tokens, B bytes written,
Q bytes read an epoch, R tokens/s of the target over all processes, D bytes/s of the disk, E epochs:

    compute  C = T / R                       one pass of the target
    extract  X = max(C, B / D)               writing runs beside computing
    read     r = Q / D                       an epoch from the store, counted in full though training hides it
    epoch    with training at t hours an epoch, reading runs beside it and the target does not: max(r, t) and C + t
    store    X + E * max(r, t)
    again    E * (C + t)                     recompute: the same processes run the target in each epoch
    held     B * (X / 2 + E * max(r, t))     bytes x hours: half full on average while it grows
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is asked: tokens, bytes, rates. Rates are over all processes; `disk` is bytes/s or None when unknown."""

    num_tokens: int
    write_bytes: int
    read_bytes_per_epoch: int
    tokens_per_second: float
    disk: float | None
    processes: int
    train_tokens_per_second: float | None = None
    gpu_price_per_hour: float | None = None
    disk_price_per_tb_month: float | None = None

    @property
    def compute_hours(self) -> float:
        """C."""
        return self.num_tokens / self.tokens_per_second / 3600

    @property
    def train_hours(self) -> float:
        """t, 0 when no training rate is given."""
        return self.num_tokens / self.train_tokens_per_second / 3600 if self.train_tokens_per_second else 0.0

    @property
    def write_rate(self) -> float:
        """Bytes/s that the disk must take for writing not to be the limit: B * R / T."""
        return self.write_bytes * self.tokens_per_second / self.num_tokens

    @property
    def extract_hours(self) -> float | None:
        """X, or None while the disk is unknown."""
        return None if self.disk is None else max(self.compute_hours, self.write_bytes / self.disk / 3600)

    @property
    def read_hours(self) -> float | None:
        """r, or None while the disk is unknown."""
        return None if self.disk is None else self.read_bytes_per_epoch / self.disk / 3600

    @property
    def recompute_epoch_hours(self) -> float:
        """C + t."""
        return self.compute_hours + self.train_hours


@dataclass(frozen=True, slots=True)
class Costs:
    """A store as `once + E * each` against `E * again`, in one unit (hours, or money)."""

    once: float
    each: float
    again: float

    def store(self, epochs: int) -> float:
        """Of E epochs from a store."""
        return self.once + epochs * self.each

    def recompute(self, epochs: int) -> float:
        """Of E epochs that run the target again."""
        return epochs * self.again

    def cheaper_from(self) -> int | None:
        """The smallest E >= 1 with once + E * each < E * again, or None when there is none."""
        if self.again <= self.each:
            return None
        first = max(1, math.floor(self.once / (self.again - self.each)))
        # The quotient is right up to rounding, and beyond 2^53 epochs there is no next number.
        near = range(first, first + 3)
        return next((epochs for epochs in near if self.store(epochs) < self.recompute(epochs)), None)


def hours(work: Workload) -> Costs | None:
    """Hours of the same processes; None while the disk is unknown."""
    if work.extract_hours is None or work.read_hours is None:
        return None
    return Costs(work.extract_hours, max(work.read_hours, work.train_hours), work.recompute_epoch_hours)


def byte_hours(work: Workload, epochs: int) -> float | None:
    """Bytes x hours that the store is held: B * (X / 2 + E * max(r, t)); None while the disk is unknown."""
    costs = hours(work)
    return None if costs is None else work.write_bytes * (costs.once / 2 + epochs * costs.each)


def money(work: Workload) -> Costs | None:
    """processes * hours * gpu price, and for the store also held TB * hours / 730 * disk price; None without both."""
    costs = hours(work)
    if costs is None or work.gpu_price_per_hour is None or work.disk_price_per_tb_month is None:
        return None
    gpus = work.processes * work.gpu_price_per_hour
    disk = work.write_bytes / 1e12 * work.disk_price_per_tb_month / HOURS_PER_MONTH
    return Costs(
        costs.once * gpus + costs.once / 2 * disk,
        costs.each * (gpus + disk),
        costs.again * gpus,
    )


def disk_needed(work: Workload, epochs: int) -> float | None:
    """Bytes/s above which the store takes fewer hours than recomputing at E epochs; None when no disk is fast enough.

    X + E * max(r, t) < E * (C + t) must hold for each of C, B / D in X and r, t in the epoch; solved for D:
    E * Q / (E * (C + t) - C) and (B + E * Q) / (E * (C + t)) and B / (E * C), in seconds.
    """
    compute, train = work.compute_hours * 3600, work.train_hours * 3600
    spare = epochs * (compute + train) - compute
    if spare <= 0 or epochs * compute <= compute:
        return None
    read = epochs * work.read_bytes_per_epoch
    return max(
        read / spare,
        (work.write_bytes + read) / (epochs * (compute + train)),
        work.write_bytes / (epochs * compute),
    )
