"""Shared set-up: one torch thread per test process, so that parallel tests do not fight over cores; what is drawn."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# nohup and a shell's `&` start us with these ignored, and every command that a test starts would inherit that.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes depends on what else runs on the cores; and every run draws the same examples, so that a
# change, not chance, makes a test fail.
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")
