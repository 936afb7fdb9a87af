"""Talks to the process that forks trials (tests/fault_server.py), and makes the rows that all of them extract from.

Used by tests/fault_extraction.py.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

DOCUMENTS = 9
ROOM_BYTES = 200 << 20
# The target gives NaN for the document with this letter (tests/fault_server.py): it is left out, with a record.
BAD_DOCUMENT, BAD_LETTER = 4, "ü"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Server:
    """The process that forks trials, and the inputs that all of them share."""

    def __init__(self) -> None:
        # In memory where there is some: what fsync promises is followed in the log, its minutes are not needed.
        memory = Path("/dev/shm")
        roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM_BYTES
        self.root = Path(tempfile.mkdtemp(prefix="dflash-faults-", dir=memory if roomy else None))
        atexit.register(self.close)
        self.log = (self.root / "server.log").open("wb")
        here = Path(__file__).parent
        self.may_mount, prefix = _how_to_mount(self.root)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(here / "fault_server.py"), str(self.root / "target")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": f"{here.parent}:{here}"},
        )
        pid = self._answer()["pid"]
        self.view = Path(f"/proc/{pid}/root") if prefix else Path("/")
        """Where the processes' root lies for us: they may have mounts of their own."""
        self._prepare()

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """One request; the answer comes when it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"action": action, **request}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.root / "server.log").read_text()[-3000:]
        return dict(json.loads(line))

    def _prepare(self) -> None:
        rows = [
            {
                "id": str(i),
                "messages": [
                    {"role": "user", "content": " ".join(WORDS[: 1 + i]) + BAD_LETTER * (i == BAD_DOCUMENT)},
                    {"role": "assistant", "content": " ".join(WORDS[i % 5 :])},
                ],
            }
            for i in range(DOCUMENTS)
        ]
        (self.root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = self.root / "prepare.txt"
        words = ["prepare", self.root / "data.jsonl", "--target", self.root / "target", "--out", self.root / "rows"]
        done = self.ask(
            "run",
            arguments=[*map(str, words), "--heldout-rows", "2"],
            folder=str(self.root / "none"),
            output=str(told),
            log=str(self.root / "prepare.log"),
        )
        assert done["code"] == 0, told.read_text()

    def close(self) -> None:
        """End the process and take its files away."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _how_to_mount(folder: Path) -> tuple[bool, list[str]]:
    """Whether a memory disk can be mounted, and what to put before a command that does.

    Always in a mount namespace of its own: what is mounted there is gone with the last process, however the tests end.
    """
    place = folder / "probe"
    place.mkdir()
    for prefix in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        words = [*prefix, "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
        with suppress(FileNotFoundError):
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                return True, prefix
    return False, []


@cache
def server() -> Server:
    """One for the whole test process: starting it costs the import of torch."""
    return Server()


def folder_of_a_test() -> Iterator[Path]:
    """For a fixture: an empty folder beside the server's own, gone after the test."""
    folder = Path(tempfile.mkdtemp(dir=server().root))
    yield folder
    shutil.rmtree(folder)
