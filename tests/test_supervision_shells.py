"""The shell, the terminal and the tmux server around a run can go: it goes on to its end, and its record is whole."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fault_run import TESTS
from fault_toys import Plan, expected_result

from manifests.evidence import collect
from manifests.verdict import verdict
from shared.beat import read_beat
from shared.phases import SCALE_VARIABLE
from shared.reporter import progress_path

pytestmark = pytest.mark.crash

STEPS = 60
SETTINGS = json.dumps({"entry": "fault_toys:work", "num_workers": 2, "hang_limit_scale": 0.1})


def command(run: Path) -> list[str]:
    """The foreground command, as `dflash train` is one."""
    return [sys.executable, str(TESTS / "supervised.py"), str(run), SETTINGS]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    folder = tmp_path / "run"
    Plan(steps=STEPS).write(folder)
    return folder


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.01)


def at_work(run: Path) -> bool:
    beats = [read_beat(progress_path(run, "train", rank)) for rank in range(2)]
    return all(beat is not None and beat.phase in ("step", "checkpoint") and beat.done >= 2 for beat in beats)


def processes_with(words: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "):
                found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def require_undisturbed(run: Path) -> None:
    """It was at work when its shell went, and did all of it afterwards."""
    beat = read_beat(progress_path(run, "train", 0))
    assert beat is not None
    assert beat.done < STEPS, "the run ended before its shell did: nothing was shown"
    wait_for(lambda: collect(run).ended is not None, 60, "the end of the run")
    found = verdict(collect(run))
    assert (found.code, found.exit_code) == ("done", 0), found
    assert len([event for event in collect(run).events if event["event"] == "attempt started"]) == 1
    for rank in range(2):
        assert (run / "toy" / f"result-{rank}").read_text() == str(expected_result(STEPS))
    wait_for(lambda: not processes_with(str(run)), 60, "the end of all processes")


def test_the_launching_shell_is_killed(run: Path) -> None:
    script = f"{shlex.join(command(run))}; echo never"
    shell = subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: at_work(run), 60, "work")
    finally:
        kill([shell.pid, *processes_with(f"supervised.py {run}")])
        shell.wait()
    require_undisturbed(run)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_tmux_server_is_killed(run: Path) -> None:
    tmux = ["tmux", "-L", f"dflash-test-{os.getpid()}", "-f", "/dev/null"]
    subprocess.run([*tmux, "new-session", "-d", shlex.join(command(run))], check=True)
    try:
        wait_for(lambda: at_work(run), 60, "work")
        asked = subprocess.run([*tmux, "display-message", "-p", "#{pid}"], check=True, capture_output=True, text=True)
        kill([int(asked.stdout)])
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, stderr=subprocess.DEVNULL)
    require_undisturbed(run)
    wait_for(lambda: not processes_with(f"supervised.py {run}"), 60, "the end of the viewer")


def test_the_terminal_is_closed(run: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, command(run))
    try:
        wait_for(lambda: at_work(run), 60, "work")
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    except BaseException:
        kill([child])
        raise
    assert os.waitstatus_to_exitcode(status) == 129
    require_undisturbed(run)


def test_ctrl_c_saves_and_stops_a_second_one_is_not_needed(run: Path) -> None:
    viewer = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: at_work(run), 60, "work")
    viewer.send_signal(signal.SIGINT)
    said = viewer.communicate(timeout=60)[1]
    assert viewer.returncode == 75, said
    found = verdict(collect(run))
    assert (found.code, found.exit_code, found.confidence) == ("user.stop", 75, "proved"), found
    assert "Ctrl-C" in found.sentence
    assert not processes_with(str(run))
