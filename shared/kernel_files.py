"""Read the kernel's small files (proc, sys): text, a number, a field; None for what cannot be read.

Used by shared/kernel.py and shared/cgroups.py, ten to thirty times a second.
"""

from __future__ import annotations

import os
from pathlib import Path


def text_of(path: Path | str) -> str | None:
    """A file's text without the space around it; None when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def line_of(path: Path | str) -> str | None:
    """As `text_of` for what the kernel gives in one read (up to a page): a third fewer calls, eight times a second."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, 4096).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def number_of(text: str | None) -> int | None:
    """An integer; None for "max" and anything else."""
    try:
        return int(text or "")
    except ValueError:
        return None


def field_of(text: str | None, name: str) -> int | None:
    """The number behind `name` at the beginning of a line."""
    if text is None:
        return None
    lines = "\n" + text
    at = lines.find(f"\n{name} ")
    words = lines[at + len(name) + 2 :].split(None, 1) if at >= 0 else []
    return number_of(words[0]) if words else None
