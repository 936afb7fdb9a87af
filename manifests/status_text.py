"""The status of a folder as the lines that `dflash status` prints. Called by cli.py; the facts are in status.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from manifests.plain_text import plain
from manifests.run_picture import LIVING, SILENT_S, RankPicture, RunPicture
from manifests.status import FolderStatus
from shared.phases import DONE
from shared.progress import duration

_LOG_CHARS = 200


def lines_of(row: FolderStatus) -> list[str]:
    """A headline and indented facts."""
    head = f"{row.folder}  [{row.kind}]  {row.command} {row.state}{': ' + row.message if row.message else ''}"
    details = [f"{name}: {plain(value)}" for name, value in row.holds.items()]
    return [plain(head), *(f"    {text}" for text in [*(_run_lines(row, row.run) if row.run else ()), *details])]


def _run_lines(row: FolderStatus, run: RunPicture) -> list[str]:
    lines = []
    if run.verdict is not None:
        lines += _verdict_lines(run.verdict, row)
    if row.state in LIVING:
        lines += rank_lines(run.ranks)
    if run.restarts:
        lines.append(f"restarts: {run.restarts}")
    lines += [f"  {plain(text)}" for text in row.earlier]
    if run.gpus:
        lines.append(gpu_line(run.gpus, run.gpus_missing))
    if run.log_lines:
        lines += [f"log of rank {run.log_rank}:", *(f"  | {plain(text)[:_LOG_CHARS]}" for text in run.log_lines)]
    return lines


def _verdict_lines(found: Mapping[str, Any], row: FolderStatus) -> list[str]:
    """Code, confidence, when and where; what to do; where all of it is."""
    when = time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(found["time"])) if found.get("time") else ""
    ranks = ", ".join(map(str, found.get("ranks") or ()))
    where = f", rank {ranks}" if ranks else ""
    phase = f", in phase {found['phase']}" if found.get("phase") else ""
    lines = [f"cause: {found['code']} ({found['confidence']}){where}{phase}{when}"]
    if found.get("advice"):
        lines.append(f"to do: {plain(found['advice'])}")
    return [*lines, f"more: dflash why {row.folder}"]


def rank_lines(ranks: Sequence[RankPicture]) -> list[str]:
    """A line for each rank when they differ: in phase, in silence, or when one is stopped."""
    at_work = [rank for rank in ranks if rank.phase != DONE]
    silences = [rank.silent_s for rank in at_work]
    differ = len({rank.phase for rank in ranks}) > 1 or any(rank.stopped for rank in ranks)
    if not differ and (not silences or max(silences) - (min(silences) if len(silences) > 1 else 0) < SILENT_S):
        return []
    return [_rank_line(rank) for rank in ranks]


def _rank_line(rank: RankPicture) -> str:
    total = "" if rank.total is None else f"/{rank.total:,.0f}"
    parts = [f"rank {rank.rank}: {rank.phase} {rank.done:,.0f}{total} {rank.unit}".rstrip()]
    if rank.stopped:
        parts.append(f"stopped by a signal (`kill -CONT {rank.pid}` lets it go on)")
    if rank.silent_s >= SILENT_S and rank.phase != DONE:
        parts.append(f"silent for {duration(rank.silent_s)}")
    return ", ".join(parts)


def gpu_line(gpus: Sequence[Mapping[str, Any]], missing: str) -> str:
    """All GPUs in one line: memory in use of the largest total, and how busy the driver says they are."""
    used = " ".join(f"{gpu['used'] / 2**30:.1f}" for gpu in gpus)
    total = max(gpu["total"] for gpu in gpus) / 2**30
    busy = " ".join("?" if gpu["utilisation"] is None else str(gpu["utilisation"]) for gpu in gpus)
    return f"GPUs: {used} of {total:.0f} GiB in use, {busy} % busy{'; ' + missing if missing else ''}"
