"""Functions run by several gloo processes at once, for tests of what ranks do together.

The processes are forked from one that has imported torch and nothing else, so that a test does not wait for imports.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manifests.runs import recorded
from shared.errors import DflashError
from shared.ports import free_port
from stage2_train import launch_train
from stage2_train import train as train_module
from stage2_train.config import TrainConfig
from stage2_train.distributed import Ranks, process_group
from stage2_train.training_parts import set_up

TIMEOUT_S = 120


def together(folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(ranks, *arguments) returned in each of `world_size` processes, by rank; an error is its value."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stage2_train.launch_train", "stage2_train.train", "torch._dynamo"])
    folder.mkdir(exist_ok=True)
    port = free_port()
    processes = [
        context.Process(target=_enter, args=(folder, rank, world_size, port, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not stuck, f"ranks {stuck} of {world_size} did not end in {TIMEOUT_S} s"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    folder: Path, rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    found: Any
    try:
        with process_group(rank, world_size, torch.device("cpu")) as ranks:
            found = function(ranks, *arguments)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        if not isinstance(error, DflashError):
            traceback.print_exc()
        found = error
    torch.save(found, folder / f"{rank}.pt")


def train_together(
    config: TrainConfig, world_size: int, stop_after: int | None = None, before: Callable[[Any], None] | None = None
) -> list[Any]:
    """`dflash train` in `world_size` processes, which ask `stop_after` steps on to stop; `before` is called with Parts.

    Returns how each ended: {} or the error.
    """
    run_dir = config.run_dir()
    config.require_processes(world_size)
    run = launch_train.check(config)
    with recorded(run_dir, "train", run["config"]) as identifier:
        launch_train.open_run(run_dir, run, config)
        return together(run_dir.parent / "ranks", world_size, _train, run_dir, run, identifier, stop_after, before)


def _train(
    ranks: Ranks, run_dir: Path, run: dict[str, Any], identifier: str, stop_after: int | None, before: Any
) -> dict[str, Any]:
    parts = set_up(run_dir, run, ranks, identifier)
    if before is not None:
        before(parts)
    asked = iter(range(10**9))
    train_module.stop_requested = lambda: stop_after is not None and next(asked) >= stop_after
    train_module.train(parts)
    return {}
