"""Run folders as a supervised training leaves or keeps them, without a training: for tests of what reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manifests.commit import Ledger
from manifests.records import EventRecord, RunRecord
from shared.beat import Beat
from shared.kernel import Kernel, host_identity, process
from shared.reporter import progress_path

GONE = 1 << 22
"""A pid that no process has: the kernel gives smaller ones."""
# Holds the folder as a supervisor does, and leaves at SIGTERM.
HOLDER = """
import signal, sys, time
from pathlib import Path
from shared.atomic import owned
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with owned(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder's lock."""
    line = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def identity(pid: int) -> dict[str, int]:
    """A process as events and heartbeats name it."""
    found = process(pid)
    return {"pid": pid, "start_ticks": found.start_ticks if found else 1}


class MadeRun:
    """One run's records; `ago` seconds are taken from every wall time."""

    def __init__(self, folder: Path, run_id: str = "made", command: str = "train", ago: float = 0.0) -> None:
        self.folder, self.run_id, self.command, self.ago = folder, run_id, command, ago
        self.ledgers = [Ledger(folder, f"{who}-{run_id}") for who in (command, "supervisor")]
        for ledger in self.ledgers:
            ledger._now = self._now  # type: ignore[method-assign]
        self._last = 0.0

    def _now(self) -> float:
        self._last = max(self._last + 1e-5, time.time() - self.ago)
        return self._last

    def record(self, state: str, message: str = "", exit_code: int | None = None, **detail: Any) -> MadeRun:
        self.ledgers[0].append(
            RunRecord(
                run_id=self.run_id,
                command=self.command,
                state=state,
                message=message,
                exit_code=exit_code,
                detail=detail,
            )
        )
        return self

    def started(self, argv: list[str] | None = None, cwd: Path | str = "/", **provenance: Any) -> MadeRun:
        said = {"argv": ["dflash", *(argv or ["train", "--store=x.zarr"])], "cwd": str(cwd), **provenance}
        return self.record("started", config={"device": "cpu"}, provenance=said)

    def event(self, name: str, message: str = "", mono: float | None = None, **detail: Any) -> MadeRun:
        stamp = {"mono": time.monotonic() if mono is None else mono, "boot": Kernel().boot_id()}
        record = EventRecord(run_id=self.run_id, event=name, message=message, detail=stamp | detail)
        self.ledgers[1].append(record)
        return self

    def supervised(self, pid: int, ranks: int = 1, **other: Any) -> MadeRun:
        """The supervisor's first event and one for each worker, all of them the process `pid`."""
        who = identity(pid)
        place = {"host": os.uname().nodename, **host_identity(Kernel()), "num_workers": ranks, "role": self.command}
        self.event("supervisor started", **{**who, **place, **other})
        self.event("attempt started", attempt=1)
        for rank in range(ranks):
            self.event("worker spawned", attempt=1, rank=rank, **who)
        return self

    def beat(
        self, rank: int, pid: int, phase: str, done: float, total: float = 100.0, silent_s: float = 0.0
    ) -> MadeRun:
        """A heartbeat whose last progress was `silent_s` seconds ago, 10 s after the phase began."""
        mono, wall = time.monotonic() - silent_s, time.time() - self.ago - silent_s
        beat = Beat.create(progress_path(self.folder, self.command, rank))
        beat.report(
            {
                **identity(pid),
                "attempt": 1,
                "phase": phase,
                "phase_since": mono - 10,
                "done": done,
                "total": total,
                "unit": "steps",
                "reported": mono,
                "time": wall,
                "started": wall - 10,
                "spent": {"load": 20.0},
            }
        )
        beat.alive()
        beat.close()
        return self

    def log(self, rank: int | str, text: str) -> MadeRun:
        path = self.folder / "logs" / f"{self.command}-{rank}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return self
