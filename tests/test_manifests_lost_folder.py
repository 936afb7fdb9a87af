"""A run whose folder is deleted, moved or replaced ends: it writes into no other run's folder, and makes none anew."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from supervised import alive, ending, start, until

from manifests.lost_folder import is_lost, moved_to
from shared.atomic import owned
from shared.errors import FolderLost


def running(folder: Path, workers: int) -> list[int]:
    """The pids of a run's workers, once each has saved something."""
    until(lambda: all((folder / f"checkpoint-{rank}").exists() for rank in range(workers)))
    return [int((folder / f"pid-{rank}-1").read_text()) for rank in range(workers)]


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
