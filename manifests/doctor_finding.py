"""One line of `dflash doctor`: what was looked at, what was found, what that means, and what to do about it.

Made by the verdict functions of the other doctor_*.py, which are pure; printed by manifests/doctor.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "limited", "broken"]
# From harmless to fatal.
ORDER: tuple[Verdict, ...] = ("ok", "limited", "broken")
_WIDTH = 118
_CHECK_WIDTH = 18
_BEHIND = len("  limited  ") + _CHECK_WIDTH + 2


@dataclass(frozen=True)
class Finding:
    """`limited`: work runs, a promise cannot be kept. `broken`: training or extraction cannot work here."""

    part: str
    check: str
    verdict: Verdict
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As people read it: verdict, check and what was found, then the advice."""
        head = f"  {self.verdict:<7}  {self.check:<{_CHECK_WIDTH}}  "
        found = textwrap.wrap(self.found, _WIDTH - _BEHIND, break_long_words=False, break_on_hyphens=False) or [""]
        # Without hyphenation: a command that is cut at a hyphen cannot be copied.
        do = textwrap.wrap(self.advice, _WIDTH - _BEHIND - 4, break_long_words=False, break_on_hyphens=False)
        rest = [" " * _BEHIND + line for line in found[1:]]
        return [head + found[0], *rest, *(" " * _BEHIND + ("do: " if n == 0 else "    ") + x for n, x in enumerate(do))]


def worst(findings: Sequence[Finding]) -> Verdict:
    """The gravest verdict of all; "ok" for none."""
    return max((finding.verdict for finding in findings), key=ORDER.index, default="ok")


def size(count: float | None) -> str:
    """Bytes as people say them: 512 MiB, 7.8 GiB."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
