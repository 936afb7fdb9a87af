"""`dflash why`: the post-mortem page of a run that ended badly, the present picture of one that runs, a life in short.

Called by cli_runs.py. The judging is verdict.py, the page postmortem.py, the time account goodput.py.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manifests.commit import read
from manifests.evidence import JUDGED, Evidence, collect
from manifests.goodput import account
from manifests.postmortem import page
from manifests.runs import without_refused
from manifests.status import LIVING, status_of
from manifests.status_text import lines_of
from manifests.verdict import verdict
from shared.errors import DataMissing
from shared.progress import duration


def answer(run_dir: Path) -> dict[str, Any]:
    """Verdict, time account and evidence as JSON values."""
    evidence = _evidence(run_dir)
    return {
        "verdict": verdict(evidence).as_dict(),
        "account": asdict(account(evidence)),
        "evidence": asdict(evidence),
    }


def page_of(run_dir: Path) -> str:
    """The page as text."""
    evidence = _evidence(run_dir)
    status = status_of(run_dir)
    if status.state in LIVING:
        return "\n".join([*lines_of(status), *account(evidence).lines()])
    account_lines = "\n".join(f"- {line}" for line in [*account(evidence).lines(), *starts(run_dir)])
    return f"{page(evidence, verdict(evidence)).rstrip()}\n\n## Time\n\n{account_lines}"


def starts(run_dir: Path) -> list[str]:
    """How the earlier starts of the same work ended, oldest first; nothing for the only one."""
    records = [record for record in without_refused(read(run_dir, "runs")) if record["command"] in JUDGED]
    begun = {record["run_id"]: record for record in records if record["state"] == "started"}
    ended = {record["run_id"]: record for record in records if record["state"] != "started"}
    return [_start_line(begun[run_id], ended.get(run_id)) for run_id in list(begun)[:-1]]


def _start_line(begun: dict[str, Any], ended: dict[str, Any] | None) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun["time"]))
    if ended is None:
        return f"an earlier start, {when}: left no ending"
    code = f", exit code {ended['exit_code']}" if ended.get("exit_code") else ""
    return f"an earlier start, {when}: {ended['state']} after {duration(max(0.0, ended['time'] - begun['time']))}{code}"


def _evidence(run_dir: Path) -> Evidence:
    evidence = collect(run_dir)
    if evidence.run is None:
        raise DataMissing(
            f"{run_dir} holds no training and no extraction ({'; '.join(evidence.gaps[:2])}); pass the folder that "
            "`dflash status` shows for it"
        )
    return evidence
