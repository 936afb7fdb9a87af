"""A ring keeps the newest records, whatever happens to its writer or its disk, and gives back only whole ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import PathNotWritable
from shared.ring import Ring, read_ring


def test_the_newest_are_kept_in_order(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a" / "x.ring", 5, 128)
    assert read_ring(ring.path) == []
    for number in range(12):
        ring.append({"n": number}, durable=number == 3)
    ring.close()
    assert [record["n"] for record in read_ring(ring.path)] == [7, 8, 9, 10, 11]


def test_a_ring_that_is_there_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    for start in (0, 10):
        ring = Ring(path, 4, 128)
        for number in range(start, start + 3):
            ring.append({"n": number})
        ring.close()
    assert [record["n"] for record in read_ring(path)] == [2, 10, 11, 12]
    Ring(path, 8, 128).close()
    assert read_ring(path) == [], "another shape begins anew"


def test_torn_and_damaged_slots_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.ring"
    ring = Ring(path, 4, 128)
    for number in range(4):
        ring.append({"n": number})
    ring.close()
    data = bytearray(path.read_bytes())
    at = data.index(b'{"n":2}')
    data[at + 3] ^= 1
    path.write_bytes(data)
    assert [record["n"] for record in read_ring(path)] == [0, 1, 3]
    for cut in range(0, len(data), 37):
        path.write_bytes(data[:cut])
        assert len(read_ring(path)) <= 3, "a cut file gives what is whole"
    ring = Ring(path, 4, 128)
    ring.append({"n": 9})
    ring.close()
    assert read_ring(path)[-1] == {"n": 9}


@pytest.mark.parametrize("content", [None, b"", b"\0" * 4096, os.urandom(5000), b"dfring1\n" + b"\xff" * 100])
def test_what_is_no_ring_gives_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.ring").write_bytes(content)
    assert read_ring(tmp_path / "x.ring") == []
    assert read_ring(tmp_path) == []


def test_a_record_too_large_is_cut_inside(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "x.ring", 4, 4096)
    lines = [f"line {number} " + "y" * 300 for number in range(60)]
    ring.append(
        {"event": "worker ended", "detail": {"rank": 3, "lines": lines, "text": "head" + "z" * 50_000 + "tail"}}
    )
    ring.append({f"k{number}": "x" * 10_000 for number in range(400)} | {"mono": 1.5})
    ring.append({"wrong": object(), "n": "é" * 9_000})
    ring.close()
    ended, many, last = read_ring(ring.path)
    assert ended["detail"]["rank"] == 3
    assert ended["detail"]["text"].startswith("head")
    assert ended["detail"]["text"].endswith("tail")
    assert ended["detail"]["lines"][-1].startswith("line 59")
    assert many["cut"] is True
    assert many["mono"] == 1.5
    assert last["n"].startswith("é")


@pytest.mark.crash
def test_what_was_written_survives_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from shared.ring import Ring\n"
        "ring = Ring(Path(sys.argv[1]), 8, 128)\n"
        "for n in range(21): ring.append({'n': n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.ring")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["n"] for record in read_ring(tmp_path / "x.ring")] == list(range(13, 21))


FULL = """
import os, sys
from pathlib import Path
from shared.errors import DiskFull
from shared.ring import Ring, read_ring

disk = Path(sys.argv[1])
ring = Ring(disk / "x.ring", 20, 1024)
with (disk / "ballast").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
assert os.statvfs(disk).f_bavail == 0
for n in range(50):
    ring.append({"n": n}, durable=True)
assert [r["n"] for r in read_ring(disk / "x.ring")] == list(range(30, 50))
try:
    Ring(disk / "y.ring", 20, 1024)
except DiskFull as error:
    print("refused:", error)
"""


def test_a_full_disk_takes_every_record_of_a_ring_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    prefixes = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
    probes = {tuple(prefix): subprocess.run([*prefix, "true"], capture_output=True, check=False) for prefix in prefixes}
    prefix = next((list(words) for words, done in probes.items() if done.returncode == 0), None)
    if prefix is None:
        pytest.skip("mounting a memory disk needs root or a user namespace; both are refused")
    mount = f"mount -t tmpfs -o size=256k none {tmp_path / 'disk'}"
    script = f'{mount} && exec {sys.executable} -c "$SCRIPT" {tmp_path / "disk"}'
    done = subprocess.run(
        [*prefix, "sh", "-c", script], env={**os.environ, "SCRIPT": FULL}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "refused: disk full while writing" in done.stdout


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.ring").mkdir()
    with pytest.raises(PathNotWritable, match=r"x\.ring"):
        Ring(tmp_path / "x.ring", 4, 128)
