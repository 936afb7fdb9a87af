"""Files are there in full or not there, and the disk's faults become one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from supervised import until

from shared import atomic
from shared.errors import DiskFull, PathNotWritable, RunBusy
from shared.kernel import process


def test_write_replaces_whole_and_leaves_no_partial(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    atomic.write_json(path, {"a": 1})
    atomic.write_json(path, {"a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é"\n}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    atomic.write_bytes(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull) as caught:
        atomic.write_bytes(path, b"new")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_published_folder_never_changes(tmp_path: Path) -> None:
    final = tmp_path / "block"
    for content in ("first", "second"):
        temporary = atomic.temporary_dir(final)
        (temporary / "data").write_text(content)
        if content == "first":
            atomic.publish_dir(temporary, final)
        else:
            with pytest.raises(FileExistsError):
                atomic.publish_dir(temporary, final)
    assert (final / "data").read_text() == "first"
    assert atomic.remove_partials(tmp_path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["block"]


@pytest.mark.crash
def test_kill_while_writing_never_leaves_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "value"
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from shared.atomic import write_bytes
        write_bytes(Path(sys.argv[1]), b"a" * 200_000)
        print("ready", flush=True)
        while True:
            for byte in (b"a", b"b"):
                write_bytes(Path(sys.argv[1]), byte * 200_000)
    """)
    for delay in (0.02, 0.05, 0.11):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(delay)
            child.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 200_000
        assert len(set(content)) == 1


def test_unwritable_path_is_named_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(PathNotWritable) as caught:
        atomic.require_writable(file / "runs" / "x.zarr")
    assert "is a file" in str(caught.value)
    with pytest.raises(PathNotWritable):
        atomic.require_writable(Path("/proc/dflash/x.zarr"))
    atomic.require_writable(tmp_path / "new" / "x.zarr")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file"}


def test_a_folder_has_one_owner_and_names_it(tmp_path: Path) -> None:
    code = "import sys, pathlib, shared.atomic\nwith shared.atomic.owned(pathlib.Path(sys.argv[1])): print('mine')"
    with atomic.owned(tmp_path):
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert RunBusy.__name__ in other.stderr
        assert f"process {os.getpid()}" in other.stderr
    after = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert after.stdout == "mine\n"


OUTLIVING = """
import os, pathlib, subprocess, sys
from shared.atomic import held_locks, owned
with owned(pathlib.Path(sys.argv[1])):
    none = subprocess.DEVNULL
    left = subprocess.Popen(["sleep", "600"], pass_fds=held_locks(), stdout=none, stderr=none)
    print(left.pid, flush=True)
    os._exit(0)
"""


@pytest.mark.crash
def test_who_outlives_the_owner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "WORKERS_END_S", 0.2)
    line = [sys.executable, "-c", OUTLIVING, str(tmp_path)]
    pid = int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    waiting = os.open(tmp_path / ".owner", os.O_RDONLY)  # has it open, but holds nothing
    try:
        with pytest.raises(RunBusy, match=f"which is gone: process {pid} did not end.*`kill -KILL {pid}`") as caught:
            _own(tmp_path)
        assert "CONT" not in str(caught.value)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: (found := process(pid)) and found.state == "T")
        with pytest.raises(RunBusy, match=f"`kill -CONT {pid}` lets them save and leave"):
            _own(tmp_path)
    finally:
        os.close(waiting)
        os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(atomic, "WORKERS_END_S", 60.0)
    _own(tmp_path)


def _own(folder: Path) -> None:
    with atomic.owned(folder):
        pass


def test_errors_that_libraries_wrap_are_understood(tmp_path: Path) -> None:
    def wrapped() -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None

    for fails, kind in (
        (lambda: _raise(ValueError("I/O error: No space left on device (os error 28)")), DiskFull),
        (lambda: _raise(ValueError("I/O error: Read-only file system (os error 30)")), PathNotWritable),
        (lambda: _raise(OSError(5, "Input/output error")), PathNotWritable),
        (wrapped, DiskFull),
    ):
        with pytest.raises(kind, match=r"x\.zarr"), atomic.disk_faults(tmp_path / "x.zarr"):
            fails()
    with pytest.raises(ValueError, match="ours"), atomic.disk_faults(tmp_path):
        raise ValueError("a bug of ours")
    with pytest.raises(RunBusy), atomic.disk_faults(tmp_path):
        raise RunBusy("stays itself (os error 28)")


def _raise(error: Exception) -> None:
    raise error


def test_only_the_systems_own_refusals_are_a_users_fault() -> None:
    assert isinstance(atomic.fault_of(PermissionError(13, "Permission denied", "/a/b")), PathNotWritable)
    assert isinstance(atomic.fault_of(OSError(28, "No space left on device")), DiskFull)
    assert atomic.fault_of(FileNotFoundError(2, "No such file", "/a/b")) is None


def test_what_is_aside_is_gone_unless_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> None:
        with atomic.aside(tmp_path / "block") as folder:
            (folder / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull):
        fill()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with atomic.aside(Path()) as folder:
        assert folder.parent == tmp_path
