"""The first calls of what is compiled: in the main thread, before anything else runs, on the shapes of training.

Called by train.py around its loop. On each machine local rank 0 compiles and publishes, then the others start from
what it compiled; with FSDP all compile at once, because their warm-up gathers layers together. Next: compiled.py (the
contract), compile_cache.py (the folders).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shared import phases
from shared.config import to_dict
from shared.errors import DflashError
from shared.provenance import distribution_version
from shared.reporter import Report, unreported
from stage2_train import compiled
from stage2_train.compile_cache import CompileCache
from stage2_train.compiled import Contract
from stage2_train.distributed import local_rank
from stage2_train.drafter import Drafter
from stage2_train.objective import Engine
from stage2_train.training_parts import Parts


@contextmanager
def compiled_regions(
    parts: Parts, declare: Callable[[Drafter, Engine], Contract] = compiled.declare, report: Report = unreported
) -> Iterator[Contract]:
    """Compile what this run declares, telling `report`, and forbid any other compile inside the block.

    Records the event "compiled", and "compile cache" when something published was refused. Raises CompileContract.
    """
    contract = declare(parts.drafter, parts.engine)
    if not contract.regions:
        yield contract
        return
    report(phases.COMPILE, 0, len(contract.regions), "regions")
    cache = CompileCache(parts.config.compile_cache, cache_key(parts, contract))
    try:
        in_turn = parts.ranks.world_size > 1 and parts.config.parallel != "fsdp"
        if in_turn and local_rank() > 0:
            parts.ranks.barrier()
        made = _compile(parts, contract, cache, report)
        if local_rank() == 0 and not contract.all_from_cache() and (entry := cache.publish()):
            made["published"] = str(entry)
        for note in cache.notes:
            parts.event("compile cache", note)
        parts.event("compiled", ", ".join(region.name for region in contract.regions), **made)
        if in_turn and local_rank() == 0:
            parts.ranks.barrier()
        yield contract
    finally:
        contract.release()
        cache.close()


def _compile(parts: Parts, contract: Contract, cache: CompileCache, report: Report) -> dict[str, Any]:
    """The contract's warm-up; tried once more without the cache when that is what broke it.

    In this process, not a new one: that would tear the process group, which other ranks already wait in. It is safe
    because what failed is a Python exception (a file that cannot be loaded); a crash cannot be caught, so the next
    start recognises it by the marker in the cache. Not with FSDP, where the other ranks are past the failed gather.
    """
    batch = parts.builder.build(((),) * parts.share.rows_per_pass, 0)
    rows, anchors, size = batch.labels.shape
    contract.shapes = f"{rows} rows of {batch.features.shape[1]} tokens and {anchors} blocks of {size}"
    warm, again = cache.seed(), ""
    try:
        made = _told(contract, report, lambda: parts.stepper.rehearse(batch))
    except (DflashError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        again = f"{type(error).__name__}: {error}"[:300]
        if warm:
            cache.refuse(f"the warm-up failed with it: {again}")
        if not warm or (parts.config.parallel == "fsdp" and parts.ranks.world_size > 1):
            raise
        _forget()
        contract.restart()
        made = _told(contract, report, lambda: parts.stepper.rehearse(batch))
    cache.proven()
    made["cache"] = "cold" if cache.entry is None else f"filled from {cache.entry}"
    return made | ({"tried_again_after": again} if again else {})


def _told(contract: Contract, report: Report, rehearse: Callable[[], None]) -> dict[str, Any]:
    """The contract's warm-up; `report` hears of every graph when it is there, and of the second pass."""
    from torch._dynamo.callback import callback_handler

    passes = 0

    def once() -> None:
        nonlocal passes
        if passes:
            report(phases.WARM_UP, passes, 2, "passes")
        passes += 1
        rehearse()

    def tell(_which: object = None) -> None:
        whole, graphs = contract.progress()
        if passes < 2:
            report(phases.COMPILE, whole, len(contract.regions), "regions", inner=graphs, graphs=graphs)

    callback_handler.register_end_callback(tell)
    try:
        tell()
        return contract.warm_up(once)
    finally:
        callback_handler.remove_end_callback(tell)


def _forget() -> None:
    """Take back what torch holds in memory of a failed compile: its graphs, and the modules loaded from the cache."""
    from torch._inductor.utils import clear_caches

    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    clear_caches()


def cache_key(parts: Parts, contract: Contract) -> dict[str, Any]:
    """All that compiled code depends on; torch's own keys inside an entry are finer still."""
    engine, config = parts.engine, parts.config
    sources = sorted({region.code.co_filename for region in contract.regions})
    cuda = engine.device.type == "cuda"
    sharded = config.parallel == "fsdp"
    return {
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy")} | {"cuda": torch.version.cuda},
        "ours": [distribution_version(), *(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sources)],
        "python": [platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "device": [torch.cuda.get_device_name(engine.device), *torch.cuda.get_device_capability(engine.device)]
        if cuda
        else ["cpu", torch.get_num_threads()],
        "drafter": parts.drafter.config.to_hf_config(),
        "shapes": [parts.share.rows_per_pass, config.max_length, config.anchors, config.block_size],
        "head": list(engine.head.weight.shape),
        "engine": [engine.attention, str(engine.dtype), to_dict(engine.objective)],
        "sharded": parts.ranks.world_size if sharded else 0,
        "recompute": config.activation_checkpointing,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
