"""A paused run goes on when its disk has what the worker said, or clearly more than it met, and takes a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests import room as room_module
from manifests.room import MORE_BYTES, Room

MB = 1 << 20


def disk(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 10_000) -> None:
    monkeypatch.setattr(room_module, "_free", lambda _folder: (free, inodes))


def test_the_worker_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 10 * MB)
    room = Room.at_failure(tmp_path, [{"needed_bytes": 100 * MB}, {"needed_bytes": None}, None])
    assert room.bytes == 105 * MB
    assert not room.is_there()
    disk(monkeypatch, 105 * MB)
    assert room.is_there()
    assert room.numbers() == {"free": 105 * MB, "needed": 105 * MB}
    assert "paused until there is room" in room.sentence()


def test_without_its_word_it_is_clearly_more_than_it_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, MB)
    room = Room.at_failure(tmp_path, [{}])
    assert MB < room.bytes <= 1.05 * (MB + MORE_BYTES)
    assert not room.is_there()
    disk(monkeypatch, 0, inodes=3)
    room = Room.at_failure(tmp_path, [])
    disk(monkeypatch, 1000 * MB, inodes=3)
    assert not room.is_there()
    disk(monkeypatch, 1000 * MB, inodes=100)
    assert room.is_there()


def test_where_the_numbers_say_plenty_only_trying_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 100_000 * MB)
    room = Room.at_failure(tmp_path, [])  # a quota, or another disk
    assert room.bytes == 0
    assert room.is_there()
    monkeypatch.setattr(room_module, "_takes_a_file", lambda _folder: False)
    assert not room.is_there()
