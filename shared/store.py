"""The teacher store: write a block once, read documents at random. The only module that imports zarr.

Called by stage 1's workers (`create`, `write_block`) and stage 2's loader (`TeacherStore`). The layout is in
shared/store_layout.py; issue-level promises (who is done) live in the shard records of the manifest.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.atomic import aside, disk_faults, publish_dir, write_json
from shared.errors import StoreDamaged, StoreMismatch, StoreMissing
from shared.json_file import read_object
from shared.shard_file import ShardGrid, read_index, read_rows, write_shards
from shared.store_layout import ARRAYS, STORE_FORMAT, block_dir, chunks_of

Arrays = dict[str, np.ndarray[Any, Any]]


def create(store: Path, identity: dict[str, Any]) -> None:
    """Make an empty store with this identity; an existing one must have the same (StoreMismatch otherwise)."""
    existing = read_identity(store) if (store / "store.json").exists() else None
    if existing is not None:
        require_same(existing, identity, store)
        return
    with disk_faults(store):
        (store / "blocks").mkdir(parents=True, exist_ok=True)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"dflash_format": STORE_FORMAT}}
    write_json(store / "zarr.json", group)
    write_json(store / "blocks" / "zarr.json", group)
    write_json(store / "store.json", {"format": STORE_FORMAT, **identity})


def read_identity(store: Path) -> dict[str, Any]:
    """What the store was made from. Raises StoreMissing, StoreDamaged, or StoreMismatch for another format."""
    path = store / "store.json"
    if not path.is_file():
        raise StoreMissing(f"no teacher store at {store} (no store.json); make one with `dflash extract --out {store}`")
    identity = read_object(path, "restore it or extract again")
    if identity.get("format") != STORE_FORMAT:
        raise StoreMismatch(
            f"{store} has format {identity.get('format')}, this version reads {STORE_FORMAT}; extract again"
        )
    return identity


def require_same(existing: dict[str, Any], asked: dict[str, Any], where: Path) -> None:
    """Refuse when any field asked for differs from what the store says.

    Raises StoreMismatch naming the field and both values; nested fields are named with dots.
    """
    for field, (have, want) in differences(existing, asked).items():
        raise StoreMismatch(
            f"{where} was made with {field} = {have!r}, this command asks {want!r}; "
            "use the same settings or another --out"
        )


def differences(existing: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields of `asked` whose value in `existing` differs: {dotted name: (existing, asked)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, want in asked.items():
        have = existing.get(key)
        if isinstance(want, dict) and isinstance(have, dict):
            found.update(differences(have, want, f"{prefix}{key}."))
        elif have != (list(want) if isinstance(want, tuple) else want):
            found[prefix + key] = (have, want)
    return found


def write_block(store: Path, block: int, arrays: Arrays) -> dict[str, Any]:
    """Write one block of whole documents and publish it by rename.

    `arrays` hold every array of shared.store_layout.ARRAYS that the store keeps, with those dtypes (document_supervised
    is counted here); per-token arrays have N rows, document_offsets D + 1, the other per-document arrays D. Returns
    {"tokens", "documents", "bytes", "files"}. Raises FileExistsError if the block is there already, DiskFull, or
    ValueError for our own mistakes.
    """
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec

    _check_shapes(arrays)
    # Kept per document so that opening a store never reads its token arrays.
    sums = np.concatenate([[0], np.cumsum(arrays["loss_mask"], dtype=np.int64)])
    offsets = arrays["document_offsets"]
    arrays = arrays | {"document_supervised": sums[offsets[1:]] - sums[offsets[:-1]]}
    final = block_dir(store, block)
    with aside(final) as temporary, warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.create_group(temporary, zarr_format=3)
        for name, values in arrays.items():
            layout = ARRAYS[name]
            chunk, shard = chunks_of(name, values.shape)
            group.create_array(
                name,
                shape=values.shape,
                dtype=layout.dtype,
                chunks=chunk,
                shards=shard,
                fill_value=layout.fill,
                compressors=[Crc32cCodec()],
                serializer=BytesCodec(endian="little"),
                filters=None,
                attributes={"bits_of": layout.bits_of},
            )
            write_shards(_grid(temporary, name, values.shape), values)
        files = [path for path in temporary.rglob("*") if path.is_file()]
        record = {
            "tokens": int(arrays["input_ids"].shape[0]),
            "documents": int(arrays["document_index"].shape[0]),
            "bytes": sum(path.stat().st_size for path in files),
            "files": len(files),
        }
        publish_dir(temporary, final)
    return record


def _grid(folder: Path, name: str, shape: tuple[int, ...]) -> ShardGrid:
    layout = ARRAYS[name]
    chunk, shard = chunks_of(name, shape)
    return ShardGrid(folder / name, np.dtype(layout.dtype), shape, chunk[0], shard[0], layout.fill)


def _open_block(store: Path, block: int) -> dict[str, ShardGrid]:
    """Grids of a block's arrays from its Zarr metadata, which must be what this layout writes."""
    folder = block_dir(store, block)
    if not (folder / "zarr.json").is_file():
        raise StoreDamaged(
            f"block {block} of {store} is recorded as done but {folder} is missing; "
            "run the same `dflash extract` command to make it again"
        )
    grids = {}
    for name, layout in ARRAYS.items():
        path = folder / name / "zarr.json"
        if not path.is_file():
            continue
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            shape = tuple(int(size) for size in meta["shape"])
            grid = _grid(folder, name, shape)
            shard_rows = meta["chunk_grid"]["configuration"]["chunk_shape"][0]
            (codec,) = meta["codecs"]
            names = [inner["name"] for inner in codec["configuration"]["codecs"]]
            chunk_rows = codec["configuration"]["chunk_shape"][0]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(f"{path} is damaged: {error!r}; extract this block again") from error
        found = (meta["data_type"], codec["name"], names, chunk_rows, shard_rows)
        asked = (layout.dtype, "sharding_indexed", ["bytes", "crc32c"], grid.chunk_rows, grid.shard_rows)
        if found != asked:
            raise StoreDamaged(f"{path} says {found}, this layout is {asked}; extract this block again")
        grids[name] = grid
    return grids


def _check_shapes(arrays: Arrays) -> None:
    tokens = arrays["input_ids"].shape[0]
    offsets = arrays["document_offsets"]
    for name, values in arrays.items():
        layout = ARRAYS[name]
        if values.dtype != np.dtype(layout.dtype):
            raise ValueError(f"{name} has dtype {values.dtype}, the layout says {layout.dtype}")
        rows = tokens if layout.per_token else len(offsets) - (name != "document_offsets")
        if values.shape[0] != rows:
            raise ValueError(f"{name} has {values.shape[0]} rows, {rows} expected")
    if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) <= 0).any():
        raise ValueError("document_offsets must rise from 0 to the number of tokens")


@dataclass(frozen=True)
class DocumentRef:
    """Where one document lies: row number in the prepared data, block, first token in it, tokens, split, supervised."""

    index: int
    block: int
    start: int
    length: int
    split: str
    n_supervised: int


class TeacherStore:
    """A store opened for reading; safe to share between threads."""

    def __init__(self, path: Path, blocks: Iterable[int]) -> None:
        self.path = path
        self.identity = read_identity(path)
        self.target_dir = path / "target"
        self._blocks: dict[int, dict[str, ShardGrid]] = {}
        self._checked: set[tuple[int, str, int]] = set()
        self._lock = threading.Lock()
        self.documents: list[DocumentRef] = []
        for block in sorted(blocks):
            self.documents.extend(self._documents_of(block))

    def _documents_of(self, block: int) -> list[DocumentRef]:
        offsets = self._read(block, "document_offsets", slice(None))
        index = self._read(block, "document_index", slice(None))
        split = self._read(block, "document_split", slice(None))
        supervised = self._read(block, "document_supervised", slice(None))
        return [
            DocumentRef(
                int(index[i]),
                block,
                int(offsets[i]),
                int(offsets[i + 1] - offsets[i]),
                "heldout" if split[i] else "train",
                int(supervised[i]),
            )
            for i in range(len(index))
        ]

    def _grids(self, block: int) -> dict[str, ShardGrid]:
        """The arrays of a block; their metadata and shard indices are checked once, when first asked for."""
        with self._lock:
            if block not in self._blocks:
                self._blocks[block] = _open_block(self.path, block)
            return self._blocks[block]

    def _read(self, block: int, name: str, rows: slice) -> np.ndarray[Any, Any]:
        grids = self._grids(block)
        folder = block_dir(self.path, block)
        if name not in grids:
            raise StoreDamaged(
                f"array {name} of block {block} is not in {folder}; the store was made without it or lost it"
            )
        grid = grids[name]
        start, stop, _ = rows.indices(grid.shape[0])
        try:
            for shard in range(start // grid.shard_rows, -(-stop // grid.shard_rows)):
                if (block, name, shard) not in self._checked:
                    read_index(grid, shard)
                    self._checked.add((block, name, shard))
            out = np.empty((stop - start, *grid.row_shape), grid.dtype)
            read_rows(grid, start, stop, out)
        except StoreDamaged as error:
            raise StoreDamaged(
                f"array {name} of block {block}, rows {start}..{stop}: {error}; delete the folder {folder} and run "
                "the same `dflash extract` command: it makes missing blocks again"
            ) from error
        return out

    def read_document(
        self, ref: DocumentRef, names: Iterable[str] = ("hidden_states", "input_ids", "loss_mask")
    ) -> Arrays:
        """The named per-token arrays of one document; bf16 arrays come as uint16 bits. Raises StoreDamaged."""
        rows = slice(ref.start, ref.start + ref.length)
        return {name: self._read(ref.block, name, rows) for name in names}

    def load_head(self) -> dict[str, Any]:
        """{"embed_tokens": [V, H], "lm_head": [V, H], "norm": [H]} as torch tensors; tied heads are the same tensor."""
        from shared.tensors import read_tensors

        path = self.target_dir / "head.safetensors"
        tensors = read_tensors(
            path, f"delete {self.target_dir} and run the same `dflash extract` command: it is made again"
        )
        embed = tensors["embed_tokens.weight"]
        return {"embed_tokens": embed, "lm_head": tensors.get("lm_head.weight", embed), "norm": tensors["norm.weight"]}
