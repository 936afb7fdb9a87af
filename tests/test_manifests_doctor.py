"""`dflash doctor` as people run it: quick without torch, and alive whatever torch does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_host import make_host

from shared.kernel import ROOT_VARIABLE

TORCHES = {
    "missing": "raise ModuleNotFoundError(\"No module named 'torch'\")",
    "crashing": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hanging": "import time\ntime.sleep(120)",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A plain machine as a fixture: what the real one says is not the test's business."""
    make_host(tmp_path / "host")
    return {**os.environ, ROOT_VARIABLE: str(tmp_path / "host")}


def with_torch(environment: dict[str, str], tmp_path: Path, kind: str) -> dict[str, str]:
    """Another `torch` in front of the real one."""
    package = tmp_path / "fake" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TORCHES[kind])
    return {**environment, "PYTHONPATH": str(package.parent)}


def doctor(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shared", "doctor", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return list(json.loads(done.stdout)["findings"])


def test_quick_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom shared.cli import cli\n"
        f"cli.main(['doctor', '--quick', '--run-dir', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'numpy', 'duckdb', 'rich'} & set(sys.modules)))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Two seconds are promised on an idle machine; tests run side by side.
    assert time.monotonic() - started < 60
    lines = done.stdout.splitlines()
    assert lines[-1] == "heavy: []"
    assert [line for line in lines if line and line[0].isalpha()][:6] == [
        "memory", "session", "disks", "limits", "GPUs", "software",
    ]  # fmt: skip
    assert "checks in" in lines[-2]
    assert list(tmp_path.iterdir()) == []


def test_json_holds_every_line(environment: dict[str, str], tmp_path: Path) -> None:
    done = doctor(environment, "--quick", "--json", "--run-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] in ("ok", "limited")
    assert {tuple(finding) for finding in report["findings"]} == {("part", "check", "verdict", "found", "advice")}
    assert all(finding["advice"] for finding in report["findings"] if finding["verdict"] != "ok")


def test_what_is_broken_ends_with_its_code_and_one_line(environment: dict[str, str]) -> None:
    done = doctor(environment, "--quick", "--run-dir", "/proc/nowhere")
    assert done.returncode == 46
    assert "  broken   run folder" in done.stdout
    assert done.stderr.startswith("error: 1 of ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "deadline", "says"),
    [
        ("missing", 60, "ModuleNotFoundError: No module named 'torch'"),
        ("crashing", 60, "killed by SIGSEGV in fake/torch/__init__.py:2 in <module>"),
        # Until then the try must have come to its import.
        ("hanging", 8, "no answer after 8 s in fake/torch/__init__.py:2 in <module>"),
    ],
)
def test_whatever_torch_does_is_one_line(
    environment: dict[str, str], tmp_path: Path, kind: str, deadline: int, says: str
) -> None:
    done = doctor(with_torch(environment, tmp_path, kind), "--json", "--run-dir", tmp_path, "--deadline", deadline)
    assert done.returncode == 46
    (found,) = [finding for finding in findings(done) if finding["part"] == "devices"]
    assert (found["check"], found["verdict"], found["found"]) == ("torch", "broken", says)
    assert "Traceback" not in done.stderr


@pytest.mark.crash
def test_a_stop_ends_the_try_that_runs(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shared", "doctor", "--run-dir", str(tmp_path)]
    changed = with_torch(environment, tmp_path, "hanging")
    with subprocess.Popen(command, env=changed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "loading torch" in child.stderr.readline()
        tries = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while not (started := tries.read_text().split()):
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 75
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_deadline_of_nothing_is_refused(environment: dict[str, str]) -> None:
    assert doctor(environment, "--quick", "--deadline", 0).returncode == 43
