"""What a supervisor is to run, as a value that survives in a file, and where the files of such a run lie.

Made by the commands (stage1_extract/extract.py, stage2_train/launch_train.py), written to RUN/supervision/spec.json by
manifests/launch.py, read by manifests/supervisor.py and `dflash resume`. Next: manifests/supervise.py.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.json_file import read_object
from shared.phases import SCALE_VARIABLE


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to start: `entry` is "module:function", called as function(run_dir, rank, world_size) in each process."""

    run_dir: Path
    role: str
    entry: str
    num_workers: int
    summed_progress: bool = False
    """True for independent workers whose counts add up; False for ranks in step."""
    environment: dict[str, str] = field(default_factory=dict)
    independent: bool = False
    """True: a worker that failed is started again alone. False: all are."""
    finish: str = ""
    """ "module:function", called as function(run_dir) in a process of its own once all workers ended well."""
    restarts: int = 0
    """Restarts after failures in a row that saved nothing new."""
    hang_limit_scale: float = 1.0
    """Scales all limits of silence; 0: nothing is ever a hang."""
    run_id: str = ""
    command: str = ""
    on_disk_full: Literal["pause", "stop"] = "stop"

    @property
    def hurry(self) -> float:
        """What shortens graces and delays too: tests scale their limits down and must not wait for minutes."""
        return min(1.0, self.hang_limit_scale) or 1.0

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self) | {"run_dir": str(self.run_dir)}

    @classmethod
    def read(cls, run_dir: Path) -> LaunchSpec:
        """From spec.json; the folder may have been reached by another path then. Raises StoreDamaged."""
        values = read_object(spec_path(run_dir), "run the same command again")
        known = {item.name: values[item.name] for item in dataclasses.fields(cls) if item.name in values}
        return cls(**{**known, "run_dir": run_dir})


def hang_scale(knob: float) -> float:
    """The scale of a run's limits: DFLASH_HANG_SCALE in the environment wins over the knob."""
    try:
        return max(0.0, float(os.environ[SCALE_VARIABLE]))
    except (KeyError, ValueError):
        return knob


def spec_path(run_dir: Path) -> Path:
    """The LaunchSpec of the newest run, with the command line that made it."""
    return run_dir / "supervision" / "spec.json"


def log_path(run_dir: Path, role: str, rank: int | str) -> Path:
    """Where a worker's stdout and stderr go; rank "supervisor" is the supervisor's own."""
    return run_dir / "logs" / f"{role}-{rank}.log"


def fault_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where faulthandler writes a worker's stacks: at a crash, and when asked by SIGUSR1."""
    return run_dir / "logs" / f"{role}-{rank}.fault"


def summary_path(run_dir: Path, role: str) -> Path:
    """What the newest run made, as the command prints it at its end."""
    return run_dir / "logs" / f"{role}-summary.txt"


def stacks_path(run_dir: Path, attempt: int, rank: int) -> Path:
    """Stacks of one worker, saved before it was killed."""
    return run_dir / "supervision" / "stacks" / f"attempt-{attempt}-rank-{rank}.txt"
