"""The founding night: a real training is killed with all that lives, and what happened is still named and mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.crash, pytest.mark.slow]

EXAMPLE = Path(__file__).parent.parent / "examples" / "founding_night.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("night")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("terminal", ["tmux", "pty"])
def test_the_founding_night_is_named_and_the_training_goes_on(folder: Path, terminal: str) -> None:
    if terminal == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    path = os.environ["PATH"] if terminal == "tmux" else ""
    night = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert night.returncode == 0, night.stdout + night.stderr
    said = night.stdout
    for name in ["dflash train", "supervisor", "worker", *(["tmux server"] if terminal == "tmux" else [])]:
        assert name in said.partition("SIGKILL to ")[2].partition("\n")[0]
    status, why, resumed = (said.partition(f"$ dflash {name} ")[2] for name in ("status", "why", "resume"))
    assert "train lost: all 3 processes vanished at once" in status
    assert "cause: tree.killed" in status
    assert "Verdict: `tree.killed`" in why
    assert "continuing train/checkpoints/step-00000010 (step 10 of 30)" in resumed
    assert "trained 30 steps" in resumed
