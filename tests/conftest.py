"""Shared set-up: one torch thread per test process, so that parallel tests do not fight over cores."""

from __future__ import annotations

import os
import signal

# nohup and a shell's `&` start us with these ignored, and every command that a test starts would inherit that.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
