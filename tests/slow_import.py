"""A module whose import takes until a request to stop has come."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shared.worker import stop_requested

Path(os.environ["SLOW_IMPORT"]).write_text("importing")
deadline = time.monotonic() + 60
while not stop_requested() and time.monotonic() < deadline:
    time.sleep(0.01)


def main(run_dir: Path, rank: int, world_size: int) -> None:
    (run_dir / "began").touch()
