"""TensorBoard event files: a run's numbers where its viewer looks for them.

Written by metrics.py through tensorboardX's writer that works in the caller's thread: a disk that is full is an error
here, not a line nobody sees. A view only: the manifest's metrics are the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shared.atomic import disk_faults

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

FOLDER = "tensorboard"


class EventFile:
    """The event file of one start of a run; each number is on the disk when `scalars` returns."""

    def __init__(self, run_dir: Path, run_id: str, first_step: int) -> None:
        """Open a new file that replaces what earlier starts wrote from `first_step` on; a viewer reads by name.

        Raises DiskFull or PathNotWritable.
        """
        # Not at the top: tensorboardX sets a variable of the environment when it is imported.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder, name = run_dir / FOLDER, f".{time.time_ns()}.{run_id}"
        with disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), name)
            self.path = next(folder.glob(f"*{name}"))
        self._append(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of one step, by tag ("train/loss"). Raises DiskFull or PathNotWritable."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        with np.errstate(over="ignore"):  # beyond float32 it becomes an infinity, as in every writer
            pairs = [Summary.Value(tag=tag, simple_value=float(np.float32(value))) for tag, value in values.items()]
        self._append(Event(step=step, summary=Summary(value=pairs)))

    def close(self) -> None:
        """No more numbers. Raises DiskFull or PathNotWritable."""
        with disk_faults(self.path):
            self._writer.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        with disk_faults(self.path):
            self._writer.write_event(event)
            self._writer.flush()
