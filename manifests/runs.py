"""A command's life on a folder, as records: started before the work, and an ending whatever happens short of a kill.

Used by prepare, extract, train, eval and export around their work. A folder whose newest record says "started"
while nobody holds it was lost: `dflash status` says so.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manifests.commit import Ledger
from manifests.records import RunRecord
from shared import provenance
from shared.atomic import owned
from shared.errors import DflashError, Interrupted


@contextmanager
def recorded(folder: Path, command: str, config: dict[str, Any]) -> Iterator[str]:
    """Own `folder`, record that `command` started with this config and these versions, and how it ended.

    Yields the run id. Raises RunBusy when another living process owns the folder; re-raises everything.
    """
    with owned(folder):
        run_id = uuid.uuid4().hex[:12]
        ledger = Ledger(folder, f"{command}-{run_id}")
        detail = {"config": config, "provenance": provenance.collect()}
        ledger.append(RunRecord(run_id=run_id, command=command, state="started", detail=detail))
        try:
            yield run_id
        except BaseException as error:
            code = (
                error.exit_code
                if isinstance(error, DflashError)
                else Interrupted.exit_code
                if isinstance(error, KeyboardInterrupt)
                else 1
            )
            state = "interrupted" if code == Interrupted.exit_code else "failed"
            message = f"{type(error).__name__}: {error}"
            ledger.append(RunRecord(run_id=run_id, command=command, state=state, exit_code=code, message=message))
            raise
        ledger.append(RunRecord(run_id=run_id, command=command, state="finished", exit_code=0))


def is_owned(folder: Path) -> bool:
    """Whether a living process on this host holds the folder."""
    path = folder / ".owner"
    if not path.exists():
        return False
    # Read-only is enough for flock and works in a folder that is not ours to write.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
