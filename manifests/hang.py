"""When is a silent worker hung, and how is that called: pure judgement of what was seen of it.

    alive  progress  CPU   state   name
    yes    no        ~0    S       hang.wait      in a lock, a queue, a collective; the GIL is free
    yes    no        high  R       hang.busy      spins
    no     no        any   S/R     hang.gil       native code holds the GIL
    -      no        0     T/t     hang.stopped   SIGSTOP, a debugger
    -      no        0     D, Z    hang.io        in the kernel: disk, NFS, driver; Z: its other threads are

"Alive" is the liveness thread, "progress" a report that changed something (shared/beat.py). A worker that never came to
its own work (phases spawn, import, rendezvous) and waits or spins is hang.startup. Called by manifests/supervise.py,
which looks (manifests/hang_watch.py); the limits are shared/phases.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared import phases

STOPPED, GIL, WAIT, BUSY, IO, STARTUP = (f"hang.{kind}" for kind in ("stopped", "gil", "wait", "busy", "io", "startup"))
STOPPED_AFTER_S = 3.0
"""A stop this long is named; a debugger that takes a stack needs less."""
IO_AFTER_S = 2.0
# The liveness thread beats once a second: up to 1.5 s it lives, beyond 3 s it does not, between we look again.
_ALIVE_S, _SILENT_S = 1.5, 3.0
# A beat this long after the last progress came while it was silent; an earlier one says nothing about what it does now:
# limits of 1.2 s called a held GIL a wait, by a beat from just before.
_INTO_SILENCE_S = 0.5
_BUSY_SHARE = 0.5
# Ranks in step fall silent within moments of each other: wait for all before choosing whom to name.
_MARGIN_S = 2.0
_BEFORE_WORK = (phases.SPAWN, phases.IMPORT, phases.RENDEZVOUS)
# The one to name among several: whoever cannot be waiting for another.
_SUSPICION = (STOPPED, IO, GIL, BUSY, STARTUP, WAIT)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One rank at one moment; seconds."""

    phase: str
    silent_s: float
    """Since the last report that changed something, or since it was started."""
    limit_s: float
    state: str
    """Of /proc/<pid>/stat: R S D T t Z."""
    state_s: float
    """How long it has been in that state, as far as was seen."""
    alive_s: float | None
    """Since the liveness thread's last beat; None before its first."""
    cpu_share: float | None
    """Cores used or wanted over the last seconds of the silence; None when not known yet."""

    @property
    def over(self) -> bool:
        """Whether it was silent for longer than its phase allows."""
        return self.silent_s > self.limit_s

    @property
    def beat_in_silence(self) -> bool:
        """Whether Python ran after it had stopped making progress."""
        return self.alive_s is not None and self.silent_s - self.alive_s >= _INTO_SILENCE_S

    @property
    def stopped(self) -> bool:
        """Whether it is stopped for long enough to say so."""
        return self.state in ("T", "t") and self.state_s >= STOPPED_AFTER_S


@dataclass(frozen=True)
class Hang:
    """A rank to name, and what all ranks were seen doing: {rank: code}."""

    rank: int
    code: str
    names: dict[int, str]


def name_of(look: Look) -> str | None:
    """What a silent rank is doing, whether or not its limit has passed; None when it is dead or that cannot be told."""
    if look.state == "Z":  # and not to be reaped: a thread of it is still in the kernel
        return IO if look.state_s >= IO_AFTER_S else None
    if look.state in ("", "X"):
        return None
    if look.state in ("T", "t"):
        return STOPPED if look.stopped else None
    if look.state == "D":
        return IO if look.state_s >= IO_AFTER_S else None
    if look.alive_s is not None and look.alive_s >= _SILENT_S:
        return GIL
    if look.alive_s is not None and (look.alive_s > _ALIVE_S or (look.over and not look.beat_in_silence)):
        return None
    if look.phase in _BEFORE_WORK:
        return STARTUP
    if look.cpu_share is None:
        return None
    return BUSY if look.cpu_share >= _BUSY_SHARE else WAIT


def hung(looks: Mapping[int, Look], hurry: float = 1.0) -> Hang | None:
    """The rank to name as hung among the living ranks that work together (one, if it works alone); None: no hang.

    A rank that only waits is not named while another does what may still take its time (a checkpoint, an estimate, its
    larger share of a step), or is what the others wait for: stopped, or without a sign of life. `hurry` shortens the
    moment in which ranks that depend on each other fall silent one after the other.
    """
    margin = _MARGIN_S * hurry if len(looks) > 1 else 0.0
    if not any(look.silent_s > look.limit_s + margin for look in looks.values()):
        return None
    names = {rank: name for rank, look in looks.items() if (name := name_of(look)) is not None}
    culprits = [rank for rank, look in looks.items() if look.over or names.get(rank) in (STOPPED, GIL)]
    if any(rank not in names for rank in culprits):
        return None
    meets = {rank: look.phase == phases.RENDEZVOUS for rank, look in looks.items()}  # it waits for who is not there yet
    # At a step it waits for whoever is at something else.
    steps = {rank: look.phase == phases.STEP for rank, look in looks.items()}
    rank = min(
        culprits,
        key=lambda rank: (_SUSPICION.index(names[rank]), meets[rank], steps[rank], -looks[rank].silent_s),
    )
    # A rank that spins may wait as well: a synchronisation with its GPU takes a whole core.
    waits = names[rank] in (WAIT, BUSY) or (names[rank] == STARTUP and meets[rank])
    if waits and any(_still_allowed(look, looks[rank], margin) for look in looks.values()):
        return None
    return Hang(rank, names[rank], names)


def _still_allowed(other: Look, waiting: Look, margin: float) -> bool:
    """Whether `other` is at something else, which is not too long yet, or has moved since `waiting` fell silent.

    Ranks have unequal work in one step: with 620 labels in a row and 20 in another's, that one waits for minutes on a
    CPU.
    """
    return not other.over and (other.phase != waiting.phase or other.silent_s < waiting.silent_s - margin)


def grace_after_continue_s(limit_s: float, scale: float) -> float:
    """How long a rank that was stopped past its limit and then continued has to show progress."""
    return max(2.0, 10.0 * scale, limit_s if math.isfinite(limit_s) else 0.0)
