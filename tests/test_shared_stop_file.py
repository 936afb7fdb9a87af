"""A request to stop is one file: whole, with who asked, gone when the next run begins."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from manifests.stop_requests import Requests, code_of, told
from shared.errors import PathNotWritable
from shared.stop_file import forget_stop, read_stop, stop_path, write_stop


def test_a_request_says_who_asked(tmp_path: Path) -> None:
    (tmp_path / "supervision").mkdir()
    assert read_stop(tmp_path) is None
    written = write_stop(tmp_path, False, "dflash stop")
    assert read_stop(tmp_path) == written
    assert (written["uid"], written["pid"], written["host"]) == (os.getuid(), os.getpid(), socket.gethostname())
    assert (written["now"], written["via"]) == (False, "dflash stop")
    assert f"dflash stop by {written['user']}@{socket.gethostname()}" in told(written)
    assert code_of(written) == "user.stop"
    forget_stop(tmp_path)
    forget_stop(tmp_path)
    assert read_stop(tmp_path) is None


def test_a_folder_that_takes_no_request_says_so(tmp_path: Path) -> None:
    (tmp_path / "supervision").write_text("a file where the folder was")
    with pytest.raises(PathNotWritable):
        write_stop(tmp_path, False, "dflash stop")
    assert read_stop(tmp_path) is None
    forget_stop(tmp_path)


def test_a_half_written_request_is_none(tmp_path: Path) -> None:
    (tmp_path / "supervision").mkdir()
    stop_path(tmp_path).write_text('{"time": 1')
    assert read_stop(tmp_path) is None


def test_requests_are_heard_once_each_and_the_second_means_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manifests.stop_requests.LOOK_EVERY_S", 0.0)
    (tmp_path / "supervision").mkdir()
    with Requests(tmp_path) as requests:
        requests.wait(0.0)
        assert not requests.asked
        write_stop(tmp_path, False, "a test")
        requests.wait(0.0)
        requests.wait(0.0)
        assert (len(requests.by), requests.now) == (1, False)
        write_stop(tmp_path, False, "a test")
        requests.wait(0.0)
        assert (len(requests.by), requests.now) == (2, True)
    with Requests(tmp_path) as requests:
        requests.wait(0.0)  # the file is still there
        assert len(requests.by) == 1
    with Requests(None) as requests:
        # To this thread: the kernel gives a process's signal to any thread that lets it in, such as one of pytest's,
        # and the handler that then answers does not learn the sender.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        requests.wait(1.0)
        assert requests.by[0]["sender_pid"] == os.getpid()
        assert code_of(requests.by[0]) == "sig.term.external"


def test_one_request_that_comes_two_ways_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's SIGTERM to all processes of a job: our own, and what the command that looks on passes on."""
    monkeypatch.setattr("manifests.stop_requests.LOOK_EVERY_S", 0.0)
    (tmp_path / "supervision").mkdir()
    with Requests(tmp_path) as requests:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        requests.wait(1.0)
        write_stop(tmp_path, False, "SIGTERM")
        requests.wait(0.0)
        assert (len(requests.by), requests.now) == (1, False)
        write_stop(tmp_path, True, "SIGTERM")  # it was pressed again
        requests.wait(0.0)
        assert (len(requests.by), requests.now) == (2, True)
    monkeypatch.setattr("manifests.stop_requests.ECHO_S", 0.0)
    (tmp_path / "later" / "supervision").mkdir(parents=True)
    with Requests(tmp_path / "later") as requests:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        requests.wait(1.0)
        write_stop(tmp_path / "later", False, "dflash stop")
        requests.wait(0.0)
        assert (len(requests.by), requests.now) == (2, True)
