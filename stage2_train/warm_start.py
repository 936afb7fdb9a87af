"""First weights from a drafter that exists (`--warm-start`): is it there, does it fit, is it still the same one.

launch_train.py asks before anything starts (no torch), training_parts.py puts the weights in place. run.json and every
checkpoint keep its record {"path", "weights_sha256", and the INHERITED fields}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import CheckpointMismatch, NonFinite
from shared.json_file import read_object
from stage2_train.checkpoint_folder import DRAFTER_FILE, newest_complete, read_info
from stage2_train.config import TrainConfig
from stage2_train.drafter_config import DrafterConfig

if TYPE_CHECKING:
    from stage2_train.drafter import Drafter

Record = Mapping[str, Any]

# Constants of the arithmetic that no option sets: they belong to the weights, not to the target's config.
INHERITED = ("rope_theta", "rms_norm_eps")
# What the weights were made for, and the option that asks for it. block_size is not among them: no weight depends on
# it, and a smaller block than the one before is a usual way to go on.
OPTIONS = {
    "hidden_size": "",
    "target_hidden_size": "",
    "vocab_size": "",
    "target_layer_ids": "",
    "intermediate_size": "--intermediate-size",
    "num_hidden_layers": "--num-layers",
    "num_attention_heads": "--num-heads",
    "num_key_value_heads": "--num-kv-heads",
    "head_dim": "--head-dim",
    "mask_token_id": "--mask-token-id",
    "layer_types": "--layer-types",
    "sliding_window": "--sliding-window",
    "causal_layers": "--is-causal",
    "shift_labels": "--shift-labels",
    "input_embedding_scale": "",
    "output_multiplier": "",
    "final_logit_softcapping": "",
}
_ANOTHER = "start from another drafter"
# Of what in config.json has shape or arithmetic: its kind.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
            "block_size",
            "mask_token_id",
            "max_position_embeddings",
            "sliding_window",
        ),
        int,
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        int | float,
    ),
    "target_layer_ids": list,
    "layer_types": list,
}
_ITEMS = {"target_layer_ids": int, "layer_types": str}
# Without these there is no geometry; null is no value of theirs.
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
)


def record_for(config: TrainConfig) -> dict[str, Any] | None:
    """The record of the first weights that this command's run has or gets; None for random ones.

    A run that goes on needs neither the option nor the folder again. Raises CheckpointMismatch when the option names no
    drafter, or other weights than the run began with.
    """
    newest, _ = newest_complete(config.run_dir())
    info = read_info(newest) if newest is not None else {}
    known: dict[str, Any] | None = info.get("warm_start")
    asked = config.warm_start
    if asked is None or (known and not asked.exists() and str(asked) == info["config"]["warm_start"]):
        return known
    folder = _folder(asked)
    source = drafter_config(folder)
    record = {"path": str(folder.absolute()), "weights_sha256": _sha256(folder)}
    record |= {name: getattr(source, name) for name in INHERITED}
    if newest is not None and (known or {}).get("weights_sha256") != record["weights_sha256"]:
        began = f"the weights {known['weights_sha256']} of {known['path']}" if known else "random weights"
        raise CheckpointMismatch(
            f"{newest} began with {began}, --warm-start {asked} holds {record['weights_sha256']}; leave the option out "
            "to go on, or choose a new --run folder"
        )
    return record


def inherited(record: Record | None) -> dict[str, Any]:
    """Overrides for drafter_config.drafter_geometry."""
    return {} if record is None else {name: record[name] for name in INHERITED}


def require_fits(record: Record, drafter: DrafterConfig) -> None:
    """Raise CheckpointMismatch, naming the field and both values, when the weights were made for something else."""
    folder = Path(record["path"])
    if not folder.is_dir():
        return  # the run goes on from a checkpoint, whose own geometry is compared
    have, want = _compared(drafter_config(folder)), _compared(drafter)
    for name, option in OPTIONS.items():
        if have[name] != want[name]:
            advice = f"change {option}" if option else "the folder belongs to another target or other taps"
            raise CheckpointMismatch(
                f"--warm-start {folder} has {name} = {have[name]!r}, this run has {want[name]!r}; {advice}"
            )


def load(drafter: Drafter, record: Record) -> None:
    """Overwrite all weights of `drafter`.

    Raises CheckpointMismatch when the folder has changed since its record, NonFinite for weights that are no numbers:
    every rank reads the whole file, so all do. The run would find out too, and blame its learning rate.
    """
    from stage2_train.checkpoint import load_drafter

    folder = Path(record["path"])
    found = _sha256(_folder(folder))
    if found != record["weights_sha256"]:
        raise CheckpointMismatch(
            f"the weights in {folder} were {record['weights_sha256']} when the run began and are {found} now; "
            "start a new --run"
        )
    source, _, _ = load_drafter(folder, "restore the file, or pass another --warm-start")
    for name, weight in source.state_dict().items():
        if bad := int((~weight.isfinite()).sum()):
            raise NonFinite(
                f"--warm-start {_weights(folder)}: {bad:,} of the {weight.numel():,} numbers in tensor {name} are not "
                "finite; restore the file or pass another drafter"
            )
    drafter.load_state_dict(source.state_dict())


def begin(drafter: Drafter, run: Mapping[str, Any], run_dir: Path) -> Record | None:
    """Give a run without a checkpoint its first weights; returns their record, None when nothing was to be done."""
    record: Record | None = run.get("warm_start")
    if record is None or newest_complete(run_dir)[0] is not None:
        return None
    load(drafter, record)
    return record


def drafter_config(folder: Path) -> DrafterConfig:
    """The geometry in a folder's config.json. Raises CheckpointMismatch when it is not a drafter's, or of a kind that
    this project's drafter is not.
    """
    path = folder / "config.json"
    described = read_object(path, "pass the folder of a drafter")
    _require_types(path, described)
    _require_known_arithmetic(path, described)
    try:
        return DrafterConfig.from_hf_config(described)
    except KeyError as error:
        raise CheckpointMismatch(f"{path} has no {error.args[0]}; it is not a drafter's") from error


def _require_types(path: Path, described: Mapping[str, Any]) -> None:
    """Where config.json says something, it must be of a kind that a drafter's geometry can be made of."""
    nested = described.get("dflash_config")
    if not isinstance(nested, dict | None):
        raise CheckpointMismatch(f"{path} has dflash_config = {nested!r}, not an object; it is not a drafter's")
    for name, value in [*described.items(), *(nested or {}).items()]:
        kind = _KINDS.get(name)
        if kind is None or (value is None and name not in _NEEDED):
            continue
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is list and not all(isinstance(item, _ITEMS[name]) for item in value)):
            raise CheckpointMismatch(f"{path} has {name} = {value!r}; it is not a drafter's")


def _require_known_arithmetic(path: Path, described: Mapping[str, Any]) -> None:
    """Weights that were made under another rotary embedding or activation would be wrong here, and nothing would say
    so: their shapes are the same.
    """
    activation = described.get("hidden_act") or "silu"
    if activation != "silu":
        raise CheckpointMismatch(f"{path} has hidden_act = {activation!r}, a drafter here has 'silu'; {_ANOTHER}")
    for name in ("rope_scaling", "rope_parameters"):
        given = described.get(name)
        if given is None:
            continue
        # One object, or one for each layer type.
        kinds = [given] if not isinstance(given, dict) or "full_attention" not in given else list(given.values())
        for kind in kinds:
            found = kind.get("rope_type", kind.get("type", "default")) if isinstance(kind, dict) else kind
            if found != "default":
                raise CheckpointMismatch(
                    f"{path} has {name} of type {found!r}, a drafter here has 'default'; {_ANOTHER}"
                )


def _compared(config: DrafterConfig) -> dict[str, Any]:
    kinds = config.layer_kinds()
    windows = {kind.window for kind in kinds if kind.window is not None}
    found = {name: getattr(config, name) for name in OPTIONS if name != "causal_layers"}
    # A window that no layer uses means nothing, and causality has a default that depends on the layer.
    return found | {
        "sliding_window": next(iter(windows), None),
        "causal_layers": [number for number, kind in enumerate(kinds) if kind.causal],
    }


def _folder(asked: Path) -> Path:
    """The folder itself, or a run's newest complete checkpoint."""
    if (asked / "config.json").is_file():
        return asked
    newest = newest_complete(asked)[0] if asked.is_dir() else None
    if newest is None:
        raise CheckpointMismatch(
            f"--warm-start {asked} is neither a drafter's folder (config.json, model.safetensors) nor a run with a "
            "complete checkpoint"
        )
    return newest


def _sha256(folder: Path) -> str:
    """sha256 of the file with the weights."""
    with _weights(folder).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(folder: Path) -> Path:
    for name in (DRAFTER_FILE, "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointMismatch(f"{folder} has a config.json but no weights in one file (model.safetensors)")
