"""One question of `dflash doctor` in a process of its own.

`python -m manifests.doctor_child MODULE:FUNCTION DEADLINE WORDS...` calls the function with the words and prints the
JSON values it returns. Whatever it does (raise, crash in a driver, hang), the
doctor lives on: an exception becomes an answer, a crash leaves a stack on stderr by faulthandler, and shortly before
the deadline all stacks are written there too. Started by manifests/doctor_probes.py, which reads both.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

# Before the line that is the answer: libraries print to stdout as they like.
MARK = "dflash-doctor-answer "
# Stacks are written this long before the deadline, so that they are whole when the process is killed.
STACKS_BEFORE_S = 0.5
ORPHANED_S = 10.0


def main() -> int:
    """Answer on stdout; 0 when the function returned, 1 when it raised."""
    entry, deadline_s, arguments = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    faulthandler.enable(all_threads=True)
    faulthandler.dump_traceback_later(max(deadline_s - STACKS_BEFORE_S, deadline_s / 2), exit=False)
    # A doctor that was killed itself ends nothing: SIGALRM does, also inside a call that never comes back to Python.
    signal.setitimer(signal.ITIMER_REAL, deadline_s + ORPHANED_S)
    try:
        module, function = entry.split(":")
        value = getattr(importlib.import_module(module), function)(*arguments)
    except BaseException as error:  # noqa: BLE001 - any ending but a signal is an answer
        traceback.print_exc()
        _tell({"error": type(error).__name__, "message": " ".join(str(error).split())[:1000]})
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    _tell({"value": value})
    return 0


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.flush()
    os.write(1, ("\n" + MARK + json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    code = main()
    # Not through the interpreter's end: a driver that hangs in its clean-up would turn a good answer into a bad one.
    sys.stderr.flush()
    os._exit(code)
