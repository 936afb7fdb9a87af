"""SQL over manifests: works on anything found on disk, writes nothing, reads nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manifests.commit import Ledger, damaged_lines, files_of, read
from manifests.folders import run_folders
from manifests.query import ask, connect, named_queries
from manifests.records import KINDS, DocumentRecord, EventRecord, MetricRecord, RunRecord, ShardRecord
from shared.errors import ConfigRefused


def shard(block: int, tokens: int = 100, **changes: object) -> ShardRecord:
    given = {"documents": 2, "bytes": tokens * 10, "seconds": 2.0, "seal": f"seal-{block}", **changes}
    return ShardRecord(block=block, rank=0, tokens=tokens, **given)  # type: ignore[arg-type]


def metric(step: int, value: float = 0.5) -> MetricRecord:
    return MetricRecord(run_id="a", global_step=step, split="train", name="loss", value=value)


def main(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shared", *arguments], capture_output=True, text=True, check=False)


def test_every_kind_and_named_query_works_on_nothing(tmp_path: Path) -> None:
    for name in [*KINDS, "folders", *named_queries()]:
        answer = ask([tmp_path, tmp_path / "absent"], f"SELECT * FROM {name}")
        names, rows = answer.names, answer.rows
        assert rows == []
        assert names


def test_records_of_many_folders_with_awkward_names(tmp_path: Path) -> None:
    folders = [tmp_path / "it's" / "x.zarr", tmp_path / "a[1]*?" / "run", tmp_path / 'zwölf "q"; DROP TABLE shards']
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True)
        Ledger(folder, "w0").append(shard(0, 100 * (i + 1)))
    assert run_folders([tmp_path]) == sorted(folders)
    rows = ask([tmp_path], "SELECT folder, tokens FROM shards ORDER BY tokens").rows
    assert rows == [(str(folder), 100 * (i + 1)) for i, folder in enumerate(folders)]
    for folder in folders:
        done = main("query", "SELECT count(*) AS n FROM shards", "--in", str(folder), "--csv")
        assert (done.returncode, done.stdout) == (0, "n\n1\n")


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    Ledger(folder, "w0").append(shard(0))
    rows = ask([tmp_path], "SELECT progress.folder FROM progress JOIN folders USING (folder)").rows
    assert rows == [(f"{tmp_path}/caf?",)]


def test_every_value_comes_back_as_it_was_written(tmp_path: Path) -> None:
    awkward = 'with "quotes", \\ and \t tab, é, \u2028, \U0001f600, nul \x00 end'
    detail = {"nested": {"list": [1, 2.5, None, "x"]}, "awkward": awkward}
    Ledger(tmp_path, "w").append(RunRecord(run_id=awkward, command="train", state="failed", detail=detail))
    Ledger(tmp_path, "w").append(metric(2**62, 5e-324))
    ((run_id, code, text),) = ask([tmp_path], "SELECT run_id, exit_code, detail FROM runs").rows
    assert (run_id, code, json.loads(text)) == (awkward, None, detail)
    assert ask([tmp_path], "SELECT global_step, value FROM metrics").rows == [(2**62, 5e-324)]


def damage(folder: Path, how: str) -> None:
    path = files_of(folder, "events")[0]
    lines = path.read_bytes().split(b"\n")
    if how == "torn":
        lines[-1] = b'{"time": 3, "run'
    elif how == "nul-filled":
        lines[1] = bytes(len(lines[1]))
    elif how == "nul-filled end":
        lines[-1] = bytes(4096)
    elif how == "flipped":
        lines[1] = lines[1].replace(b"event-1", b"event-9")
    elif how == "flipped into no text":
        lines[1] = lines[1].replace(b"event-1", b"event-\xb1")
    elif how == "lost line break":
        lines[1:3] = [lines[1] + b"*" + lines[2]]
    elif how == "foreign":
        lines[1:1] = [b"garbage", b"[1, 2]", b'{"time": 3, "event": "forged"}', b""]
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("torn", {0, 1, 2, 3}),
        ("nul-filled", {0, 2, 3}),
        ("nul-filled end", {0, 1, 2, 3}),
        ("flipped", {0, 2, 3}),
        ("flipped into no text", {0, 2, 3}),
        ("lost line break", {0, 3}),
        ("foreign", {0, 1, 2, 3}),
    ],
)
def test_what_fails_its_checksum_never_shows_up_and_is_told(
    tmp_path: Path, how: str, left: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path, "w")
    for number in range(4):
        ledger.append(EventRecord(run_id="a", event=f"event-{number}"))
    damage(tmp_path, how)
    rows = ask([tmp_path], "SELECT event FROM events ORDER BY event").rows
    assert rows == [(f"event-{number}",) for number in sorted(left)]
    assert rows == [(record["event"],) for record in read(tmp_path, "events")]
    told = capsys.readouterr().err
    found = damaged_lines(tmp_path, "events")
    assert bool(found) == (how not in ("torn", "nul-filled end"))
    for path, number, reason in found[:3]:
        assert f"line {number} of {path}: {reason}" in " ".join(told.split())
    done = main("query", "SELECT count(*) AS n FROM events", "--in", str(tmp_path), "--csv")
    assert (done.returncode, done.stdout) == (0, f"n\n{len(left)}\n")


@pytest.mark.parametrize("state", ["empty", "no records", "folder for a file", "torn descriptions", "empty file"])
def test_partly_written_folders(tmp_path: Path, state: str) -> None:
    manifest = tmp_path / "x.zarr" / "manifest"
    manifest.mkdir(parents=True)
    if state == "folder for a file":
        (manifest / "shards.w.jsonl").mkdir()
    if state == "torn descriptions":
        for name in ("store.json", "plan.json", "run.json"):
            (manifest.parent / name).write_text('{"blo')
    if state == "empty file":
        (manifest / "shards.w.jsonl").touch()
    if state != "empty":
        Ledger(manifest.parent, "other").append(shard(3))
    names = named_queries() if state in ("no records", "torn descriptions") else ()
    for name in [*KINDS, "folders", *names]:
        ask([tmp_path], f"SELECT * FROM {name}")
    assert len(ask([tmp_path], "SELECT * FROM shards").rows) == (state != "empty")


def test_only_what_a_query_names_is_read(tmp_path: Path) -> None:
    Ledger(tmp_path, "w").append(RunRecord(run_id="a", command="extract", state="started"))
    Ledger(tmp_path, "w").append(shard(0, documents=1))
    record = DocumentRecord(
        document_index=0, doc_id="d", source="s", line=1, n_tokens=100, n_supervised=9, split="train", block=0
    )
    Ledger(tmp_path, "w").append(record)

    def loaded(sql: str) -> set[str]:
        with connect([tmp_path], sql) as connection:
            return {
                table
                for table in [*KINDS, "folders"]
                if connection.execute(f"SELECT count(*) FROM {table}").fetchone() != (0,)
            }

    assert loaded("SELECT * FROM runs") == {"runs"}
    assert loaded("FROM RUNS") == {"runs"}
    assert loaded("SELECT documents, 'runs' FROM shards -- and documents") == {"shards"}
    assert loaded("DESCRIBE runs") == {"runs"}
    assert loaded("SELECT 1 WHERE EXISTS (FROM runs)") == {"runs"}
    assert loaded("SELECT * FROM progress") == {"shards", "folders"}
    assert loaded("SELECT * FROM documents_by_source") == {"shards", "documents"}
    assert loaded("SELECT list_transform([1], x -> (SELECT count(*) FROM runs))") == {"runs"}
    assert loaded("WITH d AS (FROM documents) FROM d JOIN main.shards USING (folder)") == {"shards", "documents"}
    everything = {"runs", "shards", "documents", "folders"}
    assert loaded("SELECT * FROM query_table('ru' || 'ns')") == everything
    assert loaded("SELECT * FROM query('SELECT * FROM run' || 's')") == everything
    assert ask([tmp_path], "SELECT state FROM query_table('ru' || 'ns')").rows == [("started",)]
    assert len(ask([tmp_path], "SHOW TABLES").rows) == len(KINDS) + 1 + len(named_queries())


BARRED = (
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM read_text('{inside}')",
    "SELECT * FROM read_blob('{inside}')",
    "SELECT * FROM read_csv('{inside}')",
    "SELECT * FROM read_json('{inside}')",
    "SELECT * FROM read_parquet('{inside}')",
    "SELECT * FROM parquet_metadata('{inside}')",
    "SELECT * FROM sniff_csv('{inside}')",
    "SELECT * FROM query('SELECT * FROM read_text(''{inside}'')')",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM glob('{root}/*')",
    "SELECT * FROM '{inside}'",
    "SELECT * FROM 'evil.csv'",
    "SELECT * FROM read_csv('http://127.0.0.1/x.csv')",
    "SELECT * FROM duckdb_secrets()",
    "COPY (SELECT 1) TO 'evil.csv'",
    "COPY runs FROM '{inside}'",
    "COPY runs TO '/dev/stdout'",
    "ATTACH 'evil.db'",
    "ATTACH ':memory:' AS m",
    "DETACH memory",
    "USE main",
    "EXPORT DATABASE 'evil'",
    "IMPORT DATABASE 'evil'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{inside}'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET VARIABLE a = 1",
    "SET memory_limit = '1GB'",
    "RESET threads",
    "PRAGMA database_list",
    "PRAGMA enable_profiling",
    "CALL enable_logging()",
    "SELECT * FROM enable_logging('QueryLog', storage = 'file', storage_path = 'evil')",
    "SELECT * FROM enable_profiling(format = 'json', save_location = 'evil.json')",
    "DROP TABLE runs",
    "DELETE FROM runs",
    "INSERT INTO runs SELECT * FROM runs",
    "UPDATE runs SET state = 'finished'",
    "TRUNCATE runs",
    "ALTER TABLE runs ADD COLUMN x INT",
    "CREATE TABLE t AS SELECT 1",
    "CREATE TEMP TABLE t AS SELECT 1",
    "CREATE VIEW v AS SELECT 1",
    "CREATE MACRO m() AS 1",
    "CREATE SECRET s (TYPE s3)",
    "WITH x AS (DELETE FROM runs RETURNING *) SELECT * FROM x",
    "WITH x AS (INSERT INTO runs SELECT * FROM runs RETURNING *) SELECT * FROM x",
    "MERGE INTO runs USING runs AS s ON true WHEN MATCHED THEN DELETE",
    "PIVOT runs ON state USING count(*)",
    "SELECT * FROM (PIVOT runs ON state USING count(*))",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO 'evil.csv'",
    "EXPLAIN ANALYZE DELETE FROM runs",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "CHECKPOINT",
    "VACUUM",
    "BEGIN",
    "COMMIT",
    "CONNECT 'x'",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE runs",
    "SELECT 1; COPY (SELECT 1) TO 'evil.csv'",
    "SELEC",
    "SELECT * FROM nothing_of_that_name",
    "SELECT nothing FROM runs",
    "  ",
    ";",
)
ALLOWED = (
    "SELECT * FROM runs",
    "FROM runs;",
    "  WITH x AS (SELECT 1 AS n) SELECT * FROM x -- a note",
    "VALUES (1), (2)",
    "SHOW TABLES",
    "DESCRIBE runs",
    "SUMMARIZE metrics",
    "run_states",
    "SELECT state, count(*) FROM runs GROUP BY ALL",
    "SELECT * FROM (PIVOT runs ON state IN ('started') USING count(*))",
    "SELECT unnest(range(3))",
)
# All in one process, by the real entry point: what a user's shell would see, without 70 starts of Python.
EXIT_CODES = """
import contextlib, io, json, sys
from shared.cli import main
found = []
for sql in json.load(sys.stdin):
    sys.argv = ["dflash", "query", sql, "--in", sys.argv[-1]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            found.append([sql, end.code, out.getvalue(), err.getvalue()])
json.dump(found, sys.stdout)
"""


def test_nothing_but_reading_the_manifests(tmp_path: Path) -> None:
    root, here = tmp_path / "it's [here]", tmp_path / "home"
    root.mkdir()
    here.mkdir()
    Ledger(root, "w").append(RunRecord(run_id="a", command="train", state="started"))
    (inside,) = files_of(root, "runs")
    names = {"{inside}": str(inside).replace("'", "''"), "{root}": str(root).replace("'", "''")}
    barred = [sql.replace("{inside}", names["{inside}"]).replace("{root}", names["{root}"]) for sql in BARRED]
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    done = subprocess.run(
        [sys.executable, "-c", EXIT_CODES, str(root)],
        input=json.dumps([*barred, *ALLOWED]),
        capture_output=True,
        text=True,
        check=True,
        cwd=here,
        env={"HOME": str(here), "PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin"},
    )
    found = json.loads(done.stdout)
    assert [(sql, code) for sql, code, *_ in found] == [(sql, 43) for sql in barred] + [(sql, 0) for sql in ALLOWED]
    for sql, code, out, err in found:
        assert "Traceback" not in err, sql
        if code == 43:
            assert out == "", sql
            assert err.startswith("error: the query was refused: "), (sql, err)
    assert [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before


def test_what_does_not_fit_in_memory_goes_to_no_disk(tmp_path: Path) -> None:
    settings = "current_setting('temp_directory'), current_setting('enable_external_access')"
    assert ask([tmp_path], f"SELECT {settings}").rows == [("", False)]


def test_a_python_variable_is_not_a_table(tmp_path: Path) -> None:
    secret = {"a": [1]}
    assert secret
    with pytest.raises(ConfigRefused):
        ask([tmp_path], "SELECT * FROM secret")


def test_twenty_queries_while_a_run_writes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from manifests.commit import Ledger
from manifests.records import EventRecord, MetricRecord
ledger = Ledger(Path(sys.argv[1]), "w")
for step in range(1000000):
    both = [MetricRecord(run_id="a", global_step=step, split="train", name=n, value=1.0) for n in ("loss", "x")]
    ledger.append(*both)
    ledger.append(EventRecord(run_id="a", event="x" * (step % 9000)))
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            counts = [0]
            strange = "SELECT count(*) FROM events WHERE event <> repeat('x', length(event))"
            sql = f"SELECT (SELECT count(*) FROM loss_curve), ({strange})"
            for _ in range(20):
                least = int(child.stdout.readline()) + 1
                ((count, wrong),) = ask([tmp_path], sql).rows
                assert count >= max(least, counts[-1])
                assert wrong == 0
                counts.append(count)
        finally:
            child.kill()
    assert counts[-1] > counts[1]


@pytest.mark.parametrize("form", ["--json", "--csv", "table"])
def test_output_forms(tmp_path: Path, form: str) -> None:
    Ledger(tmp_path, "w").append(metric(1234, 0.5))
    Ledger(tmp_path, "w").append(
        RunRecord(run_id="a", command="train", state="failed", message="two\nlines \x1b[31m", detail={"a": [1]})
    )
    sql = (
        "SELECT global_step, loss, NULL AS nothing, message, detail, 'nan'::DOUBLE AS odd, [1, 2] AS list, "
        "DATE '2030-01-02' AS day, 1.50::DECIMAL(4, 2) AS price FROM loss_curve, runs"
    )
    done = main("query", sql, "--in", str(tmp_path), *([form] if form != "table" else []))
    assert done.returncode == 0, done.stderr
    if form == "--json":
        assert json.loads(done.stdout) == [
            {
                "global_step": 1234,
                "loss": 0.5,
                "nothing": None,
                "message": "two\nlines \x1b[31m",
                "detail": {"a": [1]},
                "odd": None,
                "list": [1, 2],
                "day": "2030-01-02",
                "price": "1.50",
            }
        ]
    elif form == "--csv":
        assert done.stdout.startswith("global_step,loss,nothing,message,detail,odd,list,day,price\n1234,0.5,,")
    else:
        header, ruler, row, count = done.stdout.splitlines()
        assert header.split()[:3] == ["global_step", "loss", "nothing"]
        assert set(ruler) == {"-", " "}
        assert row.startswith("1,234")
        assert "two\\nlines \\x1b[31m" in row
        assert count == "(1 row)"


def test_a_bare_name_is_a_query_and_no_name_lists_them_all(tmp_path: Path) -> None:
    Ledger(tmp_path, "w").append(metric(1))
    done = main("query", "loss_curve", "--in", str(tmp_path), "--csv")
    assert done.stdout == f"folder,global_step,loss\n{tmp_path},1,0.5\n"
    listing = main("query").stdout
    assert [line.split("(")[0].split(":")[0] for line in listing.splitlines()] == [*KINDS, "folders", *named_queries()]


@pytest.mark.parametrize("more", [["nosuch"], ["runs", "--json", "--csv"]])
def test_a_name_that_is_none_and_two_forms_are_refused(tmp_path: Path, more: list[str]) -> None:
    done = main("query", *more, "--in", str(tmp_path))
    assert (done.returncode, done.stdout) == (ConfigRefused.exit_code, "")
    assert ("`dflash query` lists them" if more == ["nosuch"] else "exclude each other") in done.stderr


def test_every_named_query_begins_with_one_line_that_says_what_it_shows() -> None:
    for name, text in named_queries().items():
        first, second = text.splitlines()[:2]
        assert first.startswith("-- "), name
        assert first.endswith("."), name
        assert not second.startswith("--"), name


def test_types_of_an_answer(tmp_path: Path) -> None:
    answer = ask([tmp_path], "SELECT 1 AS a, detail FROM runs")
    assert (answer.names, answer.types, answer.rows) == (["a", "detail"], ["INTEGER", "JSON"], [])


@pytest.mark.slow
def test_a_hundred_thousand_documents_take_less_than_two_seconds(tmp_path: Path) -> None:
    store = tmp_path / "x.zarr"
    ledger = Ledger(store, "w")
    for block in range(100):
        ledger.append(
            *(
                DocumentRecord(
                    document_index=1000 * block + i,
                    doc_id=f"conversation-{block}-{i}",
                    source="a/folder/of/data.jsonl",
                    line=i,
                    n_tokens=100,
                    n_supervised=50,
                    split="train",
                    block=block,
                    topk_mass=0.9,
                    token_sha=f"{1000 * block + i:016x}",
                    seal="0" * 32,
                )
                for i in range(1000)
            )
        )
        ledger.append(shard(block, seal="0" * 32))
    started = time.monotonic()
    assert ask([tmp_path], "SELECT documents FROM documents_by_source").rows == [(100_000,)]
    assert time.monotonic() - started < 2
