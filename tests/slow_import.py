"""A module that takes a while to import, for a request that comes meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

Path(os.environ["SLOW_IMPORT"]).write_text("importing")
time.sleep(1.0)


def main(run_dir: Path, rank: int, world_size: int) -> None:
    (run_dir / "began").touch()
