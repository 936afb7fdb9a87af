"""Logs of any size and content come out as lines a terminal can take, and growing ones line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.log_view import TAIL_BYTES, Follower, logs_of, tail
from manifests.plain_text import LINE_CHARS
from shared.errors import ConfigRefused, DataMissing


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb\nc\nd\n", ["b", "c", "d"]),
        (b"a\nb\nc\nd", ["b", "c", "d"]),
        (b"x\n 1%|\r 50%|#\r100%|##\n", ["x", "100%|##"]),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x9b7\xff\n", ["red \ufffd7\ufffd"]),
        (b"bell \x07 \x1bM tab\there\n", ["bell \\x07 \\x1bM tab\there"]),
    ],
)
def test_last_lines(tmp_path: Path, data: bytes, lines: list[str]) -> None:
    path = tmp_path / "train-0.log"
    path.write_bytes(data)
    assert tail(path, 3) == lines
    assert tail(path, 0) == []


def test_a_tail_does_not_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train-0.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing in front
        file.seek(0, 2)
        file.write(b"\n" + b"".join(b"line %d\n" % number for number in range(5000)))
    assert tail(path, 5000) == [f"line {number}" for number in range(5000)]
    path.write_bytes(b"y" * (2 * TAIL_BYTES))
    (only,) = tail(path, 3)
    assert len(only) < 3 * LINE_CHARS
    assert "characters more" in only


def test_which_logs(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="holds no logs"):
        logs_of(tmp_path)
    for folder in ("logs", "supervision/stacks"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("train-10.log", "train-2.log", "train-supervisor.log", "train-summary.txt", "notes"):
        (tmp_path / "logs" / name).touch()
    assert [log.path.name for log in logs_of(tmp_path)] == ["train-2.log", "train-10.log"]
    assert [log.path.name for log in logs_of(tmp_path, "supervisor")] == ["train-supervisor.log"]
    with pytest.raises(ConfigRefused, match="no log of rank 3; it has 2, 10, summary, supervisor"):
        logs_of(tmp_path, "3")
    (tmp_path / "logs" / "train-2.fault").touch()  # empty: nothing crashed
    with pytest.raises(DataMissing, match="holds no stacks"):
        logs_of(tmp_path, stacks=True)
    (tmp_path / "logs" / "train-2.fault").write_text("Fatal Python error: Segmentation fault")
    (tmp_path / "supervision" / "stacks" / "attempt-1-rank-0.txt").write_text("Thread 1")
    assert [log.path.name for log in logs_of(tmp_path, stacks=True)] == ["attempt-1-rank-0.txt", "train-2.fault"]


def test_following_through_restarts_and_cut_files(tmp_path: Path) -> None:
    log, late = tmp_path / "train-0.log", tmp_path / "train-1.log"
    log.write_bytes(b"old\nlast\nhalf of ")
    follower = Follower()
    assert follower.begin(log, 1) == ["last"]
    assert follower.new_lines() == []
    with log.open("ab") as file:
        file.write(b"a line\n--- attempt 2")
    assert follower.new_lines() == [(log, ["half of a line"])]
    log.write_bytes(b"cut\n")
    assert follower.new_lines() == [(log, ["cut"])]
    log.unlink()
    assert follower.new_lines() == []
    log.write_bytes(b"another file\n")
    late.write_bytes(b"first\nlast without end")
    follower.add([log, late])
    assert follower.new_lines() == [(log, ["another file"]), (late, ["first"])]
    assert follower.new_lines(ended=True) == [(late, ["last without end"])]
