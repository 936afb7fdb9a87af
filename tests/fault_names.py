"""The right names that several scenarios of the fault matrix share. Used by the fault_scenarios_*.py."""

from __future__ import annotations

from typing import Any

from fault_run import Expect

EXCEPTION = Expect(code="py.exception", exit_code=50, weaker=("py.exit_code", "unknown"))
LOST_THREAD = Expect(code="py.thread_lost", exit_code=50, weaker=("py.exception", "py.exit_code", "unknown"))
EXIT_CODE = Expect(code="py.exit_code", exit_code=50, weaker=("unknown",))
EXIT_0 = Expect(code="py.exit0_undone", exit_code=50, weaker=("unknown", "py.exit_code"))
KILLED = Expect(code="sig.kill.external", exit_code=51, weaker=("unknown",))
HANG: dict[str, Any] = {"hang_limit_scale": 0.02}
LATE = ("step", "checkpoint")
"""Where a hang's limit is small enough for the test's patience; `-m slow` has the others."""


def crash(name: str) -> Expect:
    return Expect(code=f"sig.{name}", exit_code=51, weaker=("unknown",))


def hang(kind: str, *or_code: str) -> Expect:
    return Expect(
        code=f"hang.{kind}", exit_code=54, or_code=or_code, weaker=("unknown",), confidence=("proved", "likely")
    )


def tree(code: str, *confidence: str, weaker: tuple[str, ...] = ("unknown",)) -> Expect:
    return Expect(code=code, ranks="any", confidence=confidence or ("likely",), weaker=weaker)
