"""A question in a process of its own: every way to end is an answer, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supervised import alive, until

from manifests.doctor_ask import Answer, Question, ask, place, read_answer

TESTS = {"PYTHONPATH": str(Path(__file__).parent)}


def put(function: str, *arguments: str, deadline_s: float = 60) -> Answer:
    return ask(Question(f"doctor_toys:{function}", arguments, TESTS), deadline_s)


def test_the_value_comes_back_whatever_else_was_printed() -> None:
    found = put("answer", "hello")
    assert (found.ending, found.value) == ("answered", {"word": "hello"})


@pytest.mark.parametrize(
    ("function", "ending", "says"),
    [
        ("fail", "raised", "KeyError: 'the message\\nin two lines'"),
        ("nothing_of_that_name", "raised", "AttributeError: module 'doctor_toys' has no attribute"),
        ("leave", "silent", "ended with exit code 3 and no answer: the library gave up"),
        ("crash", "killed", "killed by SIGSEGV in "),
        ("be_killed", "killed", "killed by SIGKILL"),
    ],
)
def test_every_ending_is_a_sentence(function: str, ending: str, says: str) -> None:
    found = put(function)
    assert (found.ending, found.value) == (ending, None)
    assert says in found.sentence()


def test_a_crash_names_its_place() -> None:
    assert put("crash").where.endswith("in string_at")


def test_a_missing_module_is_an_answer() -> None:
    found = ask(Question("no_such_module:x"), 60)
    assert (found.ending, found.name) == ("raised", "ModuleNotFoundError")


@pytest.mark.crash
def test_what_hangs_is_named_and_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    started = time.monotonic()
    found = put("hang_with_a_child", str(note), deadline_s=8)  # it must have started its child by then
    assert time.monotonic() - started < 60
    assert (found.ending, found.immortal) == ("late", False)
    assert found.sentence().startswith("no answer after 8 s in ")
    assert found.where.endswith("in hang_with_a_child")
    child = int(note.read_text())
    until(lambda: not alive(child))  # a killed process must run once more to end: on busy cores that takes a moment


@pytest.mark.crash
def test_a_try_ends_by_itself_when_the_doctor_was_killed() -> None:
    code = "import manifests.doctor_child as c, sys\nc.ORPHANED_S = 0.2\nsys.exit(c.main())"
    command = [sys.executable, "-c", code, "doctor_toys:hang_in_c", "0.5"]
    done = subprocess.run(command, env={**os.environ, **TESTS}, stderr=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


def test_an_answer_that_came_with_the_deadline_counts() -> None:
    told = 'dflash-doctor-answer {"value": 7}\n'
    assert read_answer(told, "", 0, 1.0, late=True).value == 7
    assert read_answer(told[:25], "", None, 1.0, late=True, immortal=True).sentence() == (
        "no answer after 1 s, and could not be killed: it hangs inside the kernel or a driver"
    )


def test_the_place_is_that_of_the_crashed_thread_else_of_the_main_one() -> None:
    frame = '  File "/a/b/c/d.py", line {} in {}\n'
    thread = "Thread 0x01 (most recent call first):\n" + frame.format(1, "helper") + frame.format(2, "run")
    main = "Thread 0x02 (most recent call first):\n" + frame.format(3, "wait")
    crashed = "Current thread 0x03 (most recent call first):\n" + frame.format(4, "launch")
    assert place("Timeout (0:00:01)!\n" + thread + main) == "b/c/d.py:3 in wait"
    assert place("Fatal Python error: Segmentation fault\n\n" + crashed + "\n" + thread) == "b/c/d.py:4 in launch"
    assert place("no stacks at all") == ""
