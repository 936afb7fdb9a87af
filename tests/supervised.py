"""A supervised run of toy workers, as `dflash train` starts its own: `python supervised.py RUN_DIR '{"entry": ...}'`.

Also functions for tests that start it, wait for what it does, and read what it left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.commit import read
from shared.ring import read_ring
from shared.samples import events_path

HERE = Path(__file__).parent
# Limits and graces a tenth of the real ones: a toy may take 6 s to start on a machine that is busy with other tests.
QUICK = 0.1
# For hangs: a step may be silent for 3 s; a start has 5 s at the least.
HASTY = 0.05


def main() -> None:
    """Be the foreground command."""
    import shared.cli
    from manifests.launch import LaunchSpec, start_supervisor
    from manifests.runs import recording
    from manifests.viewer import detach, view

    run_dir, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    leave, asked = settings.pop("detach", False), settings.pop("asked", [])

    def run(**_: Any) -> None:
        with recording(run_dir, "train", {}) as run:
            started = start_supervisor(run, LaunchSpec(run_dir=run_dir, role="train", **settings))
        started.signals.asked += asked  # as if signals had come before anybody looked on
        (detach if leave else view)(started)

    shared.cli.cli.main = run  # type: ignore[method-assign]
    shared.cli.main()


def start(
    run_dir: Path, function: str, workers: int = 2, *, pass_fds: tuple[int, ...] = (), **settings: Any
) -> subprocess.Popen[str]:
    """The foreground command of a run of toy_workers (or "module:function")."""
    entry = function if ":" in function else f"toy_workers:{function}"
    values = {"entry": entry, "num_workers": workers, "hang_limit_scale": QUICK, **settings}
    more = os.environ.get("PYTHONPATH_MORE")
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{more}" if more else str(HERE)}
    return subprocess.Popen(
        [sys.executable, str(HERE / "supervised.py"), str(run_dir), json.dumps(values)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=pass_fds,
    )


def run(run_dir: Path, function: str, workers: int = 2, **settings: Any) -> tuple[int, str, str]:
    """Run one to its end: (exit code, stdout, stderr)."""
    with start(run_dir, function, workers, **settings) as process:
        out, said = process.communicate(timeout=120)
    return process.returncode, out, said


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    """The events of these names of the newest run, in order; all without names."""
    found = read(run_dir, "events")
    newest = found[-1]["run_id"] if found else ""
    return [e for e in found if e["run_id"] == newest and (not names or e["event"] in names)]


def ring_events(run_dir: Path) -> list[dict[str, Any]]:
    """The second copy."""
    return read_ring(events_path(run_dir))


def ending(run_dir: Path) -> tuple[str, int | None, str]:
    """(state, exit code, message) of the newest record of the run."""
    last = read(run_dir, "runs")[-1]
    return last["state"], last["exit_code"], last["message"]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something; returns what the condition gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        time.sleep(0.02)
    return found


def least_of_three(measure: Callable[[], float], limit: float) -> float:
    """The least of up to three measurements, none after one below `limit`: other work slows a core or a disk down."""
    found = [measure()]
    while len(found) < 3 and min(found) >= limit:
        found.append(measure())
    return min(found)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
