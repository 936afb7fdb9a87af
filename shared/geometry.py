"""Which layers of a target are tapped: the formula and the check, without torch.

Ids are 0-based decoder layers and mean the residual stream AFTER that layer, so that id l is Hugging
Face `hidden_states[l + 1]`. The last layer cannot be meant: its `hidden_states` entry is already normed.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import LayerIdsOutOfRange


def default_target_layer_ids(num_hidden_layers: int, num_taps: int) -> tuple[int, ...]:
    """An even spread from layer 1 to layer L-3, as the published drafters use.

    One tap: L // 2. Otherwise id_i = round(1 + i * (L - 4) / (n - 1)), Python's rounding to even.
    Raises LayerIdsOutOfRange when that gives a repeated or missing layer (a target too shallow for n taps).
    """
    if num_taps < 1:
        raise LayerIdsOutOfRange(f"{num_taps} taps asked; at least 1 is needed")
    if num_taps == 1:
        ids: tuple[int, ...] = (num_hidden_layers // 2,)
    else:
        ids = tuple(round(1 + i * (num_hidden_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    check_target_layer_ids(ids, num_hidden_layers)
    return ids


def check_target_layer_ids(target_layer_ids: Sequence[int], num_hidden_layers: int) -> None:
    """Refuse ids that are out of range, repeated or unsorted.

    Valid ids are 0 .. L-2: the output of layer L-1 is what the final norm reads and serving engines cannot capture
    it as a tap. Raises LayerIdsOutOfRange with the ids, the range and what to do.
    """
    ids = list(target_layer_ids)
    last = num_hidden_layers - 2
    wrong = [i for i in ids if not 0 <= i <= last]
    if not ids or wrong:
        raise LayerIdsOutOfRange(
            f"target_layer_ids {ids} but the target has {num_hidden_layers} layers: ids must lie in 0..{last} "
            f"(0-based, output of that layer); out of range: {wrong or 'no id given'}"
        )
    if ids != sorted(set(ids)):
        raise LayerIdsOutOfRange(
            f"target_layer_ids {ids} must be ascending without repeats (a target of "
            f"{num_hidden_layers} layers); pass fewer taps or other ids"
        )
