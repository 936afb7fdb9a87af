"""The knobs of a supervised run, declared once: `dflash extract` and `dflash train` take the same by `same_knob`.

What they mean is in manifests/restart.py (restarts), shared/phases.py (limits) and manifests/launch.py (detach).
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import knob
from shared.errors import ConfigRefused

SUPERVISION_FIELDS = frozenset({"restarts", "hang_limit_scale", "detach"})
"""What may change between two starts of one run: it moves no number of the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionKnobs:
    """How a run is watched."""

    restarts: int = knob(
        3, help="Restarts after failures in a row that saved nothing new; 0: never start a worker again."
    )
    hang_limit_scale: float = knob(
        1.0, help="Scales the silence after which a phase is a hang (60 s for a step); 0: never."
    )
    detach: bool = knob(False, help="Return at once; `dflash status` and `dflash logs -f` show the run.")


def check_supervision(restarts: int, hang_limit_scale: float) -> None:
    """Raise ConfigRefused for values that mean nothing."""
    if restarts < 0:
        raise ConfigRefused(f"--restarts is {restarts}; it must be 0 or more")
    if hang_limit_scale < 0:
        raise ConfigRefused(f"--hang-limit-scale is {hang_limit_scale}; it must be 0 (never) or more")
