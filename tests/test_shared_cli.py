"""The command line as a promise: help without torch, every command documented, faults are one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.cli import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "zarr", "duckdb", "numpy", "rich"}


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shared", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_and_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom shared.cli import cli\n"
        f"cli.main([*{[command] if command else []!r}, '--help'], standalone_mode=False)\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "Usage:" in done.stdout


def test_every_command_has_an_example_and_a_readme_mention() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        text = run(command, "--help").stdout
        assert f"dflash {command}" in text, f"`dflash {command} --help` shows no example"
        assert f"dflash {command}" in readme, f"README.md does not mention `dflash {command}`"


def test_every_option_has_help() -> None:
    for command in COMMANDS:
        for line in run(command, "--help").stdout.splitlines():
            if re.match(r"\s+-", line):
                assert re.search(r"\s{2,}\S", line.strip()) or len(line) > 30, f"{command}: {line}"


def test_user_faults_are_one_line_with_their_code(tmp_path: Path) -> None:
    done = run("query", "SELECT 1; SELECT 2", cwd=tmp_path)
    assert done.returncode == 43
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_unknown_command_and_option_exit_2() -> None:
    for arguments in (("trian",), ("status", "--bogus")):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_version() -> None:
    assert run("--version").stdout.startswith("dflash, version ")
