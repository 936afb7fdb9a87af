"""What is evaluated: a drafter, the target it belongs to, and where results go. Refuses a pair that does not match.

Called by stage2_train.evaluate and export before any weights of the target are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.commit import read
from shared.errors import ConfigRefused, StoreMismatch
from shared.json_file import read_object
from shared.target_identity import target_identity
from stage2_train import warm_start
from stage2_train.checkpoint import load_drafter
from stage2_train.config_eval import EvalConfig
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig

# Written by export, read here: where an exported folder came from.
PROVENANCE_FILE = "dflash_offline.json"
SAME = ("weights_sha256", "config_sha256", "tokenizer_sha256", "chat_template_sha256")


@dataclass(frozen=True, slots=True)
class Subject:
    """A drafter on the CPU with its origin; `target` is what to load, `out` the folder for results."""

    drafter: Drafter
    checkpoint: Path
    global_step: int
    untrained: bool
    target: str
    target_identity: dict[str, Any]
    template_kwargs: dict[str, Any]
    out: Path


def load_subject(config: EvalConfig) -> Subject:
    """Load the drafter (or its first weights) and make sure that the target is the one it was trained for.

    Raises CheckpointMismatch, ConfigRefused (no target known), TargetNotFound, and StoreMismatch with both values.
    """
    drafter, drafter_config, info = load_drafter(config.run)
    folder = Path(info["path"])
    info = {**info, **exported_info(folder)}
    identity: dict[str, Any] = info.get("store", {}).get("identity", {})
    target = config.target or recorded_target(info) or _no_target(config.run)
    found = target_identity(target)
    require_same_target(identity.get("target", {}), found, folder, target)
    step = int(info.get("global_step", 0))
    if config.untrained:
        drafter, step = first_drafter(drafter_config, info, folder), 0
    kwargs = identity.get("chat_template_kwargs") or {}
    return Subject(drafter, folder, step, config.untrained, target, found, kwargs, config.out or results_folder(folder))


def exported_info(folder: Path) -> dict[str, Any]:
    """What an exported folder says about its origin; {} for a checkpoint or a foreign export."""
    path = folder / PROVENANCE_FILE
    return read_object(path, "export again") if path.is_file() else {}


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint folder lies in."""
    parents = checkpoint.absolute().parents
    return parents[1] if parents[0].name == "checkpoints" else None


def results_folder(folder: Path) -> Path:
    """The run folder of a checkpoint; beside an exported folder, which never changes once published."""
    folder = folder.resolve()  # "." has no name
    return run_folder(folder) or folder.with_name(f"{folder.name}-eval")


def recorded_target(info: dict[str, Any]) -> str | None:
    """Where the target was when the store was made, if that is still known and there."""
    identity = info.get("store", {}).get("identity", {}).get("target", {})
    if identity.get("kind") == "hub":
        return str(identity["name"])
    for record in reversed(read(info.get("store", {}).get("path", ""), "runs")):
        detail = record["detail"]
        if record["command"] == "extract" and "target" in detail.get("config", {}):
            path = Path(detail.get("provenance", {}).get("cwd", ".")) / Path(detail["config"]["target"]).expanduser()
            if path.exists():
                return str(path)
    return None


def _no_target(run: Path) -> str:
    raise ConfigRefused(f"the target of {run} is not known: its store or the target itself has moved; pass --target")


def require_same_target(known: dict[str, Any], found: dict[str, Any], where: Path, asked: str) -> None:
    """Raise StoreMismatch when a drafter's features, words or template came from another target than asked."""
    for name in SAME:
        if name in known and known[name] != found[name]:
            raise StoreMismatch(
                f"{where} was trained for target {known.get('name')} with {name} {known[name]}, but "
                f"--target {asked} has {found[name]}; pass the target that the store was made from"
            )


def first_drafter(config: DrafterConfig, info: dict[str, Any], where: Path) -> Drafter:
    """The run's drafter before its first step."""
    drafter = Drafter(config)
    if info.get("warm_start"):
        warm_start.load(drafter, info["warm_start"])
    else:
        drafter.initialise(first_seed(info, where))
    return drafter.eval().requires_grad_(False)


def first_seed(info: dict[str, Any], where: Path) -> int:
    """The seed of the run's first weights. Raises ConfigRefused when it is not known (a foreign export)."""
    seed = info.get("config", {}).get("seed")
    if seed is None:
        raise ConfigRefused(f"{where} does not say which seed its training began with; use --untrained on a run")
    return int(seed)
