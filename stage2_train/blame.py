"""Who made the numbers bad: one sentence, the same on every rank, with rank, row, document and parameter.

Called by step.py when a loss or a gradient is not finite, before anything is updated, and by estimate.py when its sums
are not. Slow: the run ends here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from stage2_train.batch import Batch
from stage2_train.distributed import Ranks
from stage2_train.gradient import Gradient
from stage2_train.sharding import held_weights

_ADVICE = "lower --learning-rate or raise --warmup-ratio (the last checkpoint is kept)"
_STORED = ("features", "logits or logsumexp")


def blame(parts: Sequence[Batch], loss: float, norm: float, gradient: Gradient, ranks: Ranks, step: int) -> str:
    """What to tell the user. `loss` is this rank's own, `norm` that of the gradient over all ranks; a collective.

    The rank of a bad loss or of a bad stored feature is always known. That of a gradient which overflows in backward
    is known as long as ranks hold whole gradients (ddp): with fsdp only sums over ranks are left.
    """
    bad = gradient.bad()
    lossy = not math.isfinite(loss)
    # A gradient that breaks in backward breaks all that follow: the first one is the last in the module's order.
    named = [index for index, is_bad in enumerate(bad) if is_bad]
    parameter = (named[0] if lossy else named[-1]) if named else -1
    stored = _bad_features(parts)
    table = ranks.gather([lossy, parameter, *(stored if stored.row >= 0 else _bad_teacher(parts))])
    for key in (2, 0, 1):  # what was read explains a bad loss, a bad loss explains bad gradients
        found = [rank for rank, line in enumerate(table) if (line[key] > 0 if key == 0 else line[key] >= 0)]
        if found:
            return _sentence(found[0], key, table, gradient, step)
    return f"the gradient norm over all ranks is {norm} at step {step}, every single gradient is finite; {_ADVICE}"


def blame_estimate(suspects: Iterable[Batch], drafter: nn.Module, ranks: Ranks, step: int) -> str:
    """What to tell the user of held-out sums that are not finite; a collective.

    `suspects`: batches of this rank whose counts were not finite. Weights break every document, so what was read is
    asked first: a document that is broken says nothing about weights.
    """
    document = next((found for batch in suspects if (found := _bad_features([batch]).document) >= 0), -1)
    held = held_weights(drafter)
    largest = [float(weight.abs().max()) if weight.numel() else 0.0 for weight in held.values()]
    broken = next((index for index, size in enumerate(largest) if not math.isfinite(size)), -1)
    table = ranks.gather([document, broken, max((size for size in largest if math.isfinite(size)), default=0.0)])
    for rank, (number, _, _) in enumerate(table):
        if number >= 0:
            cause = (
                f"rank {rank} read features of held-out document {int(number)} that are not finite: extract it again"
            )
            return f"non-finite held-out estimate at step {step}; {cause}"
    named = [int(index) for _, index, _ in table if index >= 0]
    cause = f"all stored features are finite, weights are up to {max(size for _, _, size in table):.3g}"
    if named:
        cause = f"all stored features are finite, the weight {list(held)[min(named)]} is not"
    return f"non-finite held-out estimate at step {step}; {cause}: {_ADVICE}"


def _sentence(rank: int, key: int, table: list[list[float]], gradient: Gradient, step: int) -> str:
    """About the rank whose column `key` says something."""
    lossy, parameter, row, document, stored = (int(value) for value in table[rank])
    if parameter < 0 or (gradient.sharded and not lossy):
        candidates = [int(line[1]) for line in table if line[1] >= 0]
        parameter = max(candidates) if candidates else -1
    known = key != 1 or not gradient.sharded
    where = f"rank {rank}" if known else "a rank (fsdp keeps only sums over ranks)"
    what = "loss" if lossy else "gradient" if parameter >= 0 else "teacher"
    tensor = f"first bad gradient {gradient.names[parameter]}" if parameter >= 0 else "all gradients finite"
    cause = (
        f"the stored {_STORED[stored]} of row {row}, document {document} are not finite: extract it again"
        if row >= 0
        else f"all stored features are finite: {_ADVICE}"
    )
    return f"non-finite {what} on {where} at step {step}, before the update; {tensor}; {cause}"


class _Bad(NamedTuple):
    """A row of this rank, the document, and which of _STORED is not finite there; -1 when nothing is."""

    row: int = -1
    document: int = -1
    stored: int = -1


def _bad_features(parts: Sequence[Batch]) -> _Bad:
    for row, (batch, own) in enumerate(_rows(parts)):
        fine = batch.finite_tokens(own)
        if not fine.all():
            return _Bad(row, batch.document_at(own, int(fine.argmin())), 0)
    return _Bad()


def _bad_teacher(parts: Sequence[Batch]) -> _Bad:
    for row, (batch, own) in enumerate(_rows(parts)):
        broken = batch.broken_blocks(own)
        if broken.any():
            return _Bad(row, batch.document_at(own, int(batch.start[own, broken.argmax()])), 1)
    return _Bad()


def _rows(parts: Sequence[Batch]) -> list[tuple[Batch, int]]:
    """All rows of the micro-batches: where each lies and its number there."""
    return [(batch, own) for batch in parts for own in range(len(batch.features))]
