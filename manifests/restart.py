"""What happens after a worker failed: start again, wait for room, or stop. Pure policy.

Called by manifests/supervise.py with the failed attempts of the ranks that start together. What counts is progress: an
attempt that saved something new (a checkpoint, a block) may fail as often as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DELAYS_S = (1.0, 5.0, 15.0, 45.0, 120.0)
# So often the same failure without progress is no accident.
SAME_FAILURES = 3
STORM_STARTS, STORM_S = 10, 1800.0
NO_PROGRESS, STORM = "progress.none", "storm"
DISK_FULL = "disk.full"
# The same start would end the same way, or somebody wants it to end.
NEVER = ("data.nonfinite", "compile.contract", "data.corrupt", "user.stop", NO_PROGRESS, STORM)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the ranks that start together, and how it failed; times are CLOCK_MONOTONIC seconds."""

    number: int
    started: float
    ended: float
    fingerprint: str
    progressed: bool
    """It saved something that no attempt before it had."""
    paused: bool = False
    """It ended for lack of room, and was continued when there was some: no failure."""


@dataclass(frozen=True)
class Policy:
    """The part of a launch that decides: restarts in a row without progress, what a full disk does, shorter delays."""

    restarts: int
    on_disk_full: Literal["pause", "stop"] = "stop"
    hurry: float = 1.0


@dataclass(frozen=True)
class Decision:
    """`code` is the verdict that a stopped run ends with, when the policy itself has one; `spent`: it used up what it
    had.
    """

    kind: Literal["restart", "pause", "stop"]
    delay_s: float = 0.0
    reason: str = ""
    code: str = ""
    spent: bool = False


def fingerprint(code: str, error: str, message: str) -> str:
    """What makes two failures the same: the verdict, the error's class, its first line without numbers."""
    first = next(iter(message.splitlines()), "")
    return f"{code} {error} {re.sub(r'[0-9]+', '#', first)[:300]}".strip()


def decide(history: Sequence[Attempt], code: str, policy: Policy, *, short_of_room: bool = False) -> Decision:
    """What to do after the last attempt in `history` ended with the verdict `code`.

    `short_of_room`: the run's disk has less than the attempt needed, so that waiting can help.
    """
    if code.startswith("refused.") or code in NEVER:
        return Decision("stop", reason=f"{code} is not tried again")
    if code == DISK_FULL and policy.on_disk_full == "stop":
        return Decision("stop", reason="the disk is full and --on-disk-full is stop")
    if code == DISK_FULL and short_of_room:
        return Decision("pause", reason="the disk is full; the run goes on when there is room")
    counted = [attempt for attempt in history if not attempt.paused]
    if not policy.restarts:
        return Decision("stop", reason="--restarts is 0")
    last = counted[-1]
    recent = [attempt for attempt in counted if last.ended - attempt.started <= STORM_S]
    if len(recent) >= STORM_STARTS:
        return Decision("stop", reason=f"{len(recent)} starts within {STORM_S / 60:.0f} minutes", code=STORM)
    in_vain = _trailing_without_progress(counted)
    same = [attempt for attempt in in_vain if attempt.fingerprint == last.fingerprint]
    if len(same) >= SAME_FAILURES and in_vain[-SAME_FAILURES:] == same[-SAME_FAILURES:]:
        return Decision("stop", reason=f"{SAME_FAILURES} times the same failure, nothing new saved", code=NO_PROGRESS)
    if len(in_vain) > policy.restarts:
        return Decision("stop", reason=f"{len(in_vain)} failures in a row saved nothing new", spent=True)
    delay = DELAYS_S[min(max(len(in_vain) - 1, 0), len(DELAYS_S) - 1)] * policy.hurry
    count = f"failure {len(in_vain)} in a row without progress" if in_vain else "it had saved something new"
    return Decision("restart", delay_s=delay, reason=count)


def _trailing_without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The newest attempts, oldest first, back to the last one that saved something new."""
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        found.insert(0, attempt)
    return found
