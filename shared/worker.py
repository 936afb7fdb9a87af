"""The first code of every worker process: `python -m shared.worker MODULE:FUNCTION RUN_DIR ROLE`.

It turns signals into a question the loop asks (`stop_requested`), keeps Python stacks of hard crashes,
and writes how the worker ended, so that the parent can repeat a user fault in one line.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from shared.atomic import fault_of, write_json
from shared.errors import DflashError

_stop = False
_parent_pid = 0


def stop_requested() -> bool:
    """True once the run was asked to stop, or once the launching process is gone (nobody would reap us)."""
    return _stop or (_parent_pid != 0 and os.getppid() != _parent_pid)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    global _stop
    _stop = True


def install_stop_signals() -> None:
    """Make SIGTERM and SIGINT a request that the loop answers at its next boundary; SIGHUP is ignored."""
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ending_path(run_dir: Path, role: str, rank: int) -> Path:
    """Where a worker's ending is written."""
    return run_dir / "workers" / f"{role}-{rank}.json"


def main() -> int:
    """Run one worker function and record its ending; the exit code is the error's own."""
    global _parent_pid
    entry, run_dir, role = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _parent_pid = int(os.environ.get("DFLASH_PARENT_PID", "0"))
    started = time.time()
    faulthandler.enable(all_threads=True)
    install_stop_signals()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role}-{rank} %(levelname)s %(name)s: %(message)s")
    ending = {"pid": os.getpid(), "started": started, "code": 0, "error": None, "message": ""}
    try:
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(run_dir, rank, world_size)
    except BaseException as error:
        fault = fault_of(error) if isinstance(error, OSError) else error
        if isinstance(fault, DflashError):
            ending |= {"code": fault.exit_code, "error": type(fault).__name__, "message": str(fault)}
            logging.getLogger(__name__).error("ended by %s: %s", type(fault).__name__, fault)
        else:
            message = "".join(traceback.format_exception_only(error))
            ending |= {"code": 1, "error": type(error).__name__, "message": message}
            traceback.print_exc()
    path = ending_path(run_dir, role, rank)
    code = int(str(ending["code"]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, ending | {"ended": time.time()})
    except (DflashError, OSError) as error:
        # A full disk takes no ending: the exit code alone carries the class, and work without its ending is not done.
        code = code or (error.exit_code if isinstance(error, DflashError) else 1)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    # The module runs as __main__, but loops import `shared.worker`: hand over to that one copy of the state.
    sys.exit(importlib.import_module("shared.worker").main())
