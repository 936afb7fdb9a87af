"""However a worker ends, it says so itself where it can: bounded, with the place, and with who asked it to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from supervised import alive, least_of_three, until

from shared.beat import read_beat
from shared.ending import MOST_MESSAGE, MOST_TRACEBACK, ending_path
from shared.reporter import progress_path

FIELDS = {
    *("pid", "start_ticks", "attempt", "rank", "started", "ended", "code", "error", "message", "traceback", "thread"),
    *("phase", "done", "unit", "total", "signal", "peak_memory", "gpu_peak", "needed_bytes"),
}


@contextmanager
def worker(
    run_dir: Path, function: str, module: str = "ending_workers", **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """One worker as a supervisor starts it; its log and stacks lie beside."""
    with (run_dir / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shared.worker", f"{module}:{function}", str(run_dir), "toy"],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                "RANK": "0",
                "WORLD_SIZE": "1",
                "DFLASH_ATTEMPT": "2",
                "DFLASH_FAULT_FILE": str(run_dir / "fault"),
                **more,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def ended(run_dir: Path, function: str, **more: str) -> tuple[int, dict[str, Any]]:
    """Run a worker to its end; its exit code and its ending."""
    with worker(run_dir, function, **more) as process:
        code = process.wait(60)
    return code, ending_of(run_dir)


def ending_of(run_dir: Path) -> dict[str, Any]:
    path = ending_path(run_dir, "toy", 0)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def log_of(run_dir: Path) -> str:
    return (run_dir / "log").read_text(errors="replace")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} within 60 s; the log: {log_of(path.parent)}"
        time.sleep(0.01)
    return path.read_text()


def test_a_function_that_returns_is_the_only_way_to_code_0(tmp_path: Path) -> None:
    code, ending = ended(tmp_path, "returns")
    assert code == 0
    assert set(ending) == FIELDS
    assert (ending["code"], ending["error"], ending["signal"], ending["thread"]) == (0, None, None, None)
    assert (ending["attempt"], ending["rank"], ending["phase"], ending["done"]) == (2, 0, "done", 100)
    assert ending["peak_memory"] > 1 << 20
    assert ending["started"] < ending["ended"]
    beat = read_beat(progress_path(tmp_path, "toy", 0))
    assert beat is not None
    assert (beat.pid, beat.start_ticks, beat.attempt) == (ending["pid"], ending["start_ticks"], 2)
    assert beat.alive_count >= 1


@pytest.mark.parametrize(
    ("function", "code", "error", "said"),
    [
        ("bug", 1, "ZeroDivisionError", "sum of nothing"),
        ("users_fault", 25, "MaskTokenInUse", "mask token 7 occurs 3 times"),
        ("exits_0", 50, "SystemExit", "SystemExit(0) before the work was done"),
        ("exits_3", 3, "SystemExit", "SystemExit(3) before the work was done"),
        ("exits_with_a_sentence", 1, "SystemExit", "the data are gone"),
        ("keyboard", 130, "KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_an_ending_has_its_class_and_code(tmp_path: Path, function: str, code: int, error: str, said: str) -> None:
    found, ending = ended(tmp_path, function)
    assert (found, ending["code"], ending["error"]) == (code, code, error)
    assert said in ending["message"]
    assert function in ending["traceback"]
    assert said in log_of(tmp_path)


def test_an_ending_says_where_it_was(tmp_path: Path) -> None:
    _, ending = ended(tmp_path, "bug")
    assert [ending[name] for name in ("phase", "done", "total", "unit")] == ["step", 41, 100, "steps"]
    assert "ZeroDivisionError" in log_of(tmp_path)


def test_a_users_fault_leaves_one_line_in_the_log(tmp_path: Path) -> None:
    ended(tmp_path, "users_fault")
    assert log_of(tmp_path).strip() == "ended by MaskTokenInUse: mask token 7 occurs 3 times"


def test_a_full_disk_says_how_much_is_needed(tmp_path: Path) -> None:
    code, ending = ended(tmp_path, "disk_full")
    assert (code, ending["error"], ending["needed_bytes"]) == (41, "DiskFull", 12345)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("huge", "ValueError", "first words xxx"),
        ("unprintable", "Unprintable", "its text cannot be made: RuntimeError"),
        ("endless", "Endless", "its text cannot be made: RecursionError"),
        ("not_utf8", "ValueError", r"half a pair \ud800 and a file \udcff\udcfe"),
        ("circular", "ValueError", "one"),
        ("too_deep", "RecursionError", "maximum recursion depth"),
    ],
)
def test_whatever_is_raised_is_written_bounded(tmp_path: Path, function: str, error: str, said: str) -> None:
    code, ending = ended(tmp_path, function)
    assert (code, ending["error"]) == (1, error)
    assert said in ending["message"]
    assert len(ending["message"]) <= MOST_MESSAGE
    assert 0 < len(ending["traceback"]) <= MOST_TRACEBACK
    assert (tmp_path / "log").stat().st_size < 50_000
    if function == "huge":
        assert ending["message"].endswith("last words")
        assert "[50,000,0" in ending["message"]


@pytest.mark.parametrize("function", ["thread_bug", "thread_bug_while_stuck_in_c", "thread_bug_then_return"])
def test_a_lost_thread_ends_the_worker_within_a_second(tmp_path: Path, function: str) -> None:
    def seconds() -> float:
        code, ending = ended(tmp_path, function)
        passed = time.time() - ending["ended"]
        assert (code, ending["code"], ending["error"], ending["thread"]) == (50, 50, "IndexError", "writer")
        assert "list index out of range" in ending["message"]
        log = log_of(tmp_path)
        assert "thread writer ended by IndexError" in log
        assert "Traceback" in log
        return passed

    assert least_of_three(seconds, 1.5) < 1.5


def test_a_lost_thread_keeps_the_class_of_a_users_fault(tmp_path: Path) -> None:
    code, ending = ended(tmp_path, "thread_disk_full")
    assert (code, ending["code"], ending["error"], ending["thread"]) == (41, 41, "DiskFull", "writer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.crash
def test_a_request_is_answered_at_a_boundary_and_names_its_sender(tmp_path: Path, number: signal.Signals) -> None:
    with worker(tmp_path, "until_stopped") as process:
        wait_for(tmp_path / "ready")
        process.send_signal(number)
        assert process.wait(60) == 75
    ending = ending_of(tmp_path)
    assert (ending["error"], ending["message"]) == ("Interrupted", "stopped at step 41, checkpoint saved")
    note = ending["signal"]
    assert (note["number"], note["name"]) == (number, number.name)
    assert (note["sender_pid"], note["sender_uid"]) == (os.getpid(), os.getuid())
    assert "python" in note["sender_command"]
    assert abs(note["time"] - time.time()) < 60
    assert f"asked to stop: {number.name} from process {os.getpid()} of user {os.getuid()}" in log_of(tmp_path)


@pytest.mark.crash
def test_a_worker_stuck_in_c_still_notes_the_request(tmp_path: Path) -> None:
    with worker(tmp_path, "stuck_in_c") as process:
        wait_for(tmp_path / "ready")
        process.terminate()
        deadline = time.monotonic() + 60
        while "asked to stop: SIGTERM" not in log_of(tmp_path):
            assert time.monotonic() < deadline, log_of(tmp_path)
            time.sleep(0.02)
        assert process.poll() is None  # a step may have something to save: whoever asked decides how long to wait
    assert ending_of(tmp_path) == {}


@pytest.mark.crash
def test_a_worker_with_nothing_to_save_leaves_although_it_is_stuck(tmp_path: Path) -> None:
    with worker(tmp_path, "loading_in_c") as process:
        wait_for(tmp_path / "ready")
        process.terminate()
        assert process.wait(60) == 75
    ending = ending_of(tmp_path)
    assert (ending["error"], ending["phase"]) == ("Interrupted", "load")
    assert ending["signal"]["sender_pid"] == os.getpid()


@pytest.mark.crash
def test_a_request_before_the_work_begins_keeps_it_from_beginning(tmp_path: Path) -> None:
    with worker(tmp_path, "main", module="slow_import", SLOW_IMPORT=str(tmp_path / "importing")) as process:
        wait_for(tmp_path / "importing")
        process.terminate()
        assert process.wait(60) == 75
    ending = ending_of(tmp_path)
    assert (ending["error"], ending["phase"]) == ("Interrupted", "import")
    assert "before its work began" in ending["message"]
    assert not (tmp_path / "began").exists()


@pytest.mark.crash
def test_hangup_is_ignored(tmp_path: Path) -> None:
    with worker(tmp_path, "until_stopped") as process:
        wait_for(tmp_path / "ready")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 75


@pytest.mark.crash
def test_children_of_a_worker_can_be_stopped(tmp_path: Path) -> None:
    """The worker's mask would survive fork and exec, and nobody could stop its compilers but by SIGKILL."""
    with worker(tmp_path, "children") as process:
        started, forked = map(int, wait_for(tmp_path / "ready").split())
        deadline = time.monotonic() + 60
        while any(blocked(pid) & {signal.SIGTERM, signal.SIGINT} for pid in (started, forked)):
            assert time.monotonic() < deadline  # a moment after the fork
            time.sleep(0.01)
        assert {signal.SIGTERM, signal.SIGINT} <= blocked(process.pid)
        os.kill(started, signal.SIGTERM)
        os.kill(forked, signal.SIGTERM)
        assert wait_for(tmp_path / "ended") == f"{-signal.SIGTERM} {-signal.SIGTERM}"
        assert process.wait(60) == 0


def blocked(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


@pytest.mark.crash
def test_a_request_that_comes_while_children_are_started_is_not_lost(tmp_path: Path) -> None:
    for _ in range(5):
        (tmp_path / "ready").unlink(missing_ok=True)
        with worker(tmp_path, "asked_while_starting_children") as process:
            wait_for(tmp_path / "ready")
            process.terminate()
            assert process.wait(60) == 75
        assert ending_of(tmp_path)["signal"]["name"] == "SIGTERM"


@pytest.mark.crash
def test_a_crash_in_c_leaves_its_stack_and_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("of the attempt before\n")
    code, ending = ended(tmp_path, "segfault")
    assert (code, ending) == (-signal.SIGSEGV, {})
    stacks = (tmp_path / "fault").read_text()
    assert stacks.startswith("of the attempt before\n")
    assert "Segmentation fault" in stacks
    assert "in segfault" in stacks


@pytest.mark.crash
def test_stacks_are_given_on_request_also_while_the_gil_is_held(tmp_path: Path) -> None:
    with worker(tmp_path, "holds_the_gil") as process:
        wait_for(tmp_path / "ready")
        deadline = time.monotonic() + 60
        counts: list[int] = []
        # No sign of life in a second and a half is what a held GIL looks like; it is held a moment after "ready".
        while len(counts) < 2 or counts[-1] != counts[-2]:
            assert time.monotonic() < deadline, counts
            beat = read_beat(progress_path(tmp_path, "toy", 0))
            assert beat is not None
            counts.append(beat.alive_count)
            time.sleep(1.5)
        process.send_signal(signal.SIGUSR1)
        while not (tmp_path / "fault").exists() or "in holds_the_gil" not in (tmp_path / "fault").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None


def orphaned(run_dir: Path, function: str, **more: str) -> dict[str, Any]:
    """The ending of a worker whose supervisor is killed while it works."""
    code = f"""
import os, subprocess, sys
os.environ.update(RANK="0", WORLD_SIZE="1", DFLASH_PARENT_PID=str(os.getpid()), **{more!r})
os.environ["PYTHONPATH"] = {str(Path(__file__).parent)!r}
line = [sys.executable, "-m", "shared.worker", "ending_workers:{function}", {str(run_dir)!r}, "toy"]
subprocess.Popen(line, start_new_session=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        wait_for(run_dir / "ready")
        parent.kill()
    wait_for(ending_path(run_dir, "toy", 0))
    return ending_of(run_dir)


@pytest.mark.crash
@pytest.mark.parametrize(("function", "phase"), [("stuck_with_a_child", "step"), ("loading_in_c", "load")])
def test_a_worker_that_hangs_without_its_supervisor_ends_itself(tmp_path: Path, function: str, phase: str) -> None:
    ending = orphaned(tmp_path, function, DFLASH_HANG_SCALE="0.05")  # 3 s in a step
    assert (ending["code"], ending["error"], ending["phase"]) == (75, "SupervisorGone", phase)
    assert "saved nothing more" in ending["message"]
    pids = [ending["pid"], *map(int, (tmp_path / "ready").read_text().split())]
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.crash
def test_a_worker_without_its_supervisor_says_so(tmp_path: Path) -> None:
    ending = orphaned(tmp_path, "until_stopped")
    assert (ending["code"], ending["error"], ending["signal"]) == (75, "SupervisorGone", None)
    assert "supervisor is gone" in ending["message"]


@pytest.mark.crash
def test_a_disk_without_room_for_the_ending_leaves_the_exit_code(tmp_path: Path) -> None:
    code, ending = ended_without_ending(tmp_path, "no_room_for_an_ending")
    assert (code, ending) == (41, False)


def ended_without_ending(run_dir: Path, function: str) -> tuple[int, bool]:
    with worker(run_dir, function) as process:
        return process.wait(60), (run_dir / "workers").is_dir()


def test_the_kernel_takes_a_worker_first(tmp_path: Path) -> None:
    ended(tmp_path, "score")
    assert int((tmp_path / "score").read_text()) >= 500
