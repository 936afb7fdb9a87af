"""The teacher store, opened for reading: documents at random, each chunk checked against the block's seal.

Made by shared/store_write.py; opened through manifests/blocks.py, which knows what is done. The layout is in
shared/store_layout.py, the checks in shared/seal.py and shared/shard_file.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shared.documents import DocumentRef, Documents, read_index
from shared.errors import StoreDamaged, StoreMismatch, StoreMissing
from shared.json_file import parse_object, require_sealed
from shared.seal import Sealed, check_metadata, digest, read_seal
from shared.shard_file import Array, check_index, read_rows
from shared.store_files import LocalFiles, is_remote, open_files
from shared.store_layout import STORE_FORMAT
from shared.target_files import damaged

Arrays = dict[str, np.ndarray[Any, Any]]
# Seals of this many blocks stay in memory: 30-120 KB each.
_SEALS = 4096
_REQUESTS = 16


def read_identity(location: Path | str) -> dict[str, Any]:
    """What the store was made from. Raises StoreMissing, StoreDamaged, or StoreMismatch for another format."""
    files = open_files(location)
    try:
        data = files.read_bytes("store.json")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMissing(
            f"no teacher store at {location} (no store.json); make one with `dflash extract --out {location}`"
        ) from error
    advice = "restore it or extract again"
    identity = parse_object(data, files.show("store.json"), advice)
    if "crc32c" in identity:  # formats before the second had none
        require_sealed(identity, files.show("store.json"), advice)
    if identity.get("format") != STORE_FORMAT:
        raise StoreMismatch(
            f"{location} has format {identity.get('format')}, this version reads {STORE_FORMAT}; extract to another "
            "place and remove this store"
        )
    require_sealed(identity, files.show("store.json"), advice)
    return identity


def require_same(existing: Mapping[str, Any], asked: Mapping[str, Any], where: Path | str) -> None:
    """Refuse when any field asked for differs from what the store says.

    Raises StoreMismatch naming the field and both values; nested fields are named with dots.
    """
    for field, (have, want) in differences(existing, asked).items():
        raise StoreMismatch(
            f"{where} was made with {field} = {have!r}, this command asks {want!r}; "
            "use the same settings or another --out"
        )


def differences(existing: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields of `asked` whose value in `existing` differs: {dotted name: (existing, asked)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, want in asked.items():
        have = existing.get(key)
        if isinstance(want, dict) and isinstance(have, dict):
            found.update(differences(have, want, f"{prefix}{key}."))
        elif have != (list(want) if isinstance(want, tuple) else want):
            found[prefix + key] = (have, want)
    return found


def maker_of(identity: Mapping[str, Any]) -> str:
    """The command that made a store and goes on with it: `dflash extract`, or `dflash store merge` or `subset`."""
    return f"`dflash {identity.get('made_by', 'extract')}`"


def all_differences(existing: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """As `differences`, and also the fields that only `existing` has."""
    reverse = {field: (have, want) for field, (want, have) in differences(asked, existing).items()}
    return differences(existing, asked) | reverse


def comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without what may differ between stores of the same content: their id, the target's name and place."""
    target = {key: value for key, value in identity["target"].items() if key not in ("name", "kind", "revision")}
    return {key: value for key, value in identity.items() if key not in ("store_uuid", "crc32c")} | {"target": target}


def snapshot_of(blocks: Mapping[int, str]) -> str:
    """One hash over which blocks there are and what is in them: what a training run pins."""
    return digest("".join(f"{block} {seal}\n" for block, seal in sorted(blocks.items())).encode())


class TeacherStore:
    """A store opened for reading; safe to share between threads.

    `blocks` says which blocks are done and the seal that each was recorded with. Reading raises StoreDamaged naming
    array, block, rows, file and what to do.
    """

    def __init__(self, location: Path | str, blocks: Mapping[int, str]) -> None:
        self.location = str(location)
        self.files = open_files(location)
        self.identity = read_identity(location)
        self.blocks = dict(blocks)
        self.snapshot = snapshot_of(blocks)
        self._seals: OrderedDict[int, Sealed] = OrderedDict()
        self._checked: set[tuple[int, str, int]] = set()
        self._lock = threading.Lock()
        self._documents: Documents | None = None
        self._target_copy: Path | None = None
        # A bucket answers late but many at once.
        self._requests = None if isinstance(self.files, LocalFiles) else ThreadPoolExecutor(_REQUESTS, "store-request")

    @property
    def target_dir(self) -> Path:
        """The folder with the target's config, tokenizer and head; a copy when the store is in a bucket."""
        if isinstance(self.files, LocalFiles):
            return self.files.root / "target"
        if self._target_copy is None:
            from shared.object_files import local_copy

            self._target_copy = local_copy(self.files, "target")
        return self._target_copy

    @property
    def documents(self) -> Documents:
        """All documents of all blocks, block by block: from the cache of this snapshot, or read from the blocks."""
        if self._documents is None:
            self._documents = read_index(self.files, self.snapshot)
        if self._documents is None:
            self._documents = self.documents_in_blocks()
        return self._documents

    def documents_in_blocks(self) -> Documents:
        """As `documents`, past any cache."""
        with ThreadPoolExecutor(8, thread_name_prefix="open-store") as pool:
            return Documents.concatenate(list(pool.map(self._documents_of, sorted(self.blocks))))

    def _documents_of(self, block: int) -> Documents:
        names = ("document_offsets", "document_index", "document_split", "document_supervised")
        offsets, index, split, supervised = (self.read_block_array(block, name) for name in names)
        return Documents(
            {
                "index": index,
                "block": np.full(len(index), block),
                "start": offsets[:-1],
                "length": np.diff(offsets),
                "n_supervised": supervised,
                "heldout": split != 0,
            }
        )

    def sealed(self, block: int) -> Sealed:
        """The arrays of a block with their checksums, as its record vouches for them."""
        with self._lock:
            if block in self._seals:
                self._seals.move_to_end(block)
                return self._seals[block]
        try:
            arrays = read_seal(self.files, block, self.blocks[block])
        except StoreDamaged as error:
            raise StoreDamaged(f"block {block} of {self.location}: {error}; {self._advice()}") from error
        with self._lock:
            self._seals[block] = arrays
            if len(self._seals) > _SEALS:
                self._seals.popitem(last=False)
        return arrays

    def _advice(self) -> str:
        if is_remote(self.location):
            return f"verify the store that it was pushed from, then `dflash store push STORE {self.location}` again"
        return (
            f"`dflash store verify {self.location} --repair` sets damaged blocks aside, the same "
            f"{maker_of(self.identity)} command then makes them again"
        )

    def read_block_array(self, block: int, name: str) -> Array:
        """One whole array of a block."""
        return self._read(block, name, slice(None), None)

    def read_document(
        self,
        ref: DocumentRef,
        names: Iterable[str] = ("hidden_states", "input_ids", "loss_mask"),
        out: Mapping[str, Array] | None = None,
    ) -> Arrays:
        """The named per-token arrays of one document; bf16 arrays come as uint16 bits.

        Arrays given in `out` (contiguous, right dtype and shape) are filled in place.
        """
        rows, places = slice(ref.start, ref.start + ref.length), out or {}
        if self._requests is None:
            return {name: self._read(ref.block, name, rows, places.get(name)) for name in names}
        self.sealed(ref.block)  # once, not by each array
        reads = {name: self._requests.submit(self._read, ref.block, name, rows, places.get(name)) for name in names}
        return {name: read.result() for name, read in reads.items()}

    def _read(self, block: int, name: str, rows: slice, out: Array | None) -> Array:
        arrays = self.sealed(block)
        if name not in arrays:
            raise StoreDamaged(
                f"array {name} is not in block {block} of {self.location}; the store was made without it"
            )
        array = arrays[name]
        grid = array.grid
        start, stop, _ = rows.indices(grid.shape[0])
        try:
            if (block, name, -1) not in self._checked:
                check_metadata(self.files, array)
                self._checked.add((block, name, -1))
            for shard in range(start // grid.shard_rows, -(-stop // grid.shard_rows)):
                if (block, name, shard) not in self._checked:
                    check_index(self.files, grid, shard)
                    self._checked.add((block, name, shard))
            if out is None:
                out = np.empty((stop - start, *grid.row_shape), grid.dtype)
            read_rows(self.files, grid, array.sums, start, stop, out)
        except StoreDamaged as error:
            raise StoreDamaged(
                f"array {name} of block {block} of {self.location}, rows {start}..{stop}: {error}; {self._advice()}"
            ) from error
        return out

    def load_head(self) -> dict[str, Any]:
        """{"embed_tokens": [V, H], "lm_head": [V, H], "norm": [H]} as torch tensors; tied heads are the same tensor."""
        from shared.tensors import read_tensors

        advice = f"delete {self.target_dir} and run the same `dflash extract` command: it is made again"
        for name, reason in damaged(LocalFiles(self.target_dir), "", strict=False):
            raise StoreDamaged(f"{self.target_dir / name} {reason}; {advice}")
        tensors = read_tensors(self.target_dir / "head.safetensors", advice)
        embed = tensors["embed_tokens.weight"]
        return {"embed_tokens": embed, "lm_head": tensors.get("lm_head.weight", embed), "norm": tensors["norm.weight"]}
