"""What a finished training made, for a person.

Called once all workers ended well, in a process of its own, by manifests/finish.py; and by launch_train.py for a run
that had finished before. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manifests.commit import read
from shared.progress import summary
from stage2_train import checkpoint_folder
from stage2_train.pinned_store import read_run


def finish(run_dir: Path) -> None:
    """Print the summary of the training that has just ended in `run_dir`."""
    run = read_run(run_dir)
    print_summary(run_dir, run, f"trained {run['total_steps']} steps")


def print_summary(run_dir: Path, run: dict[str, Any], headline: str) -> None:
    """Print where the run is, its newest checkpoint, its first and last loss and estimate, and what to do next."""
    metrics = read(run_dir, "metrics")
    estimates = [m for m in metrics if m["split"] == "heldout" and m["name"] == "acceptance_length_estimate"]
    losses = [m for m in metrics if m["split"] == "train" and m["name"] == "loss"]
    newest, _ = checkpoint_folder.newest_complete(run_dir)
    pairs: list[tuple[str, Any]] = [("run", run_dir), ("store", run["store"]["path"]), ("checkpoint", newest)]
    if losses:
        pairs.append(("loss", f"{losses[0]['value']:.4f} -> {losses[-1]['value']:.4f}"))
    if estimates:
        pairs.append(
            ("held-out acceptance length (estimate)", f"{estimates[0]['value']:.3f} -> {estimates[-1]['value']:.3f}")
        )
    else:
        pairs.append(("held-out acceptance length (estimate)", f"none: {_no_estimate(run_dir, run)}"))
    if newest is not None and (idle := checkpoint_folder.read_info(newest)["loop_state"]["steps_without_labels"]):
        pairs.append(("steps without a label", f"{idle:,} of {run['total_steps']:,}: they trained nothing"))
    pairs.append(
        ("next", f"dflash eval --run {run_dir} --data HELDOUT.jsonl  (or the prepared rows: their held-out part)")
    )
    summary(headline, pairs)


def _no_estimate(run_dir: Path, run: dict[str, Any]) -> str:
    if any(event["event"] == "no held-out documents" for event in read(run_dir, "events")):
        return "the store has no held-out document with two supervised tokens"
    return (
        "no held-out document has two supervised tokens in a row among its first "
        f"{run['config']['max_length']:,} (--max-length)"
    )
