"""`dflash prepare`: data files to a prepared folder, in one pass that refuses before it writes.

Called by stage1_extract/cli.py. Reads stage1_extract/collect.py and tokenise.py; `--regenerate` goes through
stage1_extract/regenerate.py, which starts worker processes. The folder's format is shared/rows.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manifests.commit import Ledger
from manifests.records import SkipRecord
from manifests.runs import recorded
from shared.atomic import require_writable
from shared.chat import ChatRenderer, require_chat_template
from shared.config import to_dict
from shared.conversations import RowFault, require_data_file
from shared.errors import StoreMismatch
from shared.progress import progress, say, summary
from shared.rows import Document, read_info, write_rows
from shared.store import differences
from shared.target_identity import (
    find_target,
    geometry_of,
    load_config,
    load_tokenizer_of,
    tokenizer_identity,
    weights_sha256,
)
from stage1_extract.collect import Collected, collect, heldout_ids, nothing_left, refuse
from stage1_extract.config import PrepareConfig
from stage1_extract.tokenise import Tokeniser

# Settings that change the rows; the others (paths, batch size, device) may differ between two runs of the same work.
_ROW_SETTINGS = (
    "regenerate",
    "max_length",
    "block_size",
    "heldout",
    "heldout_rows",
    "on_bad_row",
    "max_rows",
    "seed",
    "train_on",
)
_ANSWER_SETTINGS = ("max_new_tokens", "temperature", "dtype")


@dataclass(slots=True)
class Work:
    """What prepare holds between its steps."""

    config: PrepareConfig
    tokenizer: Any
    identity: dict[str, Any]
    collected: Collected
    tokeniser: Tokeniser


def run(config: PrepareConfig) -> None:
    """Make the folder, or say that it is there. Raises the data, target and path errors of shared/errors.py."""
    require_writable(config.out)
    for path in config.data:
        require_data_file(path)
    files = find_target(config.target)
    tokenizer = load_tokenizer_of(files)
    identity = _identity(config, tokenizer, weights_sha256(files) if config.regenerate else None)
    if (config.out / "prepare.json").exists():
        _already_done(config, identity)
        return
    collected = collect(config.data, config.max_rows, config.seed)
    if config.regenerate or any(named.conversation.messages is not None for named in collected.used):
        require_chat_template(tokenizer, config.target)
    renderer = ChatRenderer(tokenizer, config.template_kwargs)
    tokeniser = Tokeniser(
        renderer,
        vocab_size=geometry_of(load_config(files))["vocab_size"],
        max_length=config.max_length,
        block_size=config.block_size,
        train_on=config.train_on,
    )
    work = Work(config, tokenizer, identity, collected, tokeniser)
    if config.regenerate:
        _prepare_regenerated(work)
    else:
        _prepare_given(work)


def _prepare_given(work: Work) -> None:
    documents: list[Document] = []
    with progress("tokenise", len(work.collected.used), "rows", "prepare") as bar:
        for named in work.collected.used:
            for result in work.tokeniser.documents(named):
                if isinstance(result, Document):
                    documents.append(result)
                else:
                    work.collected.faults.append(result)
            bar.advance()
    _refuse_or_go_on(work, bool(documents))
    with recorded(work.config.out, "prepare", to_dict(work.config)):
        _write(work, documents, [])


def _prepare_regenerated(work: Work) -> None:
    from stage1_extract.regenerate import assemble, plan_threads, write_answers

    threads, faults = plan_threads(work.collected.used, work.tokeniser)
    work.collected.faults += faults
    _refuse_or_go_on(work, bool(threads))
    with recorded(work.config.out, "prepare", to_dict(work.config)):
        answers = write_answers(work.config, threads, work.identity)
        made = assemble(threads, answers, work.tokeniser, work.config.out)
        if not made.documents:
            raise nothing_left(work.collected.faults + made.skipped, work.collected.counts["rows"])
        _write(work, made.documents, made.skipped)
        answers.remove()


def _refuse_or_go_on(work: Work, anything: bool) -> None:
    # By place, so that "the first" is the first in the files whatever step found it.
    order = {str(path): i for i, path in enumerate(work.config.data)}
    work.collected.faults.sort(key=lambda fault: (order.get(fault.source_file, 0), fault.line_number))
    if work.config.on_bad_row == "refuse":
        refuse(work.collected.faults, work.collected.counts["rows"])
    if not anything:
        raise nothing_left(work.collected.faults, work.collected.counts["rows"])


def _write(work: Work, documents: Sequence[Document], skipped_later: Sequence[RowFault]) -> None:
    config, counts = work.config, work.collected.counts
    heldout = heldout_ids(
        [document.detail["conversation"] for document in documents], config.heldout, config.heldout_rows, config.seed
    )
    if config.heldout_rows is not None and config.heldout_rows > len(heldout):
        say(f"--heldout-rows {config.heldout_rows}: held out {len(heldout)}, one conversation stays for training")
    documents = [
        replace(document, split="heldout" if document.detail["conversation"] in heldout else "train")
        for document in documents
    ]
    faults = [*work.collected.faults, *skipped_later]
    skips = [
        SkipRecord(
            doc_id=fault.id or "",
            source=fault.source_file,
            line=fault.line_number,
            reason=fault.reason,
            message=fault.detail,
        )
        for fault in faults
    ]
    skips += [
        SkipRecord(
            doc_id=named.doc_id,
            source=named.conversation.source_file,
            line=named.conversation.line_number,
            reason="duplicate",
        )
        for named in work.collected.duplicates
    ]
    # A run that was killed after this append and repeated appends again; the counts in prepare.json stay right.
    Ledger(config.out, "prepare").append(*skips)
    info = write_rows(
        config.out,
        documents,
        {
            **tokenizer_identity(work.tokenizer),
            "identity": work.identity,
            "config": to_dict(config),
            "counts": dict(counts + work.tokeniser.counts),
            "skipped": dict(Counter(fault.reason for fault in faults)),
            "heldout": sum(document.split == "heldout" for document in documents),
        },
    )
    _report(config.out, info, "prepared")


def _identity(config: PrepareConfig, tokenizer: Any, weights: str | None) -> dict[str, Any]:
    """What the rows are a function of; the data files by content, not by name."""
    settings = to_dict(config)
    names = _ROW_SETTINGS + (_ANSWER_SETTINGS if config.regenerate else ())
    return {
        **tokenizer_identity(tokenizer),
        "weights_sha256": weights,
        "chat_template_kwargs": config.template_kwargs,
        "data_sha256": [hashlib.sha256(path.read_bytes()).hexdigest() for path in config.data],
        **{name: settings[name] for name in names},
    }


def _already_done(config: PrepareConfig, identity: dict[str, Any]) -> None:
    info = read_info(config.out)
    for field, (have, want) in differences(info["identity"], identity).items():
        raise StoreMismatch(
            f"{config.out} was prepared with {field} = {json.dumps(have)}, this command asks {json.dumps(want)}; "
            "use the same settings or another --out"
        )
    say(f"{config.out} is already prepared with these settings; nothing to do")
    _report(config.out, info, "already prepared")


def _report(folder: Path, info: dict[str, Any], title: str) -> None:
    counts, skipped = info["counts"], info["skipped"]
    pairs: list[tuple[str, Any]] = [
        ("rows read", f"{counts.get('rows', 0):,}"),
        ("documents", f"{info['documents']:,} ({info['heldout']:,} held out)"),
        ("tokens", f"{info['tokens']:,} ({info['supervised']:,} supervised)"),
    ]
    named = {
        "duplicates": "duplicates dropped",
        "not_drawn": "not drawn (--max-rows)",
        "same_id_other_content": "same id, other content (kept)",
        "truncated": "cut at max_length",
        "taken_apart": "taken apart, one row per turn",
        "unfinished": "unfinished answers (kept)",
        "answers": "answers written",
        "blank_lines": "blank lines",
        "crlf_lines": "lines ending in CRLF",
        "bom": "files with BOM",
    }
    pairs += [(text, f"{counts[key]:,}") for key, text in named.items() if counts.get(key)]
    pairs += [(f"skipped: {reason}", f"{count:,}") for reason, count in sorted(skipped.items())]
    summary(title, [*pairs, ("written to", folder)])
