"""Faults of every kind for the files of a small store, for tests/test_store_corruption.py.

Each fault takes the ground, a file and a source of chance, and gives the bytes to put in place: None where it is not
possible. What can not be found by anything and is not made: a whole line that vanishes from the history of runs and
skips, on which nothing depends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from small_store import SmallStore

from shared.shard_file import ShardGrid

Changes = dict[str, bytes | None]
# Files whose lines nothing depends on, so that a line that is gone is not missed.
HISTORY = ("manifest/runs.", "manifest/skips.")


@dataclass
class Ground:
    """A whole store, the bytes of all its files, and those of an older build of the same blocks."""

    made: SmallStore
    files: dict[str, bytes]
    older: dict[str, bytes]
    names: list[str] = field(default_factory=list)
    twins: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = sorted(name for name in self.files if name != ".owner")
        for name in self.names:
            same = [
                o
                for o in self.names
                if len(self.files[o]) == len(self.files[name]) and self.files[o] != self.files[name]
            ]
            self.twins[name] = same

    def apply(self, changes: Changes) -> None:
        """Put these bytes in place of the files'; None takes a file away."""
        for name, data in changes.items():
            path = self.made.path / name
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)

    def restore(self, changes: Changes) -> None:
        """The bytes as they were."""
        self.apply({name: self.files[name] for name in changes})


def bytes_below(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def flip_bit(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    data = bytearray(ground.files[name])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return {name: bytes(data)}


def change_byte(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    data = bytearray(ground.files[name])
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    return {name: bytes(data)}


def truncate(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    data = ground.files[name]
    size = chance.choice([0, len(data) - 1, chance.randrange(len(data))])
    if name.startswith(HISTORY) and (size == 0 or data[:size].endswith(b"\n")):
        return None
    return {name: data[:size]}


def extend(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    return {name: ground.files[name] + chance.choice([b"\0", b"\n", b" ", chance.randbytes(16), chance.randbytes(64)])}


def unlink(ground: Ground, name: str, _chance: random.Random) -> Changes | None:
    return None if name.startswith((*HISTORY, "index/")) else {name: None}


def zero_range(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    data = bytearray(ground.files[name])
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.choice([1, 8, 512, 4096, len(data)]))
    data[start:end] = bytes(end - start)
    return {name: bytes(data)} if data != ground.files[name] else None


def swap_chunks(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    """Two chunks of a shard file change places, each with the checksum behind it."""
    found = grid_of(ground, name)
    if found is None or (count := found[0].chunks_in(found[1])) < 2:
        return None
    step, data = found[0].step, bytearray(ground.files[name])
    one, other = chance.sample(range(count), 2)
    first, second = (slice(chunk * step, chunk * step + step) for chunk in (one, other))
    data[first], data[second] = data[second], data[first]
    return {name: bytes(data)} if data != ground.files[name] else None


def foreign_chunk(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    """One chunk of a shard file is replaced by the same chunk of an older build, checksum included."""
    found = grid_of(ground, name)
    if found is None:
        return None
    chunk, step = chance.randrange(found[0].chunks_in(found[1])), found[0].step
    data = bytearray(ground.files[name])
    data[chunk * step : chunk * step + step] = ground.older[name][chunk * step : chunk * step + step]
    return {name: bytes(data)} if data != ground.files[name] else None


def swap_chunks_of_files(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    """A chunk of a shard file and one of another file of the same array change places."""
    found, array = grid_of(ground, name), name.split("/")[2] if name.count("/") > 2 else ""
    others = [other for other in ground.names if other != name and f"/{array}/c/" in other]
    if found is None or not others:
        return None
    other = chance.choice(others)
    theirs = grid_of(ground, other)
    if theirs is None or theirs[0].step != found[0].step:
        return None
    step, data, foreign = found[0].step, bytearray(ground.files[name]), bytearray(ground.files[other])
    mine, its = (step * chance.randrange(grid.chunks_in(shard)) for grid, shard in (found, theirs))
    data[mine : mine + step], foreign[its : its + step] = foreign[its : its + step], data[mine : mine + step]
    return {name: bytes(data), other: bytes(foreign)} if data != ground.files[name] else None


def swap_files(ground: Ground, name: str, chance: random.Random) -> Changes | None:
    if not ground.twins[name]:
        return None
    other = chance.choice(ground.twins[name])
    return {name: ground.files[other], other: ground.files[name]}


def stale_file(ground: Ground, name: str, _chance: random.Random) -> Changes | None:
    data = ground.older.get(name)
    return None if data in (None, ground.files[name]) or name.startswith(HISTORY) else {name: data}


def swap_blocks(ground: Ground, _name: str, _chance: random.Random) -> Changes | None:
    changes: Changes = {}
    for name in ground.names:
        if name.startswith(("blocks/000000/", "blocks/000001/")):
            other = f"blocks/{'000001' if name[12] == '0' else '000000'}/{name[14:]}"
            changes[name] = ground.files.get(other)
    return changes


def stale_block(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    prefix = chance.choice(["blocks/000000/", "blocks/000001/"])
    return {name: ground.older[name] for name in ground.names if name.startswith(prefix)}


def lose_block(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    prefix = chance.choice(["blocks/000000/", "blocks/000001/"])
    return {name: None for name in ground.names if name.startswith(prefix)}


def _lines(ground: Ground, chance: random.Random) -> tuple[str, list[bytes], int]:
    name = chance.choice(
        [name for name in ground.names if name.startswith(("manifest/shards.", "manifest/documents."))]
    )
    lines = ground.files[name].splitlines(keepends=True)
    return name, lines, chance.randrange(len(lines))


def tear_line(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    name, lines, number = _lines(ground, chance)
    return {name: b"".join(lines[:number]) + lines[number][: chance.randrange(1, len(lines[number]) - 1)]}


def flip_line(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    name, lines, number = _lines(ground, chance)
    line = bytearray(lines[number])
    line[chance.randrange(len(line))] ^= 1 << chance.randrange(8)
    return {name: b"".join([*lines[:number], bytes(line), *lines[number + 1 :]])}


def drop_line(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    name, lines, number = _lines(ground, chance)
    return {name: b"".join([*lines[:number], *lines[number + 1 :]])}


def repeat_line(ground: Ground, _name: str, chance: random.Random) -> Changes | None:
    name, lines, number = _lines(ground, chance)
    lines.insert(chance.randrange(len(lines) + 1), lines[number])
    return {name: b"".join(lines)}


Fault = Callable[[Ground, str, random.Random], Changes | None]
ON_FILES: tuple[Fault, ...] = (
    flip_bit, flip_bit, change_byte, truncate, extend, unlink, zero_range, swap_chunks, foreign_chunk, swap_files,
    swap_chunks_of_files, stale_file,
)  # fmt: skip
ON_STORES: tuple[Fault, ...] = (swap_blocks, stale_block, lose_block, tear_line, flip_line, drop_line, repeat_line)


def grid_of(ground: Ground, name: str) -> tuple[ShardGrid, int] | None:
    """The grid and number of a shard file, None for other files."""
    parts = name.split("/")
    if parts[0] != "blocks" or "c" not in parts:
        return None
    shape = ground.made.arrays[int(parts[1])][parts[2]].shape
    return ShardGrid.of("/".join(parts[:2]), parts[2], shape), int(parts[4])


def faults(ground: Ground, chance: random.Random) -> Iterator[tuple[str, str, Changes]]:
    """Without end: (fault, file, changes), every file in turn with every fault that is possible there."""
    while True:
        names = list(ground.names)
        chance.shuffle(names)
        for number, name in enumerate(names):
            fault = chance.choice(ON_STORES) if number % 10 == 9 else chance.choice(ON_FILES)
            changes = fault(ground, name, chance)
            if changes and any(ground.files[file] != data for file, data in changes.items()):
                yield fault.__name__, name, changes
