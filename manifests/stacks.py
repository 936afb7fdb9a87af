"""Save what every rank of a hung run is doing before anything is killed, and group the ranks that do the same.

Called by manifests/supervise.py. faulthandler answers SIGUSR1 even when native code holds the GIL; py-spy is asked too
where it is installed and allowed. The group that differs from the most is where to look first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from manifests.launch_spec import stacks_path
from manifests.worker_process import Seat
from shared.atomic import disk_faults
from shared.errors import DflashError

ANSWER_S = 2.0
_SPY_S = 5.0
_FRAMES = 6
_MOST_BYTES = 1 << 18
_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)')


Wait = Callable[[Callable[[], bool], float], object]
"""wait(condition, seconds): until the condition holds or the time is over; deaths are still noticed meanwhile."""


def save_stacks(seats: Sequence[Seat], wait: Wait) -> tuple[list[str], dict[str, list[int]]]:
    """Write RUN/supervision/stacks/attempt-N-rank-R.txt for running seats; returns (file names, {summary: ranks})."""
    before = {seat.rank: seat.fault_size() for seat in seats}
    kernel = {seat.rank: _kernel_facts(seat.pid) for seat in seats}
    spies = {seat.rank: _start_spy(seat.pid) for seat in seats}
    # Before its first beat a worker has not asked faulthandler to answer: SIGUSR1 would end it.
    asked = [seat for seat in seats if seat.beat() is not None]
    for seat in asked:
        seat.send(signal.SIGCONT)
        seat.send(signal.SIGUSR1)
    wait(lambda: all(seat.fault_size() > before[seat.rank] for seat in asked if seat.running), ANSWER_S)
    # The dump is several writes: it is whole when it no longer grows.
    sizes: dict[int, int] = {}

    def settled() -> bool:
        nonlocal sizes
        seen = {seat.rank: seat.fault_size() for seat in seats}
        same, sizes = seen == sizes, seen
        return same

    wait(settled, 1.0)
    wait(lambda: all(spy is None or spy.process.poll() is not None for spy in spies.values()), _SPY_S)
    files: list[str] = []
    groups: dict[str, list[int]] = {}
    for seat in seats:
        stacks = seat.fault_since(before[seat.rank], _MOST_BYTES)
        groups.setdefault(summary_of(stacks), []).append(seat.rank)
        path = stacks_path(seat.spec.run_dir, seat.attempt, seat.rank)
        silent = "faulthandler did not answer SIGUSR1" if seat in asked else "not asked: it has not begun"
        text = f"{kernel[seat.rank]}\n{stacks or silent}\n{_spied(spies[seat.rank])}\n"
        with suppress(DflashError, OSError), disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            files.append(path.name)
    return files, groups


def summary_of(stacks: str) -> str:
    """The innermost frames of the main thread: "function (file.py:12) < caller (file.py:40) < ..."."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks.strip())
    main = next((text for text in threads if text.startswith("Current thread")), threads[-1])
    frames = [found for line in main.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return "no Python stack"
    shown = [f"{frame['function'].strip()} ({Path(frame['file']).name}:{frame['line']})" for frame in frames[:_FRAMES]]
    return " < ".join(shown)


def _kernel_facts(pid: int) -> str:
    """What /proc says of a process and its threads; some of it needs rights that a container may not give."""
    lines = [f"pid {pid}"]
    for name in ("status", "wchan", "syscall", "stack"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
            kept = [
                line for line in text.splitlines() if name != "status" or line.startswith(("State", "VmRSS", "Threads"))
            ]
            lines.append(f"{name}: {'; '.join(kept)[:1000]}")
    return "\n".join(lines)


def _start_spy(pid: int) -> _Spy | None:
    program = shutil.which("py-spy")
    if program is None:
        return None
    # Not a pipe, which fills, and not a file, which a full disk has no room for.
    output = os.memfd_create("stacks")
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        return _Spy(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output), output)
    except OSError:
        os.close(output)
        return None


class _Spy(NamedTuple):
    """A running py-spy and the file in memory that it writes to."""

    process: subprocess.Popen[bytes]
    output: int


def _spied(spy: _Spy | None) -> str:
    if spy is None:
        return "py-spy is not installed: native frames are not shown"
    spy.process.kill()
    code = spy.process.wait()
    text = os.pread(spy.output, _MOST_BYTES, 0).decode(errors="replace").strip()
    os.close(spy.output)
    return f"py-spy dump (exit {code}):\n{text}"
