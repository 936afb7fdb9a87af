"""A run whose folder is deleted, moved or replaced ends: it writes into no other run's folder, and makes none anew."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervised import alive, ending, start, until

from manifests.launch import LaunchSpec
from manifests.lost_folder import is_lost, moved_to
from manifests.worker_process import Seat
from shared.atomic import owned
from shared.errors import FolderLost


def running(folder: Path, workers: int) -> list[int]:
    """The pids of a run's workers, once each has saved something."""
    until(lambda: all((folder / f"checkpoint-{rank}").exists() for rank in range(workers)))
    return [int((folder / f"pid-{rank}-1").read_text()) for rank in range(workers)]


def state(pid: int) -> str:
    """R, S, D, T... as the kernel shows it: a signal has no effect at once."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.crash
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_run_without_its_folder_ends_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, independent: bool
) -> None:
    monkeypatch.setenv("TOY_STEPS", "100000")
    folder, elsewhere, other = (tmp_path / name for name in ("run", "elsewhere", "other"))
    other.mkdir()
    (other / ".owner").touch()
    with start(folder, "steps", 2, independent=independent) as process:
        pids = running(folder, 2)
        if how == "replaced":  # a toy that writes every tenth of a second would meet the folder before anybody can look
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            until(lambda: all(state(pid) == "T" for pid in pids))
        if how == "deleted":
            until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists())
        else:
            folder.rename(elsewhere)
        if how == "replaced":
            other.rename(folder)
        until(lambda: not any(alive(pid) for pid in pids), 20)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FolderLost.exit_code == 47
    assert f"{folder} was deleted or moved while train ran there" in said.splitlines()[-1]
    if how == "replaced":  # what lies there is another's
        assert [path.name for path in folder.rglob("*")] == [".owner"]
    else:
        assert not folder.exists()
    if how != "deleted":
        assert ending(elsewhere)[:2] == ("failed", 47)
        assert f"it is {elsewhere} now" in ending(elsewhere)[2]
        assert all(int((elsewhere / f"checkpoint-{rank}").read_text()) % 5 == 0 for rank in range(2))


@pytest.mark.crash
def test_a_stopped_worker_does_not_run_on_when_it_is_killed(tmp_path: Path) -> None:
    """It was continued first, and a toy once saved into the folder that another run had put in the place of its own."""
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, sys, time\n"
        "ran = pathlib.Path(sys.argv[1]).with_name('ran')\n"
        "signal.signal(signal.SIGCONT, lambda *_: ran.touch())\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True:\n"
        "    time.sleep(0.001)\n"
    )
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", program, str(ready)], start_new_session=True) as child:
            until(ready.exists)
            os.kill(child.pid, signal.SIGSTOP)
            until(lambda pid=child.pid: state(pid) == "T")
            seat = Seat(LaunchSpec(run_dir=tmp_path, role="train", entry="none:main", num_workers=1), 0)
            seat.pid = child.pid
            seat.kill()
            assert child.wait(10) == -signal.SIGKILL
        ready.unlink()
    assert not (tmp_path / "ran").exists()


def test_the_lock_is_compared_with_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert not is_lost(folder)  # nothing is held, so nothing can be lost
    with owned(folder):
        assert (is_lost(folder), moved_to()) == (False, folder)
        folder.rename(elsewhere)
        assert (is_lost(folder), moved_to()) == (True, elsewhere)
        folder.touch()
        assert is_lost(folder)
        folder.unlink()
        elsewhere.rename(folder)
        with monkeypatch.context() as patch:

            def dying(*_: object, **__: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(Path, "stat", dying)
            assert not is_lost(folder)
        signed = (folder / ".owner").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "samestat", lambda *_: False)  # a file system that numbers its files anew
            assert not is_lost(folder)
        with monkeypatch.context() as patch:  # a name that is not to be seen for a moment
            real, looks = Path.stat, iter([True, True, False])

            def forgetful(path: Path, **options: bool) -> os.stat_result:
                if next(looks, False):
                    raise FileNotFoundError(2, "No such file or directory", str(path))
                return real(path, **options)

            patch.setattr(Path, "stat", forgetful)
            assert not is_lost(folder)
        (folder / ".owner").unlink()
        (folder / ".owner").write_bytes(signed[::-1])
        assert is_lost(folder)
        (folder / ".owner").unlink()
        (folder / ".owner").touch()
        assert (is_lost(folder), moved_to()) == (True, None)
