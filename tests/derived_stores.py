"""What holds of every store made from other stores, also after kills; for the tests of merge and subset."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from fault_calls import Event, Kill, read_log
from fault_extraction import draw_kill, server

from manifests.blocks import open_store, recorded_blocks
from manifests.query import ask
from manifests.store_cli import store as store_group
from manifests.store_verification import check_store
from manifests.store_verify import VerifyOptions
from shared.errors import StoreError
from shared.store import TeacherStore

Listing = dict[str, tuple[bytes, int]]


def run(*words: object) -> str:
    """`dflash store WORDS` in this process; returns stdout, raises what the command raises."""
    done = CliRunner().invoke(store_group, [str(word) for word in words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def listing(*folders: Path) -> Listing:
    """Content and mtime of every file and folder below."""
    found: Listing = {}
    for folder in folders:
        for path in [folder, *sorted(folder.rglob("*"))]:
            data = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (data, path.stat().st_mtime_ns)
    return found


def made_files(store: Path) -> dict[str, bytes]:
    """Everything in a store that does not depend on when, or under which id, it was made."""
    parts = [path for part in ("blocks", "target") for path in (store / part).rglob("*") if path.is_file()]
    chosen = [path for path in [*parts, store / "plan.json"] if path != store / "blocks" / "zarr.json"]
    return {str(path.relative_to(store)): path.read_bytes() for path in chosen}


def records(store: Path) -> dict[int, dict[str, Any]]:
    """The record of every stored document, by its number."""
    answer = ask([store], "SELECT * FROM stored_documents ORDER BY document_index")
    found = [dict(zip(answer.names, row, strict=True)) for row in answer.rows]
    return {record["document_index"]: record for record in found if record["folder"] == str(store)}


def document_arrays(store: TeacherStore, ref: Any) -> dict[str, Any]:
    """All values of one document: its rows of every per-token array, and the block's own."""
    block_wide = [name for name in store.sealed(ref.block) if name.endswith("_channel")]
    names = [name for name in store.sealed(ref.block) if not name.startswith("document_") and name not in block_wide]
    return store.read_document(ref, names) | {name: store.read_block_array(ref.block, name) for name in block_wide}


def require_documents(out: Path, expected: Iterable[tuple[Path, int, str]]) -> None:
    """`out` is whole and clean, and holds exactly these documents in this order: (store, number there, split)."""
    assert check_store(str(out), VerifyOptions()).findings == []
    store = open_store(out)
    inputs: dict[Path, tuple[TeacherStore, dict[int, Any], dict[int, dict[str, Any]]]] = {}
    found, told = list(store.documents), records(out)
    wanted = list(expected)
    assert len(found) == len(wanted) == len(told)
    assert sorted(told) == [ref.index for ref in found]  # ascending and unique
    for ref, (place, number, split) in zip(found, wanted, strict=True):
        if place not in inputs:
            opened = open_store(place)
            inputs[place] = opened, {item.index: item for item in opened.documents}, records(place)
        theirs, refs, lines = inputs[place]
        old, line = refs[number], told[ref.index]
        assert (ref.length, ref.n_supervised, ref.split) == (old.length, old.n_supervised, split)
        for name, values in document_arrays(theirs, old).items():
            np.testing.assert_array_equal(document_arrays(store, ref)[name], values, err_msg=f"{name} of {number}")
        same = ("doc_id", "source", "line", "n_tokens", "n_supervised", "truncated", "topk_mass", "token_sha")
        assert {name: line[name] for name in same} == {name: lines[number][name] for name in same}
        assert (line["split"], line["block"]) == (split, ref.block)


def is_complete(store: Path) -> bool:
    """Whether a reader takes it for a finished store."""
    try:
        open_store(store)
    except StoreError:
        return False
    return True


def run_apart(words: Sequence[object], folder: Path, log: Path, kill: Kill | None = None) -> tuple[int, list[Event]]:
    """The command in a process of its own, perhaps killed at a call; (exit code, calls below `folder`)."""
    log.unlink(missing_ok=True)
    done = server().ask(
        "run",
        arguments=["store", *map(str, words)],
        folder=str(folder),
        output=str(log.with_suffix(".txt")),
        log=str(log),
        kill=asdict(kill) if kill else None,
    )
    return int(done["code"]), list(read_log(log))


def require_survival(words: Sequence[object], out: Path, inputs: Sequence[Path], folder: Path, trials: int) -> None:
    """Kill `words` (a command that makes `out`, which lies in `folder`) at so many random calls; the rerun mends it.

    `out` is never complete before its last record; what the rerun makes has the bytes of an undisturbed run; the inputs
    are as they were.
    """
    before, log = listing(*inputs), folder.parent / "calls.log"
    code, events = run_apart(words, folder, log)
    assert code == 0, log.with_suffix(".txt").read_text()
    expected, blocks = made_files(out), len(recorded_blocks(out))
    rng = random.Random(int(os.environ.get("DFLASH_FAULT_SEED", "5")))
    landed = 0
    for number in range(trials):
        out.rename(folder.parent / f"done-{number}")
        for _ in range(rng.choice([1, 1, 2])):
            kill = draw_kill(rng, events, "caller")
            code, seen = run_apart(words, folder, log, kill)
            said = f"{kill}: {log.with_suffix('.txt').read_text()}"
            assert code in (-signal.SIGKILL, 0), said
            landed += any(event.kind.startswith("killed") for event in seen)
            done = recorded_blocks(out) if out.exists() else {}
            assert is_complete(out) == (len(done) == blocks), said
        code, _ = run_apart(words, folder, log)
        assert code == 0, log.with_suffix(".txt").read_text()
        assert made_files(out) == expected, said
        assert check_store(str(out), VerifyOptions()).findings == []
        assert [path for path in folder.rglob("*.partial")] == []
    assert landed >= trials * 2 // 3
    assert listing(*inputs) == before
