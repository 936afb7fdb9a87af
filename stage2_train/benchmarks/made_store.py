"""A sealed store of random rows at the shape of a real drafter, and the training command that fits it.

Used by the benchmarks of stage 2. Written by the writers of `dflash extract`; only the values are made up: every block
holds the same features, since making new ones would take longer than all that is measured.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import ConfigRefused
from shared.progress import progress, say

if TYPE_CHECKING:
    from torch import Tensor

    from stage2_train.config import TrainConfig
    from stage2_train.drafter_config import DrafterConfig

Arrays = dict[str, np.ndarray[Any, Any]]
# Drawn once and repeated: a matrix product neither knows nor cares, as long as the values are spread like real ones.
_DRAWN = 1 << 22
_PROMPT = 64
# Larger than any run: a benchmark neither estimates nor saves unless it asks for it.
NEVER = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a target, its drafter and a training row."""

    hidden: int
    intermediate: int
    vocab: int
    target_layers: int
    taps: tuple[int, ...]
    layers: int
    max_length: int
    anchors: int
    block_size: int

    def geometry(self) -> DrafterConfig:
        """The drafter that `dflash train` makes for this target."""
        from stage2_train.drafter_config import drafter_geometry

        given = {
            "block_size": self.block_size,
            "mask_token_id": self.vocab - 1,
            "target_layer_ids": self.taps,
            "num_hidden_layers": self.layers,
        }
        return drafter_geometry(self.target_config(), given)

    def target_config(self) -> dict[str, Any]:
        """config.json of the made-up target."""
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.target_layers,
            "rope_theta": 1e7,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        }

    def train_config(self, store: Path, run: Path, **changes: Any) -> TrainConfig:
        """One row per process and step; no estimate, no checkpoint before the end.

        The paper's objective, as in the plain version: a made store has no teacher logits.
        """
        from stage2_train.config import TrainConfig

        fields: dict[str, Any] = {
            "store": str(store), "run": run, "batch_rows": 1, "max_length": self.max_length, "anchors": self.anchors,
            "block_size": self.block_size, "num_layers": self.layers, "eval_every": NEVER, "save_every": NEVER,
            "loss": "ce", "weighting": "decay", **changes,
        }  # fmt: skip
        return TrainConfig(**fields)


SHAPES = {
    # The text part of Qwen3.5-27B and the drafter published for it.
    "27b": Shape(
        hidden=5120, intermediate=17408, vocab=248320, target_layers=64, taps=(1, 16, 31, 46, 61), layers=5,
        max_length=16384, anchors=2048, block_size=16,
    ),
    "8b": Shape(
        hidden=4096, intermediate=12288, vocab=151936, target_layers=36, taps=(1, 9, 17, 25, 33), layers=5,
        max_length=16384, anchors=2048, block_size=16,
    ),
    # No two sizes alike, as in a real one: the profile tells products apart by them.
    "toy": Shape(
        hidden=96, intermediate=144, vocab=336, target_layers=6, taps=(1, 4), layers=2,
        max_length=224, anchors=13, block_size=4,
    ),
}  # fmt: skip


def fitting(shape: str, anchors: int | None, max_length: int | None) -> Shape:
    """A named shape with its row changed. Raises ConfigRefused for an unknown name."""
    if shape not in SHAPES:
        raise ConfigRefused(f"--shape {shape!r} is unknown; there are {', '.join(SHAPES)}")
    found = SHAPES[shape]
    return dataclasses.replace(found, anchors=anchors or found.anchors, max_length=max_length or found.max_length)


def train_options(text: str) -> dict[str, Any]:
    """Fields of TrainConfig from "name=value name=value"; values are read as JSON where they can be."""
    found: dict[str, Any] = {}
    for part in text.split():
        name, given, value = part.partition("=")
        if not given:
            raise ConfigRefused(f"{part!r} is not NAME=VALUE")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


def make_store(path: Path, shape: Shape, rows: int, document: int, precision: str = "bfloat16") -> Path:
    """Write a finished store of `rows` full rows, a block each, of documents of `document` tokens.

    One that is there already and was made for the same sizes is kept. Raises StoreMismatch when it was made for
    others, ConfigRefused when it was left half made.
    """
    from manifests.blocks import recorded_blocks
    from shared.atomic import write_json
    from shared.json_file import sealed
    from shared.store_write import create

    lengths = [document] * (shape.max_length // document)
    if left := shape.max_length - sum(lengths):
        lengths.append(left)
    identity = {
        "target": {
            "name": "made up", "weights_sha256": "0", "hidden_size": shape.hidden, "vocab_size": shape.vocab,
            "num_hidden_layers": shape.target_layers,
        },
        "target_layer_ids": list(shape.taps), "num_hidden_layers": shape.target_layers, "hidden_size": shape.hidden,
        "vocab_size": shape.vocab, "mask_token_id": shape.vocab - 1, "topk": 0, "dtype": "bfloat16",
        "precision": precision, "last_hidden": "none", "rows_sha256": f"made up: {rows} x {lengths}",
    }  # fmt: skip
    existed = (path / "store.json").exists()
    create(path, identity)
    if existed:
        if len(recorded_blocks(path)) != rows or not (path / "target" / "files.json").exists():
            raise ConfigRefused(f"{path} was left half made; delete it and run the same command again")
        say(f"keeping the store {path}")
        return path
    _write_target(path / "target", shape)
    count = len(lengths)
    write_json(path / "plan.json", sealed({"blocks": [[i * count, (i + 1) * count] for i in range(rows)]}))
    arrays = _features(shape, precision)
    with progress("write a store", total=rows, unit="rows", title="benchmark") as bar:
        for block in range(rows):
            _write_block(path, block, lengths, arrays | _tokens(shape, lengths, block))
            bar.advance(1)
    return path


def _write_block(path: Path, block: int, lengths: list[int], arrays: Arrays) -> None:
    from manifests.commit import Ledger
    from manifests.records import DocumentRecord, ShardRecord
    from shared.store_write import write_block

    done = write_block(path, block, arrays)
    ends = arrays["document_offsets"]
    documents = [
        DocumentRecord(
            document_index=int(index), doc_id=f"made-{index}", source="made.jsonl", line=int(index) + 1,
            n_tokens=lengths[i], n_supervised=int(arrays["loss_mask"][ends[i] : ends[i + 1]].sum()), split="train",
            block=block, topk_mass=0.0, token_sha=f"{index:016x}", seal=done["seal"],
        )
        for i, index in enumerate(arrays["document_index"])
    ]  # fmt: skip
    shard = ShardRecord(
        block=block, rank=0, documents=done["documents"], tokens=done["tokens"], bytes=done["bytes"],
        seal=done["seal"], seconds=0.0,
    )  # fmt: skip
    ledger = Ledger(path, "made")
    ledger.append(*documents)
    ledger.append(shard)


def _tokens(shape: Shape, lengths: list[int], block: int) -> Arrays:
    """Ids, loss mask and documents of one block; the start of every document is a prompt."""
    ids = np.random.default_rng(block).integers(0, shape.vocab - 1, sum(lengths), dtype=np.int32)
    prompts = [min(_PROMPT, length // 4) for length in lengths]
    masks = [np.repeat(np.array([0, 1], np.uint8), [p, n - p]) for p, n in zip(prompts, lengths, strict=True)]
    count = len(lengths)
    return {
        "input_ids": ids,
        "loss_mask": np.concatenate(masks),
        "document_offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "document_index": np.arange(block * count, (block + 1) * count, dtype=np.int64),
        "document_split": np.zeros(count, np.uint8),
    }


def _features(shape: Shape, precision: str) -> Arrays:
    """Random features of one row, normally distributed, as a store of this precision keeps them."""
    return stored_features(drawn((shape.max_length, len(shape.taps), shape.hidden), 1.0, seed=1), precision)


def stored_features(values: Tensor, precision: str) -> Arrays:
    """A block's arrays for features bf16 [N,L,H]; in an 8-bit store a NaN value is a NaN token scale."""
    import torch

    from shared.quantise import channel_scales, encode

    if precision == "bfloat16":
        return {"hidden_states": values.view(torch.int16).numpy().view(np.uint16)}
    channels = channel_scales(values)
    encoded = encode(values, channels)
    return {
        "hidden_states_q": encoded.codes.numpy(),
        "hidden_states_scale": encoded.scales.numpy(),
        "hidden_states_channel": channels.numpy(),
    }


def drawn(shape: tuple[int, ...], scale: float, seed: int, device: str = "cpu") -> Any:
    """bf16 tensor of normal values: some millions drawn, then repeated with an odd period."""
    import torch

    size = int(np.prod(shape))
    generator = torch.Generator(device).manual_seed(seed)
    base = torch.randn(min(size, _DRAWN + 1), generator=generator, device=device) * scale
    return base.to(torch.bfloat16).repeat(-(-size // len(base)))[:size].view(shape)


def _write_target(folder: Path, shape: Shape) -> None:
    import torch
    from safetensors.torch import save_file

    from shared.target_files import write_list

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.target_config()))
    tables = {
        "embed_tokens.weight": drawn((shape.vocab, shape.hidden), 0.02, seed=2),
        "lm_head.weight": drawn((shape.vocab, shape.hidden), 0.02, seed=3),
        "norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }
    save_file(tables, folder / "head.safetensors")
    write_list(folder)
