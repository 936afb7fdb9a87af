"""Published compiled code: what is whole is used, whatever else is refused, said, and never in the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_run import environment

from stage2_train import compile_cache
from stage2_train.compile_cache import KEPT, CompileCache

KEY = {"torch": "2.11", "shapes": (4, 48)}


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The local temporary folder, and an environment that is put back."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return folder


def compiled_here(cache: CompileCache) -> None:
    """What a warm-up leaves: files of both compilers, one of which names its own folder."""
    inductor, triton = (Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    for path, data in (
        (inductor / "ab" / "cab.py", b"print('a kernel')"),
        (inductor / "fxgraph" / "xy" / "graph", bytes(range(256)) * 40),
        (inductor / "locks" / "cab.lock", b""),
        (triton / "K" / "__grp__k.json", json.dumps({"child_paths": {"k.cubin": f"{triton}/K/k.cubin"}}).encode()),
        (triton / "K" / "k.cubin", b"\x7fELF" * 100),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert cache.folder in inductor.parents


def publish(published: Path | None = None, key: Any = KEY) -> Path:
    cache = CompileCache(published, key)
    compiled_here(cache)
    entry = cache.publish()
    assert entry is not None, cache.notes
    cache.close()
    return entry


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


def test_what_one_process_published_fills_the_next(tmp_path: Path, temporary: Path) -> None:
    first = CompileCache(None, KEY)
    assert not first.seed()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.folder / "inductor")
    compiled_here(first)
    want = files(first.folder)
    assert first.publish() is not None
    first.close()
    assert not first.folder.exists()
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ.get("TRITON_CACHE_DIR")) == ("/before", None)
    for key in ({**KEY, "torch": "2.13"}, {**KEY, "shapes": (2, 48)}):
        other = CompileCache(None, key)
        assert not other.seed()
        assert other.notes == []
        other.close()
    second = CompileCache(None, KEY)
    assert second.seed()
    assert second.folder != first.folder
    got = files(second.folder)
    assert set(got) == set(want) - {"inductor/locks/cab.lock"}
    group = json.loads(got.pop("triton/K/__grp__k.json"))
    assert group == {"child_paths": {"k.cubin": f"{second.folder}/triton/K/k.cubin"}}  # and nobody else's
    assert all(got[name] == want[name] for name in got)
    second.proven()
    second.close()
    for folder in (temporary, *temporary.glob("*"), *temporary.glob("*/*")):
        if folder != temporary:
            assert folder.stat().st_mode & 0o777 == 0o700


def truncate(entry: Path) -> None:
    path = entry / "files/inductor/fxgraph/xy/graph"
    path.write_bytes(path.read_bytes()[:-1])


def flip(entry: Path) -> None:
    path = entry / "files/inductor/fxgraph/xy/graph"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def record(entry: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = json.loads((entry / "entry.json").read_text())
    change(found)
    (entry / "entry.json").write_text(json.dumps(found))


def replace_by_link(entry: Path) -> None:
    moved = entry.rename(entry.with_name("moved"))
    entry.symlink_to(moved)


BREAKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, "fxgraph/xy/graph is not as it was written"),
    "flipped": (flip, "fxgraph/xy/graph is not as it was written"),
    "emptied": (lambda entry: (entry / "files/triton/K/k.cubin").write_bytes(b""), "k.cubin is not as it was written"),
    "a file gone": (lambda entry: (entry / "files/triton/K/k.cubin").unlink(), "FileNotFoundError"),
    "no record": (lambda entry: (entry / "entry.json").unlink(), "FileNotFoundError"),
    "a torn record": (lambda entry: (entry / "entry.json").write_text('{"key": '), "JSONDecodeError"),
    "a record of another form": (lambda entry: (entry / "entry.json").write_text("[]"), "TypeError"),
    "another key": (lambda entry: record(entry, lambda r: r["key"].update(torch="2.14")), "made under another key"),
    "a way out": (
        lambda entry: record(entry, lambda r: r["files"].update({"inductor/../../../x": [0, ""]})),
        "a file outside its folder",
    ),
    "a way up": (lambda entry: record(entry, lambda r: r["files"].update({"/etc/passwd": [0, ""]})), "outside"),
    "writable": (lambda entry: entry.chmod(0o770), r"others may write it \(mode 770\)"),
    "a link": (replace_by_link, "it is no folder"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_entry_is_set_aside_and_the_process_compiles_cold(name: str, tmp_path: Path) -> None:
    entry = publish(tmp_path / "published")
    breaking, said = BREAKS[name]
    breaking(entry)
    cache = CompileCache(tmp_path / "published", KEY)
    assert not cache.seed()
    assert files(cache.folder) == {}
    assert len(cache.notes) == 1

    assert re.search(said, cache.notes[0]), cache.notes
    assert not entry.exists()
    compiled_here(cache)
    assert cache.publish() is not None
    cache.close()
    after = CompileCache(tmp_path / "published", KEY)
    assert after.seed()
    assert after.notes == []
    after.close()


def test_an_older_whole_entry_serves_when_the_newest_is_broken(tmp_path: Path) -> None:
    old, new = publish(tmp_path / "published"), publish(tmp_path / "published")
    truncate(new)
    cache = CompileCache(tmp_path / "published", KEY)
    assert cache.seed()
    assert cache.entry == old
    assert len(cache.notes) == 1
    cache.close()


def test_folders_of_other_users_are_not_used(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(tmp_path / "published")
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)  # what is there is now somebody else's
    cache = CompileCache(tmp_path / "published", KEY)
    assert not cache.seed()
    assert cache.publish() is None
    assert all(f"belongs to user {owner}, this process to {owner + 1}" in note for note in cache.notes)
    assert any(str(tmp_path / "published") in note for note in cache.notes)
    assert cache.folder.parent == temporary  # alone, beside the folder that somebody else made under our name
    cache.close()
    assert entry.exists()


def test_a_folder_that_cannot_be_made_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "published", KEY)
    assert not cache.seed()
    compiled_here(cache)
    assert cache.publish() is None
    assert "is not used for compiled code" in cache.notes[0]
    cache.close()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    cache = CompileCache(tmp_path / "open", KEY)
    assert "others may write it (mode 777); chmod go-w it" in cache.notes[0]
    cache.close()


def test_what_fails_in_the_warm_up_is_refused_and_the_process_starts_empty(tmp_path: Path) -> None:
    entry = publish(tmp_path / "published")
    error = CompileCache(tmp_path / "published", KEY)
    assert error.seed()
    error.close()  # an error that is not the cache's says nothing about it
    cache = CompileCache(tmp_path / "published", KEY)
    assert cache.seed()
    cache.refuse("the warm-up failed with it: SyntaxError")
    assert cache.entry is None
    assert files(cache.folder) == {}
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.folder / "triton")
    assert "set aside: the warm-up failed with it: SyntaxError" in cache.notes[0]
    assert not entry.exists()
    cache.close()
    assert not list((tmp_path / "published").glob(".trying-*"))


def in_another_process(tmp_path: Path, temporary: Path, ending: str) -> list[str]:
    script = f"""
        import os, signal, tempfile, time
        from pathlib import Path
        tempfile.tempdir = {str(temporary)!r}
        from stage2_train.compile_cache import CompileCache
        cache = CompileCache(Path({str(tmp_path / "published")!r}), {KEY!r})
        assert cache.seed()
        {ending}
    """
    return [sys.executable, "-c", textwrap.dedent(script)]


@pytest.mark.crash
def test_a_crash_in_the_warm_up_does_not_repeat_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    publish(tmp_path / "published")
    crash = in_another_process(tmp_path, temporary, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert subprocess.run(crash, env=environment(), check=False).returncode == -11
    private = temporary / f"dflash-compile-{os.getuid()}" / "private"
    assert len(list(private.glob("dflash-*"))) == 1
    cache = CompileCache(tmp_path / "published", KEY)
    assert list(private.glob("dflash-*")) == [cache.folder]  # the dead one's folder is gone
    assert not cache.seed()
    assert "a process that was filled from it died in its warm-up" in cache.notes[0]
    cache.close()


@pytest.mark.crash
def test_a_crash_after_the_warm_up_says_nothing_about_the_entry(tmp_path: Path, temporary: Path) -> None:
    entry = publish(tmp_path / "published")
    crash = in_another_process(tmp_path, temporary, "cache.proven(); os.kill(os.getpid(), signal.SIGKILL)")
    assert subprocess.run(crash, env=environment(), check=False).returncode == -9
    cache = CompileCache(tmp_path / "published", KEY)
    assert cache.seed()
    assert cache.entry == entry
    cache.close()


@pytest.mark.crash
def test_a_process_that_is_still_warming_up_is_left_alone(tmp_path: Path, temporary: Path) -> None:
    publish(tmp_path / "published")
    slow = in_another_process(tmp_path, temporary, "print(cache.folder, flush=True); time.sleep(60)")
    with subprocess.Popen(slow, env=environment(), stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        cache = CompileCache(tmp_path / "published", KEY)
        assert cache.seed()
        assert folder.is_dir()
        other.kill()
    cache.close()


def test_the_newest_entries_are_kept_and_one_that_was_refused(tmp_path: Path) -> None:
    published = tmp_path / "published"
    for number in range(3):
        truncate(publish(published, {"number": number}))
        cache = CompileCache(published, {"number": number})
        assert not cache.seed()
        cache.close()
    used = publish(published, {"used": True})
    for number in range(KEPT + 2):
        os.utime(used)  # as its use does
        last = publish(published, {"other": number})
    kept = [path for path in published.iterdir() if path.name[0] != "."]
    assert len(kept) == KEPT
    assert {used, last} <= set(kept)
    assert len(list(published.glob(".refused-*"))) == 1
    assert len(list(published.iterdir())) == KEPT + 1


def test_a_full_disk_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path / "published", KEY)
    compiled_here(cache)

    def full(self: CompileCache, *given: Any, real: Any = CompileCache._put) -> Any:
        real(self, *given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_cache.CompileCache, "_put", full)
    assert cache.publish() is None
    assert "was not published" in cache.notes[0]
    assert "disk full" in cache.notes[0]
    assert list((tmp_path / "published").iterdir()) == []
    cache.close()
