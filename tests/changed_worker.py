"""`dflash train` with another function as its worker: python changed_worker.py MODULE:FUNCTION train ...

For tests that change something inside a real worker, which is a process of its own: the function changes it and calls
stage2_train.train.main. Whoever starts this puts the function's folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import shared.cli
from stage2_train import launch_train


def main() -> None:
    """Be the foreground command."""
    entry = sys.argv.pop(1)
    real = launch_train._launch_spec
    launch_train._launch_spec = lambda *given: replace(real(*given), entry=entry)
    shared.cli.main()


if __name__ == "__main__":
    main()
