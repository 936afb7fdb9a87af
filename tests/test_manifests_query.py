"""SQL over manifests: works on anything found on disk, writes nothing, reads nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.commit import Ledger, files_of
from manifests.query import named_queries, run_folders, run_sql
from manifests.records import KINDS, EvaluationRecord, EventRecord, MetricRecord, ShardRecord
from shared.errors import ConfigRefused


def shard(block: int, tokens: int = 100) -> ShardRecord:
    return ShardRecord(block=block, rank=0, documents=2, tokens=tokens, bytes=tokens * 10, seconds=2.0)


def test_every_kind_and_named_query_works_on_nothing(tmp_path: Path) -> None:
    for name in [*KINDS, *named_queries()]:
        names, rows = run_sql([tmp_path, tmp_path / "absent"], f"SELECT * FROM {name}")
        assert rows == []
        assert names


def test_records_of_many_folders_with_awkward_names(tmp_path: Path) -> None:
    folders = [tmp_path / "it's" / "x.zarr", tmp_path / "a[1]*?" / "run", tmp_path / 'zwölf "q"']
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        Ledger(folder, "w0").append(shard(0, 100 * (i + 1)))
    assert run_folders([tmp_path]) == sorted(folders)
    _, rows = run_sql([tmp_path], "SELECT folder, tokens FROM shards ORDER BY tokens")
    assert rows == [(str(folder), 100 * (i + 1)) for i, folder in enumerate(folders)]


def test_a_block_done_twice_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w0")
    for block in (0, 1, 0):
        ledger.append(shard(block))
    _, rows = run_sql([tmp_path], "SELECT blocks, tokens FROM progress")
    assert rows == [(2, 200)]


def test_torn_and_foreign_lines_cost_themselves_only(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "w")
    ledger.append(EventRecord(run_id="a", event='with "quotes", \\ and \t tab', message="zeile\nzwei"))
    with files_of(tmp_path, "events")[0].open("ab") as file:
        file.write(b'garbage\n[1, 2]\n\n{"time": 3, "run')
    _, rows = run_sql([tmp_path], "SELECT event, message FROM events")
    assert rows == [('with "quotes", \\ and \t tab', "zeile\nzwei")]


BARRED = (
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM 'evil.csv'",
    "COPY (SELECT 1) TO 'evil.csv'",
    "ATTACH 'evil.db'",
    "EXPORT DATABASE 'evil'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "PRAGMA database_list",
    "DROP TABLE runs",
    "DELETE FROM runs",
    "CREATE TABLE t AS SELECT 1",
    "SELECT 1; SELECT 2",
    "SELEC",
    "",
)


@pytest.mark.parametrize("sql", BARRED, ids=str)
def test_nothing_but_reading_the_manifests(tmp_path: Path, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigRefused) as caught:
        run_sql([tmp_path], sql)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_python_variable_is_not_a_table(tmp_path: Path) -> None:
    secret = {"a": [1]}
    assert secret
    with pytest.raises(ConfigRefused):
        run_sql([tmp_path], "SELECT * FROM secret")


def test_works_while_a_run_writes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from manifests.commit import Ledger
from manifests.records import MetricRecord
ledger = Ledger(Path(sys.argv[1]), "w")
for step in range(100000):
    ledger.append(MetricRecord(run_id="a", global_step=step, split="train", name="loss", value=1.0))
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(5):
            least = int(child.stdout.readline()) + 1
            _, rows = run_sql([tmp_path], "SELECT count(*) FROM loss_curve")
            assert rows[0][0] >= least
        child.kill()


def test_output_forms(tmp_path: Path) -> None:
    Ledger(tmp_path, "w").append(MetricRecord(run_id="a", global_step=1, split="train", name="loss", value=0.5))
    sql = "SELECT global_step, loss, NULL AS nothing FROM loss_curve"

    def out(*form: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "shared", "query", sql, "--in", str(tmp_path), *form],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert json.loads(out("--json")) == [{"global_step": 1, "loss": 0.5, "nothing": None}]
    assert out("--csv") == "global_step,loss,nothing\n1,0.5,\n"
    assert out().splitlines()[-1] == "(1 row)"


def test_a_bare_name_is_a_query(tmp_path: Path) -> None:
    Ledger(tmp_path, "w").append(MetricRecord(run_id="a", global_step=1, split="train", name="loss", value=0.5))
    command = [sys.executable, "-m", "shared", "query", "loss_curve", "--in", str(tmp_path), "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"folder,global_step,loss\n{tmp_path},1,0.5\n"


def test_acceptance_query_shows_the_newest_of_each_name(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "eval")
    for value in (1.0, 3.0):
        ledger.append(
            EvaluationRecord(
                run_id="a",
                name="gsm8k",
                global_step=10,
                prompts=4,
                acceptance_length=value,
                acceptance_length_low=value,
                acceptance_length_high=value,
                tokens_per_second=20.0,
                plain_tokens_per_second=10.0,
                mismatches=0,
                ties=0,
                path="e.json",
            )
        )
    _, rows = run_sql([tmp_path], "SELECT acceptance_length, speedup FROM acceptance")
    assert rows == [(3.0, 2.0)]
