"""One record as one line of JSON that ends in its own checksum, and the search for the lines that can be trusted.

Used by manifests/commit.py (append, read), blocks.py (stores in buckets) and tables.py (DuckDB). A line that does not
fit its checksum is void everywhere; what a kill in the middle of an append leaves is void too, but no damage.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import google_crc32c

# `,"crc":"01234567"}`: the checksum is of all bytes before.
_TAIL_BYTES = 18
_TAIL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
# What the next append writes behind a line that a kill cut short.
TORN = b"#torn"
_PIECE_BYTES = 8 << 20

Damage = tuple[int, str]
"""Line number from 1, and what is wrong with it."""


def line_of(values: dict[str, Any]) -> bytes:
    """The line of one record, newline included. Raises ValueError for NaN and infinity, which JSON does not know."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A file name may hold bytes that are no text; the record then shows "?" for them.
    body = text.encode(errors="replace")[:-1]
    return body + b',"crc":"%08x"}\n' % google_crc32c.value(body)


def closing_of(last: bytes) -> bytes:
    """What an append must write first when the file's last line has no newline."""
    return b"\n" if _fits(last) or _whole_record_at(last) else TORN + b"\n"


def scan(file: BinaryIO) -> Iterator[tuple[list[bytes], list[Damage]]]:
    """A manifest file in pieces: (lines that fit their checksum, without newlines; the damaged ones).

    Torn lines are in neither. The file may grow meanwhile: a line counts once its newline is there, or it is whole.
    """
    number, parts = 1, [b""]
    while piece := file.read(_PIECE_BYTES):
        parts.append(piece)
        if b"\n" not in piece:
            continue
        *lines, rest = b"".join(parts).split(b"\n")
        parts = [rest]
        yield _sort_out(lines, number)
        number += len(lines)
    last = b"".join(parts)
    if _fits(last):
        yield [last], []
    elif _whole_record_at(last):
        yield [], [(number, "bytes behind the end of its record")]


def records_in(data: bytes) -> tuple[list[dict[str, Any]], list[Damage]]:
    """The records of a whole file's bytes, in order, and its damaged lines."""
    records: list[dict[str, Any]] = []
    damaged: list[Damage] = []
    for lines, bad in scan(io.BytesIO(data)):
        records += parse(lines)
        damaged += bad
    return records, damaged


def parse(lines: list[bytes]) -> list[dict[str, Any]]:
    """The records of lines that fit: as one array, which takes 60 % of the time of one call each."""
    records: list[dict[str, Any]] = json.loads(b"[" + b",".join(lines) + b"]")
    return records


def _sort_out(lines: list[bytes], first: int) -> tuple[list[bytes], list[Damage]]:
    if _all_fit(lines):
        return lines, []
    good = [line for line in lines if _fits(line)]
    reasons = ((number, _reason(line)) for number, line in enumerate(lines, first) if not _fits(line))
    return good, [(number, reason) for number, reason in reasons if reason]


def _all_fit(lines: list[bytes]) -> bool:
    """All at once, because a million documents are checked before the first row of a query is shown."""
    sums = struct.pack(f">{len(lines)}I", *map(google_crc32c.value, [line[:-_TAIL_BYTES] for line in lines]))
    asked = sums.hex("|", 4).encode().replace(b"|", b'"},"crc":"')
    return b"".join([line[-_TAIL_BYTES:] for line in lines]) == b',"crc":"' + asked + b'"}'


def _fits(line: bytes) -> bool:
    return line[-_TAIL_BYTES:] == b',"crc":"%08x"}' % google_crc32c.value(line[:-_TAIL_BYTES])


def _whole_record_at(line: bytes) -> bool:
    """Whether a line begins with a whole record: then its newline was lost, and it was not cut short by a kill."""
    return any(_fits(line[: found.end()]) for found in _TAIL.finditer(line))


def _reason(line: bytes) -> str:
    """What is wrong with a line that does not fit, or "" for one that a kill cut short."""
    if _whole_record_at(line):
        return "bytes behind the end of its record"
    if line.endswith(TORN):
        return ""
    if b"\0" in line:
        return "zero bytes in it"
    found = _TAIL.fullmatch(line[-_TAIL_BYTES:])
    if not found:
        return "no checksum at its end"
    return f"its bytes give {google_crc32c.value(line[:-_TAIL_BYTES]):08x}, it says {found[1].decode()}"
