"""What lies in target/ is listed with checksums, and a changed head is never loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_store import make_small_store

from manifests.blocks import open_store
from shared.errors import StoreDamaged
from shared.store_files import LocalFiles
from shared.target_files import LIST, damaged, write_list


def found(store: Path, *, strict: bool = True) -> list[str]:
    return [name for name, _ in damaged(LocalFiles(store), "target", strict=strict)]


@pytest.mark.parametrize("name", ["head.safetensors", "tokenizer.json", "config.json", LIST])
@pytest.mark.parametrize("strict", [True, False])
def test_every_change_is_found_and_the_head_is_not_loaded(tmp_path: Path, name: str, strict: bool) -> None:
    store = make_small_store(tmp_path / "x.zarr").path
    assert found(store, strict=strict) == []
    open_store(store).load_head()
    path, good = store / "target" / name, (store / "target" / name).read_bytes()
    flipped = bytearray(good)
    flipped[-9] ^= 1
    for data in (bytes(flipped), good[:-1], good + b"\n", b"", None):
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        assert found(store, strict=strict) == [f"target/{name}"]
        with pytest.raises(StoreDamaged) as caught:
            open_store(store).load_head()
        assert name in str(caught.value)
        path.write_bytes(good)
    assert found(store, strict=strict) == []


def test_files_below_folders_are_listed_and_the_list_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "templates").mkdir(parents=True)
        (folder / "templates" / "tool.jinja").write_text("x")
        (folder / "empty").write_bytes(b"")
        write_list(folder)
    assert (tmp_path / "a" / LIST).read_bytes() == (tmp_path / "b" / LIST).read_bytes()
    (tmp_path / "b" / "templates" / "tool.jinja").write_text("y")
    files = LocalFiles(tmp_path / "b")
    ((name, reason),) = damaged(files, "", strict=False)
    assert name == "templates/tool.jinja"
    assert "crc32c" in reason
