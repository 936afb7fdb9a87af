"""`dflash store subset`: the documents that SQL or a seed picks, with their values, as a store of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from derived_stores import is_complete, listing, made_files, records, require_documents, require_survival, run
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

from manifests.blocks import open_store, recorded_blocks
from manifests.derived_source import Source
from manifests.derived_subset import drawn, evaluate
from shared.errors import ConfigRefused, NothingLeft, StoreDamaged, StoreMismatch
from shared.json_file import require_sealed
from shared.store import read_identity

TEXTS = counting_texts(24, 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "x.zarr", TEXTS, blocks=4, name="a")


def chosen_where(store: Path, keep: Any) -> list[tuple[Path, int, str]]:
    """What a condition written in Python picks."""
    return [(store, ref.index, ref.split) for ref in open_store(store).documents if keep(ref)]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_documents_that_fit_with_their_values(tmp_path: Path, precision: str) -> None:
    store = make_store(tmp_path / "x.zarr", TEXTS, blocks=4, name="a", precision=precision)
    before = listing(store)
    out = tmp_path / "out.zarr"
    said = run("subset", store, "--out", out, "--where", "n_tokens BETWEEN 15 AND 30 AND split = 'train'")
    wanted = chosen_where(store, lambda ref: 15 <= ref.length <= 30 and ref.split == "train")
    assert 0 < len(wanted) < 12
    assert f"{len(wanted)} of 24" in said
    require_documents(out, wanted)
    assert list(records(out)) == [index for _, index, _ in wanted]  # numbers, and with them anchors, are kept
    assert listing(store) == before
    identity = read_identity(out)
    assert identity["selection"]["where"].startswith("n_tokens")
    assert [part["documents"] for part in identity["parts"]] == [24]
    assert identity["tokens"] == sum(ref.length for ref in open_store(out).documents)


@pytest.mark.parametrize(
    ("where", "keep"),
    [
        ("block = 2", lambda ref: ref.block == 2),
        ("block IN (0, 3)", lambda ref: ref.block in (0, 3)),
        ("doc_id = 'a-7' OR line = 1", lambda ref: ref.index in (0, 7)),
        ("split = 'heldout'", lambda ref: ref.split == "heldout"),
        ("source LIKE '%.jsonl' AND n_supervised % 2 = 1 -- odd", lambda ref: ref.n_supervised % 2 == 1),
        ("topk_mass > 0.4", lambda ref: True),
        ("row_number() OVER (ORDER BY document_index DESC) <= 5", lambda ref: ref.index >= 19),
    ],
)
def test_conditions_are_plain_sql(store: Path, tmp_path: Path, where: str, keep: Any) -> None:
    run("subset", store, "--out", tmp_path / "out.zarr", "--where", where)
    require_documents(tmp_path / "out.zarr", chosen_where(store, keep))


def test_whole_blocks_are_linked_and_others_written(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    run("subset", store, "--out", out, "--where", "block = 3 OR document_index = 1")
    shared = {path.parts[-5] for path in out.glob("blocks/*/hidden_states/c/0/0/0") if path.stat().st_nlink == 2}
    names = sorted(path.name for path in (out / "blocks").iterdir() if path.is_dir())
    assert names == ["000000", "000001"]
    linked = [name for name in names if (out / "blocks" / name / "input_ids" / "c" / "0").stat().st_nlink == 2]
    assert linked == ["000001"]
    assert len(shared) == 1
    details = {block: record["detail"] for block, record in recorded_blocks(out).items()}
    assert [details[block]["made_from"]["block"] for block in (0, 1)] == [0, 3]
    assert details[0]["linked_bytes"] == 0 < details[1]["linked_bytes"]
    plan = json.loads((out / "plan.json").read_text())
    require_sealed(plan, "plan", "")
    assert plan["blocks"] == [[1, 2], [18, 24]]


def test_heldout_where_splits_anew(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    said = run("subset", store, "--out", out, "--heldout-where", "document_index % 5 = 0")
    require_documents(out, [(store, index, "heldout" if index % 5 == 0 else "train") for index in range(24)])
    assert "5 of them held out" in said
    assert {record["split"] for index, record in records(out).items() if index % 5 == 0} == {"heldout"}
    # Nothing but the split and the seal was written.
    own = {path.parts[-3] for path in out.glob("blocks/*/*/c/0") if path.is_file() and path.stat().st_nlink == 1}
    assert own == {"document_split"}


def test_a_random_part_is_a_function_of_the_seed(store: Path, tmp_path: Path) -> None:
    picked = {}
    for seed in (1, 2):
        for limit in (5, 9):
            out = tmp_path / f"{seed}-{limit}.zarr"
            run("subset", store, "--out", out, "--limit", limit, "--seed", seed, "--where", "document_index < 20")
            picked[seed, limit] = list(records(out))
            assert len(picked[seed, limit]) == limit
            require_documents(out, chosen_where(store, lambda ref, p=picked[seed, limit]: ref.index in p))
            assert max(picked[seed, limit]) < 20
    assert set(picked[1, 5]) < set(picked[1, 9])
    assert picked[1, 9] != picked[2, 9]
    run("subset", store, "--out", tmp_path / "all.zarr", "--limit", 1000)
    require_documents(tmp_path / "all.zarr", chosen_where(store, lambda ref: True))


def test_draws_are_even_and_the_same_everywhere() -> None:
    candidates = np.arange(10, 110)
    hits = sum(drawn(candidates, 30, seed, 200) for seed in range(200))
    assert hits[:10].sum() == hits[110:].sum() == 0
    assert hits.sum() == 200 * 30
    assert hits[10:110].min() > 35
    assert hits[10:110].max() < 90
    assert np.flatnonzero(drawn(candidates, 4, 3, 200)).tolist() == [16, 53, 81, 88]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("n_tokens", r"'n_tokens' gives BIGINT, one BOOLEAN is needed"),
        ("'yes'", "gives VARCHAR"),
        ("nonsense > 3", "nonsense"),
        ("n_tokens >", "syntax error"),
        ("true) AS a, (false", "gives BOOLEAN and BOOLEAN, one BOOLEAN is needed"),
        ("true); DROP TABLE documents; SELECT (true", "one SELECT is allowed"),
        ("(SELECT count(*) FROM read_text('/etc/hostname')) > 0", "refused"),
        ("sum(n_tokens) > 3", "refused"),
        ("unnest([true, false])", "gives 48 values for 24 documents"),
        ("unnest([]::BOOLEAN[])", "gives 0 values for 24 documents"),
        (" ", "is empty"),
    ],
)
def test_what_is_no_condition_is_refused(store: Path, tmp_path: Path, where: str, said: str) -> None:
    for option in ("--where", "--heldout-where"):
        with pytest.raises(ConfigRefused, match=said):
            run("subset", store, "--out", tmp_path / "out.zarr", option, where)
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("where", ["n_tokens > 1000", "NULL > 1"])
def test_no_match_is_refused(store: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(NothingLeft, match=r"none of the 24 documents of .*x\.zarr fits --where"):
        run("subset", store, "--out", tmp_path / "out.zarr", "--where", where)
    assert not (tmp_path / "out.zarr").exists()


def test_null_is_not_true_and_is_said(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source.open(store)
    kept = evaluate(source, "CASE WHEN block = 0 THEN NULL ELSE n_tokens > 0 END", "--where")
    assert kept.tolist() == [ref.block > 0 for ref in source.documents]
    assert "--where is NULL for 6 of 24 documents" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--limit", "0"]])
def test_settings_that_choose_nothing_are_refused(store: Path, tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(ConfigRefused, match=r"--where, --heldout-where or --limit|--limit 0"):
        run("subset", store, "--out", tmp_path / "out.zarr", *options)


def test_a_subset_is_trained_taken_again_and_merged(store: Path, tmp_path: Path) -> None:
    half, rest, part, whole = (tmp_path / f"{name}.zarr" for name in ("half", "rest", "part", "whole"))
    run("subset", store, "--out", half, "--where", "document_index % 2 = 0")
    run("subset", store, "--out", rest, "--where", "document_index % 2 = 1")
    run("subset", half, "--out", part, "--where", "n_tokens > 12")
    require_documents(part, chosen_where(store, lambda ref: ref.index % 2 == 0 and ref.length > 12))
    run("merge", whole, half, rest)
    everything = [*chosen_where(half, lambda ref: True), *chosen_where(rest, lambda ref: True)]
    require_documents(whole, everything)
    assert list(records(whole))[12:] == [24 + index for index in range(1, 24, 2)]
    run_here(config_of(whole, tmp_path / "run", steps=2))
    with pytest.raises(ConfigRefused, match="documents are in two of the stores"):
        run("merge", tmp_path / "twice.zarr", half, part)


def test_the_same_anchors_as_in_the_whole(store: Path, tmp_path: Path) -> None:
    """Document numbers are kept, so a document's anchors are those it has in the whole store."""
    from stage2_train.data import BatchBuilder, Shapes
    from stage2_train.packing import pack
    from stage2_train.selection import select

    run("subset", store, "--out", tmp_path / "out.zarr", "--where", "document_index >= 7")
    shapes = Shapes(max_length=64, anchors=6, block_size=4, feature_size=64)
    batches = []
    for place in (store, tmp_path / "out.zarr"):
        opened = open_store(place)
        builder = BatchBuilder(opened, select(opened, "train")[0], shapes, seed=3)
        position = builder.documents.index.tolist().index(8)
        batches.append(builder.build(pack(builder.lengths(), [position], 64), 2))
    np.testing.assert_array_equal(batches[0].anchor_positions, batches[1].anchor_positions)
    np.testing.assert_array_equal(batches[0].labels, batches[1].labels)


def test_a_subset_goes_on_only_as_it_was_begun(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    run("subset", store, "--out", out, "--where", "block = 1")
    (out / "push").mkdir()  # where a push keeps its lock
    assert "nothing to do" in run("subset", store, "--out", out, "--where", "block = 1")
    with pytest.raises(StoreMismatch, match=r"selection\.where = 'block = 1', this command asks 'block = 2'"):
        run("subset", store, "--out", out, "--where", "block = 2")
    with pytest.raises(StoreMismatch, match=r"selection\.limit = None, this command asks 3"):
        run("subset", store, "--out", out, "--where", "block = 1", "--limit", 3)


def test_damage_in_what_is_read_is_named(store: Path, tmp_path: Path) -> None:
    path = store / "blocks" / "000001" / "hidden_states" / "c" / "0" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match="hidden_states of block 1"):
        run("subset", store, "--out", tmp_path / "out.zarr", "--where", "document_index IN (6, 7)")
    assert not is_complete(tmp_path / "out.zarr")
    run("subset", store, "--out", tmp_path / "rest.zarr", "--where", "block <> 1")
    require_documents(tmp_path / "rest.zarr", chosen_where(store, lambda ref: ref.block != 1))


def test_a_bucket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match="in a bucket"):
        run("subset", "s3://bucket/x.zarr", "--out", tmp_path / "out.zarr", "--limit", 1)


def test_a_large_store_is_chosen_from_quickly() -> None:
    """Drawing from a million documents; what reads records is DuckDB's."""
    import time

    started = time.process_time()
    assert drawn(np.arange(1_000_000), 1000, 0, 1_000_000).sum() == 1000
    assert time.process_time() - started < 2.0


def test_it_works_without_the_suffix(tmp_path: Path) -> None:
    """A folder of another name is walked for nested runs; their documents are not this store's."""
    store = make_store(tmp_path / "it's a store", counting_texts(6), blocks=2, name="a")
    make_store(store / "nested", counting_texts(3), name="b")
    run("subset", store, "--out", tmp_path / "out.zarr", "--where", "n_tokens > 0")
    require_documents(tmp_path / "out.zarr", chosen_where(store, lambda ref: True))


@pytest.mark.crash
def test_a_kill_anywhere_is_mended_by_the_same_command(store: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    out = tmp_path / "disk" / "out.zarr"
    words = ["subset", store, "--out", out, "--where", "document_index > 3", "--heldout-where", "n_tokens > 30"]
    require_survival(words, out, [store], tmp_path / "disk", trials=4)
    assert made_files(out)


def test_help_needs_no_heavy_library() -> None:
    import subprocess

    code = (
        "import sys; from manifests.store_cli import store\n"
        "for name in ('merge', 'subset'):\n"
        "    store.main([name, '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'zarr', 'duckdb', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
