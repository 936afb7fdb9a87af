"""What a process that is started does not inherit, also where the limit of open files is in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPAWNING = """
import os, resource, sys
from pathlib import Path
from manifests.spawn import spawn

pipe, above = os.pipe()
os.dup2(above, 251)  # inheritable, as a shell's own
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
look = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], flush=True)"
pid = spawn([sys.executable, "-S", "-c", look], os.environ, Path(sys.argv[1]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("limit", [20, 100, 1000])
def test_a_descriptor_above_the_limit_of_open_files_is_no_obstacle(tmp_path: Path, limit: int) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", SPAWNING, str(log), str(limit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert log.read_text() == "[0, 1, 2]\n"
