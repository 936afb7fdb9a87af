"""Text that cannot break a table or drive a terminal, from what workers printed and records hold.

Used by `dflash status`, `dflash query` and `dflash logs`.
"""

from __future__ import annotations

import re
from typing import Any

LINE_CHARS = 4000
"""A line of a log keeps this many characters from its beginning and from its end."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def plain(value: Any) -> str:
    """A value as one line; what would break the line, or drive a terminal, is written out."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))
    return f"{value:,}"


def plain_log_line(line: str) -> str:
    """One line of a log: of a line that was redrawn its last state, no colours, never megabytes."""
    if (left_out := len(line) - 2 * LINE_CHARS) > 0:  # a line of 50 MB must not be searched as a whole
        line = f"{line[:LINE_CHARS]} ... ({left_out:,} characters more) ... {line[-LINE_CHARS:]}"
    states = [state for state in _ESCAPES.sub("", line).split("\r") if state.strip()]
    text = states[-1].rstrip() if states else ""
    return "".join(char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in text)
