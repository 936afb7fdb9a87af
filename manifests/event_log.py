"""What a supervisor writes down: every event in the ledger and once more in a ring that needs no free space.

An event that the disk does not take (full, read-only) waits in memory and is appended when the disk takes it again;
meanwhile the ring has it. Nothing here raises: the run must not end because its log cannot be written. Used by
manifests/supervise.py; read by manifests/evidence.py.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.commit import Ledger
from manifests.records import EventRecord
from shared.errors import DflashError
from shared.ring import Ring
from shared.samples import events_path

RING_SLOTS, RING_SLOT_BYTES = 256, 4096
_MOST_WAITING = 1000
_LOOK_EVERY_S = 1.0


class EventLog:
    """The events of one run; `writer` names the ledger file. Without a folder they are only printed."""

    def __init__(self, run_dir: Path | None, run_id: str, boot: str | None) -> None:
        self.run_id, self.boot = run_id, boot
        self._folder = run_dir
        self._number = 0
        self._lost = 0
        self._left = False
        self._waiting: deque[EventRecord] = deque()
        self._degraded = ""
        self._looked = 0.0
        self._ledger: Ledger | None = None
        self._ring: Ring | None = None
        if run_dir is not None:
            with suppress(OSError, DflashError):
                self._ring = Ring(events_path(run_dir), RING_SLOTS, RING_SLOT_BYTES)

    def write(self, event: str, message: str = "", **detail: Any) -> None:
        """One event, on the disk when this returns if the disk takes it. `n` numbers a supervisor's events from 1."""
        if self._folder is None:
            return
        self._number += 1
        stamp = {"n": self._number, "mono": time.monotonic(), "boot": self.boot, "t": time.time()}
        record = EventRecord(run_id=self.run_id, event=event, message=message, detail=_plain(stamp | detail))
        print_line(f"{event}: {message}" if message else event)
        if not self._left and (self._waiting or not self._append(record)):
            self._wait(record)
        self._to_ring(record)

    def leave_folder(self) -> None:
        """Append nothing more: the folder of that name is gone, or another run's. The ring's file is still our own."""
        self._left = True
        self._waiting.clear()

    def retry(self) -> None:
        """Append what waits, when a second has passed since the last try; called by the loop."""
        if not self._waiting or time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        while self._waiting and self._append(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            said, self._degraded, lost = self._degraded, "", self._lost
            self._lost = 0
            self.write("log degraded", f"the event log takes records again ({lost} lost)", reason=said, lost=lost)

    def _append(self, record: EventRecord) -> bool:
        self._looked = time.monotonic()
        try:
            if self._ledger is None:
                assert self._folder is not None
                self._ledger = Ledger(self._folder, f"supervisor-{self.run_id}")
            self._ledger.append(record)
        except (OSError, DflashError) as error:
            self._degrade(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a record that cannot be written must not block those after it
            print_line(f"event {record.event} is lost: {type(error).__name__}: {error}")
            self._lost += 1
        return True

    def _wait(self, record: EventRecord) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(record)

    def _degrade(self, reason: str) -> None:
        if self._degraded:
            return
        self._degraded = reason
        print_line(f"log degraded: {reason}")
        stamp = {"mono": time.monotonic(), "boot": self.boot, "t": time.time(), "reason": reason, "lost": 0}
        self._to_ring(EventRecord(run_id=self.run_id, event="log degraded", message=reason, detail=stamp))

    def _to_ring(self, record: EventRecord) -> None:
        if self._ring is None:
            return
        values = {
            "time": record.detail["t"],
            "writer": f"supervisor-{self.run_id}",
            "run_id": self.run_id,
            "event": record.event,
            "message": record.message,
            "detail": record.detail,
        }
        with suppress(OSError, DflashError):
            self._ring.append(values)


def _plain(value: Any) -> Any:
    """JSON values that a record takes: workers report what they like, infinity and NaN too."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def print_line(text: str) -> None:
    """A line of the supervisor's own log, which is its stdout."""
    with suppress(OSError):
        # Not through sys.stdout: what a full disk refused would stay in its buffer and turn our exit code into 120.
        os.write(1, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))
