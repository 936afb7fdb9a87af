"""The phases of a worker's life, and how long each may stay silent before that is a hang.

Workers name them (shared/progress.py), the supervisor measures the silence and asks `limit_s`. A limit counts from the
last report that changed something, so a slow disk or a long autotuning that reports its progress is no hang.
"""

from __future__ import annotations

import math

SPAWN = "spawn"
"""Started, nothing of ours has run yet: the supervisor's word, no worker reports it."""
IMPORT = "import"
RENDEZVOUS = "rendezvous"
LOAD = "load"
COMPILE = "compile"
WARM_UP = "warm-up"
STEP = "step"
CHECKPOINT = "checkpoint"
EVAL = "eval"
WAIT_FOR_ROOM = "wait for room"
DRAIN = "drain"
"""The work is done or given up: what was begun (writers, readers, ledgers) is brought to its end."""
DONE = "done"

FLOOR_S = {
    SPAWN: 60.0,
    IMPORT: 120.0,
    RENDEZVOUS: 120.0,
    LOAD: 300.0,
    COMPILE: 1800.0,
    WARM_UP: 600.0,
    STEP: 60.0,
    CHECKPOINT: 180.0,
    EVAL: 300.0,
    DRAIN: 300.0,
    DONE: 300.0,
}
# A main thread in these may be in C for half an hour, and has nothing that a checkpoint could keep.
NOTHING_TO_SAVE = frozenset({IMPORT, RENDEZVOUS, LOAD, COMPILE, WARM_UP})
LEAVE_S = 5.0
"""How long after a request a worker that has nothing to save may still take to its next boundary."""
# However small the scale: a busy machine takes seconds to start an interpreter.
_LEAST_S = {SPAWN: 5.0}
# A phase of a newer version, or none: as patient as loading.
_UNKNOWN_S = 300.0
# How many times the longest silence that turned out well is still no hang.
_FACTOR = 5.0
SCALE_VARIABLE = "DFLASH_HANG_SCALE"
"""The environment variable that `--hang-limit-scale` sets for a run's processes."""


def limit_s(phase: str, longest_gap_s: float, scale: float) -> float:
    """Seconds of silence after which `phase` is a hang; infinite for scale 0 and for a wait for room.

    longest_gap_s: the longest silence of this phase that ended by itself, 0 when none was seen.
    """
    if scale == 0 or phase == WAIT_FOR_ROOM:
        return math.inf
    limit = scale * max(FLOOR_S.get(phase, _UNKNOWN_S), _FACTOR * longest_gap_s)
    return max(limit, _LEAST_S.get(phase, 0.0))


def alone_limit_s(phase: str, longest_gap_s: float, scale: float) -> float:
    """As `limit_s` for a worker without a supervisor: never infinite, also where hangs are not to be looked for."""
    return min(limit_s(phase, longest_gap_s, scale or 1.0), most_alone_s(scale))


def most_alone_s(scale: float) -> float:
    """Seconds after its supervisor that no worker lives: what the most patient phase may take."""
    return max(FLOOR_S.values()) * (scale or 1.0)
