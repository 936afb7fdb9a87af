"""A description that is not one object is refused with its path, whatever is in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import StoreDamaged
from shared.json_file import read_object, require_keys


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "a.json", "do it again") == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, None], ids=str)
def test_anything_else_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreDamaged, match=r"a\.json .*; do it again"):
        read_object(path, "do it again")


def test_missing_keys_are_listed() -> None:
    require_keys({"a": 1}, ("a",), Path("x.json"), "again")
    with pytest.raises(StoreDamaged, match=r"x\.json lacks b, c; again"):
        require_keys({"a": 1}, ("a", "b", "c"), Path("x.json"), "again")
