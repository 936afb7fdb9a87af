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
    done = run("query", "SELECT 1; SELECT 2", "--in", str(tmp_path))
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


def test_a_refusal_of_the_system_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, click, shared.cli as cli\n"
        "def fail(**_): raise PermissionError(13, 'Permission denied', '/store/block')\n"
        "cli.cli.main = fail\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 40
    assert done.stderr.startswith("error: cannot use /store/block: Permission denied")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_left_does_not_fail_the_work() -> None:
    code = "from shared.progress import say, summary\nfor _ in range(5): summary('x' * 99999, [('a', 1)])\nsay('done')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b"done\n"
    assert child.returncode == 0


def test_closed_streams_and_full_files_are_no_tracebacks(tmp_path: Path) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "shared", "status", str(tmp_path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "shared", "query", "SELECT 1", "--in", str(tmp_path)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 41
    assert done.stderr.startswith("error: the output cannot be written: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_query_into_a_reader_that_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shared", "query", "SELECT range FROM range(200000)", "--in", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert child.returncode == 0
