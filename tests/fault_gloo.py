"""Toy ranks that meet in real collectives (gloo): a peer's death and a missed collective look as torch shows them.

Used by the scenarios of tests/fault_scenarios.py whose entry is "fault_gloo:work"; all else about the ranks is as in
fault_toys.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from fault_toys import TICKS, Plan, Toy

from shared import phases
from shared.errors import Interrupted
from shared.worker import stop_requested


def work(run_dir: Path, rank: int, world_size: int) -> None:
    """Steps with one all_reduce each; the fault comes before a rank's all_reduce."""
    toy = Toy(Plan.read(run_dir), run_dir, rank, world_size)
    toy.reporter.update(phases.LOAD, 0, None, "modules")  # its limit suits two cores that import torch for all ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    toy.reporter.update(phases.RENDEZVOUS, 0, None, "ranks")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for step in range(TICKS[phases.STEP]):
        asked = toy.skipped
        toy.tick(phases.STEP, step, float(step), float(TICKS[phases.STEP]), "steps")
        if asked == toy.skipped:
            total = torch.full((4,), float(stop_requested()))
            dist.all_reduce(total)
            if total.sum() > 0:
                raise Interrupted(f"stopped at step {step}; run the same command again to go on")
    dist.barrier()
    dist.destroy_process_group()
