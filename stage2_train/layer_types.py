"""The names of the drafter's kinds of layers, in full and short. Read by drafter_config.py and config.py. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")
_SHORT = re.compile(r"(?:([0-9]{1,3})x)?(full|sliding)(?:_attention)?")


def expand_layer_types(items: Iterable[str]) -> tuple[str, ...]:
    """Layer types in full from a list that may be short: `4xsliding`, `full`. Unknown words stay as they are."""
    found: list[str] = []
    for item in items:
        match = _SHORT.fullmatch(item)
        found += [f"{match[2]}_attention"] * int(match[1] or 1) if match else [item]
    return tuple(found)
