"""Workers under this very process: however one ends, the parent says which, how, where, and ends with its code."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supervised import alive, until

from manifests.launch import LaunchSpec, run_workers
from manifests.launch_spec import log_path
from shared.errors import DflashError, DiskFull, Interrupted, MaskTokenInUse, WorkerFailed, WorkerKilled


@pytest.fixture(autouse=True)
def workers_can_import_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def spec(run_dir: Path, function: str, workers: int = 2) -> LaunchSpec:
    return LaunchSpec(run_dir=run_dir, role="toy", entry=f"toy_workers:{function}", num_workers=workers)


def test_all_ranks_run_once_with_one_rendezvous(tmp_path: Path) -> None:
    run_workers(spec(tmp_path, "well", 3))
    done = sorted(tmp_path.glob("done-*"))
    assert [path.name for path in done] == [f"done-{rank}-of-3" for rank in range(3)]
    assert len({path.read_text() for path in done}) == 1


def test_a_users_fault_keeps_its_class_and_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(MaskTokenInUse) as caught:
        run_workers(dataclasses.replace(spec(tmp_path, "user_fault_on_one"), hang_limit_scale=0.1))
    assert str(caught.value) == "mask token 7 occurs 3 times"
    assert time.monotonic() - started < 55  # by itself the other would end after a minute


@pytest.mark.parametrize(
    ("function", "said", "kind"),
    [
        ("bug", "sum of nothing", WorkerFailed),
        ("exit_zero_early", "exit code 0", WorkerFailed),
        ("killed", "SIGKILL", WorkerKilled),
    ],
)
@pytest.mark.crash
def test_a_bad_ending_is_named_with_its_log(tmp_path: Path, function: str, said: str, kind: type[DflashError]) -> None:
    with pytest.raises(kind) as caught:
        run_workers(spec(tmp_path, function, 1))
    message = str(caught.value)
    assert said in message
    assert str(log_path(tmp_path, "toy", 0)) in message
    if function == "killed":
        assert "phase step at 41 steps" in message
    if function == "bug":
        assert "ZeroDivisionError" in log_path(tmp_path, "toy", 0).read_text()


@pytest.mark.crash
def test_sigterm_stops_at_a_boundary_and_is_never_success(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from shared.errors import DflashError
from manifests.launch import LaunchSpec, run_workers
try:
    folder = Path({str(tmp_path)!r})
    run_workers(LaunchSpec(run_dir=folder, role="toy", entry="toy_workers:until_stopped", num_workers=2))
except DflashError as error:
    print(error); raise SystemExit(error.exit_code)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        wait_for(tmp_path / "alive-0", tmp_path / "alive-1")
        parent.send_signal(signal.SIGTERM)
        out, _ = parent.communicate(timeout=60)
    assert parent.returncode == Interrupted.exit_code
    assert "stopped at step 7" in out
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


@pytest.mark.crash
def test_workers_of_a_killed_parent_save_and_leave(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from manifests.launch import LaunchSpec, run_workers
run_workers(LaunchSpec(run_dir=Path({str(tmp_path)!r}), role="toy", entry="toy_workers:until_stopped", num_workers=1))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_for(tmp_path / "alive-0")
        parent.kill()
    wait_for(tmp_path / "saved-0")
    pid = int((tmp_path / "alive-0").read_text())
    until(lambda: not alive(pid), 60)


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and (path.read_text() or path.stat().st_size) for path in paths):
        assert time.monotonic() < deadline, f"not all of {paths} within 60 s"
        time.sleep(0.02)


def test_environment_of_one_worker_is_its_own(tmp_path: Path) -> None:
    before = dict(os.environ)
    run_workers(spec(tmp_path, "well", 1))
    assert dict(os.environ) == before


@pytest.mark.crash
def test_a_worker_without_room_for_its_ending_keeps_its_class(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"worker 0 could not write in .*make room"):
        run_workers(spec(tmp_path, "disk_too_full_for_an_ending", 1))
