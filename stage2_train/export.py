"""`dflash export`: a checkpoint to the folder that serving engines read, proven by reading it back.

Written aside, reloaded strictly, compared with the drafter in memory tensor by tensor and by its forward, then renamed:
a folder under its own name is a good one. What is in it: the tensors of the drafter alone (embedding and head are the
target's), config.json, a model card, and where it came from. The card is export_card.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from manifests.commit import read
from manifests.runs import recorded
from shared import provenance
from shared.atomic import aside, publish_dir, require_writable, temporary_dir
from shared.config import to_dict
from shared.errors import CheckpointMismatch, ConfigRefused, DflashError, ExportMismatch
from shared.json_file import read_object
from shared.progress import say, summary
from shared.tensors import write_tensors
from stage2_train.attention import Layout, build_masks
from stage2_train.checkpoint import load_drafter
from stage2_train.config_eval import ExportConfig
from stage2_train.drafter import Drafter
from stage2_train.export_card import model_card
from stage2_train.subject import PROVENANCE_FILE, run_folder

WEIGHTS_FILE = "model.safetensors"
EXPORT_FORMAT = 1


def export(config: ExportConfig) -> Path:
    """Make OUT; an OUT that holds the same drafter already is left as it is.

    Raises CheckpointMismatch (nothing to export), ConfigRefused (OUT holds something else, no --overwrite),
    PathNotWritable, DiskFull, and ExportMismatch when the folder does not read back to the same drafter.
    """
    drafter, _, info = load_drafter(config.run)
    checkpoint = Path(info["path"])
    if "store" not in info:
        raise CheckpointMismatch(f"{checkpoint} is not a checkpoint of `dflash train`; pass a run or a checkpoint")
    require_writable(config.out)
    drafter = drafter.to(getattr(torch, config.dtype))
    origin = origin_of(drafter, info, config)
    if is_taken(config, origin):
        say(f"{config.out} already holds this drafter (step {origin['global_step']}); nothing to do")
        return config.out
    run = run_folder(checkpoint)
    # A run on a read-only place (an archive, a colleague's folder) can be exported, only not noted there.
    noted = run is not None and os.access(run, os.W_OK)
    with recorded(run, "export", to_dict(config)) if run and noted else nullcontext():
        evaluations = [] if run is None else evaluations_of(run, origin["global_step"])
        with aside(config.out) as folder:
            write_folder(folder, drafter, origin, evaluations)
            require_same_drafter(folder, drafter)
            replace_folder(folder, config.out)
    summary("exported", [
        ("drafter", config.out), ("from", checkpoint), ("step", origin["global_step"]),
        ("tensors", f"{len(drafter.state_dict())} in {config.dtype}, reread and equal"),
        ("target", origin["store"]["identity"]["target"]["name"]),
        ("serving", "labels are shifted: not for servers of plain DFlash (README.md)" if drafter.config.shift_labels
         else f"vLLM: num_speculative_tokens = {drafter.config.block_size - 1}"),
    ])  # fmt: skip
    return config.out


def origin_of(drafter: Drafter, info: Mapping[str, Any], config: ExportConfig) -> dict[str, Any]:
    """dflash_offline.json: which weights these are, from which checkpoint, store and target, made by what."""
    return {
        "format": EXPORT_FORMAT, "weights_sha256": weights_sha256(drafter), "dtype": config.dtype,
        "global_step": info["global_step"], "total_steps": info.get("total_steps"), "checkpoint": info["path"],
        "config": info.get("config", {}), "store": info["store"], "warm_start": info.get("warm_start"),
        "exported": time.time(), "provenance": provenance.collect(),
    }  # fmt: skip


def weights_sha256(drafter: Drafter) -> str:
    """sha256 over names, dtypes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_taken(config: ExportConfig, origin: Mapping[str, Any]) -> bool:
    """Whether OUT holds this very drafter. Raises ConfigRefused when it holds anything else, without --overwrite."""
    out = config.out
    if not out.exists() or not any(out.iterdir()):
        return False
    path = out / PROVENANCE_FILE
    have = read_object(path, "choose another --out") if path.is_file() else {}
    if have.get("weights_sha256") == origin["weights_sha256"] and not config.overwrite:
        return True
    if have and config.overwrite:
        return False
    what = f"step {have.get('global_step')} of {have.get('checkpoint')} in {have.get('dtype')}"
    what = what if have else "files that are not an export of ours"
    advice = "pass --overwrite or another --out" if have else "choose another --out"
    raise ConfigRefused(f"{out} holds {what}, this command exports step {origin['global_step']} of "
                        f"{origin['checkpoint']} in {origin['dtype']}; {advice}")  # fmt: skip


def evaluations_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The newest evaluation of each data file at this step."""
    records = [r for r in read(run, "evaluations") if r["global_step"] == step and not r["detail"].get("untrained")]
    found = {record["name"]: record for record in records}
    return [found[name] for name in sorted(found)]


def write_folder(folder: Path, drafter: Drafter, origin: Mapping[str, Any], evaluations: list[dict[str, Any]]) -> None:
    """All files of an export."""
    # Readers of the transformers family refuse a file whose metadata does not name the framework.
    write_tensors(folder / WEIGHTS_FILE, drafter.state_dict(), metadata={"format": "pt"})
    config = drafter.config.to_hf_config() | {"dtype": origin["dtype"]}
    for name, value in (("config.json", config), (PROVENANCE_FILE, origin)):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(drafter.config, origin, evaluations), encoding="utf-8")


def require_same_drafter(folder: Path, drafter: Drafter) -> None:
    """Read the folder back, strictly, and compare it with the drafter in memory. Raises ExportMismatch."""
    try:
        again, config, _ = load_drafter(folder)
    except (DflashError, OSError, ValueError, KeyError) as error:
        raise ExportMismatch(f"the export does not load again: {error}; nothing was published") from error
    if config != drafter.config:
        raise ExportMismatch(f"config.json reads back as {config}, not {drafter.config}; nothing was published")
    stored, own = load_file(folder / WEIGHTS_FILE), drafter.state_dict()
    for name in sorted({*stored, *own}):
        if name not in stored or name not in own or not same_bits(stored[name], own[name]):
            raise ExportMismatch(f"tensor {name} reads back different from the checkpoint; nothing was published")
    for seed in range(3):
        if not torch.equal(probe(again, seed), probe(drafter, seed)):
            raise ExportMismatch(
                "the reloaded drafter computes something else than the checkpoint; nothing was published"
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN equals NaN)."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))  # fmt: skip


@torch.inference_mode()
def probe(drafter: Drafter, seed: int) -> Tensor:
    """Final states of one block after a random context."""
    config, length, size = drafter.config, 7, drafter.config.block_size
    generator, dtype = torch.Generator().manual_seed(seed), drafter.fc.weight.dtype
    features = torch.randn(1, length, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)
    embeds = torch.randn(1, size, config.hidden_size, generator=generator)
    end = torch.tensor([[length]], dtype=torch.int32)
    layout = Layout(torch.zeros_like(end), end, length, size)
    positions = torch.arange(length + size)[None]
    masks = build_masks(layout, drafter.kinds, "sdpa", dtype)
    out: Tensor = drafter(drafter.project_context(features.to(dtype)), embeds.to(dtype), positions[:, :length],
                          positions[:, length:], masks)  # fmt: skip
    return out


def replace_folder(folder: Path, final: Path) -> None:
    """Publish `folder` as `final`; an older export under that name goes away only once the new one is in place."""
    final = Path(os.path.abspath(final))  # noqa: PTH100 - "." cannot be renamed, and links must stay links
    old = None
    if final.exists():
        old = temporary_dir(final)
        old.rmdir()
        final.rename(old)
    try:
        publish_dir(folder, final)
    except BaseException:
        if old is not None:
            old.rename(final)
        raise
    if old is not None:
        shutil.rmtree(old)
