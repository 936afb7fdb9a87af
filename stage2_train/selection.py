"""Which documents of a store are trained on or held out, and how many steps they make. No torch.

Called by pinned_store.py, launch_train.py (parent) and training_parts.py (workers). Next: packing.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manifests import blocks
from shared.documents import Documents
from shared.json_file import require_keys
from shared.store import TeacherStore, read_identity
from stage2_train.anchors import eligible_anchors
from stage2_train.config import TrainConfig
from stage2_train.packing import batches_in, epoch_rows

# What training asks of every store.
IDENTITY_KEYS = ("target_layer_ids", "num_hidden_layers", "hidden_size", "vocab_size")
# Loss masks that are read before a start, at most. Nearly always the first one does; of millions without an anchor,
# in a bucket, the reading would take hours, and the training finds out within an epoch (train.py).
MASKS_READ = 256


def open_store(location: Path | str, *, partial: bool = False) -> TeacherStore:
    """A finished store, or with `partial` the blocks that it has by now.

    Raises StoreMissing, StoreDamaged or StoreIncomplete.
    """
    identity = read_identity(location)
    require_keys(identity, IDENTITY_KEYS, f"{location}/store.json", "restore it or extract again")
    return blocks.open_store(location, partial=partial)


def select(store: TeacherStore, split: str) -> tuple[Documents, int]:
    """Documents of a split in the order of the prepared data, and how many were left out for having no anchor.

    An anchor and its first label are two supervised tokens, so fewer cannot be trained on.
    """
    documents = store.documents
    found = np.flatnonzero(documents.heldout == (split == "heldout"))
    found = found[np.argsort(documents.index[found], kind="stable")]
    kept = found[documents.n_supervised[found] >= 2]
    return documents.take(kept), len(found) - len(kept)


def has_an_anchor(store: TeacherStore, documents: Documents, max_length: int) -> bool | None:
    """Whether any document has two supervised tokens in a row before it is cut; None: not among those looked at.

    Of k tokens without two supervised ones in a row, at most (k + 1) / 2 are supervised: most documents have more, and
    no mask is read. Raises StoreDamaged.
    """
    kept = np.minimum(documents.length, max_length)
    least = documents.n_supervised - (documents.length - kept)
    if (2 * least > kept + 1).any():
        return True
    for document in documents[:MASKS_READ]:
        ref = dataclasses.replace(document, length=min(document.length, max_length))
        if len(eligible_anchors(store.read_document(ref, ("loss_mask",))["loss_mask"])):
            return True
    return False if len(documents) <= MASKS_READ else None


def nothing_to_learn(store: Path | str, max_length: int) -> str:
    """What to tell the user of training documents without an anchor."""
    return (
        f"{store} has no training document with two supervised tokens in a row among its first {max_length:,} "
        "(--max-length), so there is nothing to predict; raise --max-length if prompts fill it, or prepare other data"
    )


def total_steps(lengths: Sequence[int] | np.ndarray[Any, Any], config: TrainConfig) -> int:
    """Optimizer steps in config.epochs passes over documents of these lengths (each epoch packs differently)."""
    return sum(
        batches_in(epoch_rows(lengths, config.max_length, config.seed, epoch), config.batch_rows)
        for epoch in range(config.epochs)
    )
