"""Remove the large arrays of blocks that are safe in a bucket, and have the manifest say where they went.

Only after every byte was read back from there and compared with the block's seal. The block's metadata and small arrays
stay, so that an extraction goes on, sizes are known and the documents can be listed. Called by manifests/store_push.py.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manifests.blocks import MOVED, recorded_blocks
from manifests.commit import Ledger
from manifests.records import ShardRecord
from manifests.runs import is_owned
from shared.atomic import disk_faults
from shared.block_bytes import block_files
from shared.object_files import ObjectFiles
from shared.store_layout import block_name

LARGE = (
    "hidden_states", "hidden_states_q", "last_hidden_state", "last_hidden_state_q", "topk_ids", "topk_logits",
)  # fmt: skip
# A worker reads its first block back right after recording it.
SETTLED_S = 120.0


def free_blocks(store: Path, url: str, blocks: Iterable[int], ledger: Ledger) -> int:
    """Remove what can be removed of these published blocks; returns the bytes given back.

    Raises StoreDamaged when the copy there is not what was recorded: then nothing of that block is touched.
    """
    recorded = recorded_blocks(store)
    settled = time.time() - (SETTLED_S if is_owned(store) else 0.0)
    freed = 0
    for block in sorted(blocks):
        record = recorded.get(block)
        if record is None or record["time"] > settled:
            continue
        if not record["detail"].get(MOVED):
            for _ in block_files(ObjectFiles(url), block, str(record["seal"])):
                pass  # each is compared with the seal
            ledger.append(_moved(record, url))
        freed += _remove(store, block)
    return freed


def _moved(record: Mapping[str, Any], url: str) -> ShardRecord:
    names = {field.name for field in dataclasses.fields(ShardRecord)}
    values = {name: value for name, value in record.items() if name in names}
    return ShardRecord(**{**values, "detail": {**record["detail"], MOVED: url}})


def _remove(store: Path, block: int) -> int:
    freed = 0
    for name in LARGE:
        folder = store / block_name(block) / name / "c"
        if folder.exists():
            with disk_faults(folder):
                freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                shutil.rmtree(folder)
    return freed
