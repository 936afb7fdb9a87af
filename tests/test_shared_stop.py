"""A request to stop is an exception with a record and exit code 75, however it comes and however often."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A command like eval's: its own process works inside `recorded`, with a clean-up that takes a moment.
COMMAND = """
import signal, sys, time, types, pathlib, click
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the shell of these tests may ignore some (nohup, `&`)
    signal.signal(number, signal.SIG_DFL)
import shared.cli as cli
from manifests.runs import recorded
@click.command()
@click.argument("folder")
def hold(folder):
    with recorded(pathlib.Path(folder), "eval", {}):
        try:
            pathlib.Path(folder, "working").touch()
            time.sleep(120)
        finally:
            pathlib.Path(folder, "left").touch()
module = types.ModuleType("hold_command"); module.hold = hold; sys.modules["hold_command"] = module
cli.COMMANDS["hold"] = ("hold_command", "hold", "waits")
cli.main()
"""


def states(folder: Path) -> list[tuple[str, int | None]]:
    lines = [line for path in folder.glob("manifest/runs.*.jsonl") for line in path.read_text().splitlines()]
    return [(record["state"], record["exit_code"]) for record in map(json.loads, lines)]


@pytest.mark.crash
@pytest.mark.parametrize("requests", [("SIGTERM",), ("SIGINT",), ("SIGHUP",), ("SIGINT",) * 2, ("SIGTERM", "SIGINT")])
def test_every_request_leaves_its_record_and_one_line(tmp_path: Path, requests: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "hold", str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as child:
        while not (tmp_path / "working").exists():
            assert child.poll() is None
            time.sleep(0.01)
        for name in requests:
            child.send_signal(getattr(signal, name))
            while not (tmp_path / "left").exists():
                assert child.poll() is None or (tmp_path / "left").exists()
                time.sleep(0.001)
        _, said = child.communicate(timeout=60)
    assert child.returncode == 75
    assert len(said.splitlines()) == 1
    assert said.startswith("stopped on request (SIG")
    assert states(tmp_path)[0] == ("started", None)
    assert states(tmp_path)[1:] == [("interrupted", 75)]
    assert (tmp_path / "left").exists()


@pytest.mark.crash
def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import os, signal; from shared.stop import install_stop; install_stop(); os.kill(os.getpid(), signal.SIGHUP)"
    )
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", code + "; print('on')"]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "on\n"


def test_a_request_waits_for_shielded_lines() -> None:
    code = """
import os, signal
from shared.stop import StopRequest, install_stop, shielded
install_stop()
try:
    with shielded():
        os.kill(os.getpid(), signal.SIGTERM)
        print("written")
except StopRequest as request:
    print(request)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["written", "SIGTERM"]
