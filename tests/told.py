"""Every state that a heartbeat had, in order, as a reader sees it: for tests of what loops report."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from shared.beat import Beat, BeatState, read_beat


def keep_beats(monkeypatch: pytest.MonkeyPatch) -> list[BeatState]:
    """A list that grows with every report made in this process from now on."""
    kept: list[BeatState] = []
    report: Callable[..., None] = Beat.report

    def reported(beat: Beat, *given: Any, **named: Any) -> None:
        report(beat, *given, **named)
        found = read_beat(Path(beat.path))
        assert found is not None
        kept.append(found)

    monkeypatch.setattr(Beat, "report", reported)
    return kept


def phases_of(beats: list[BeatState]) -> list[str]:
    """The phases in order, each once for every stay in it."""
    return [phase for phase, _ in groupby(beat.phase for beat in beats)]
