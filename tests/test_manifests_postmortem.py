"""The page says in its first line what happened and in its second what to do, and nothing in it can break it."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from verdict_night import WALL, Night
from verdict_scenarios import REDUCE, ROWS, scenarios

from manifests.postmortem import page
from manifests.verdict import verdict

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}


def written(name: str) -> str:
    scenario = SCENARIOS[name]
    return page(scenario.evidence, verdict(scenario.evidence, scenario.attempt))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_lines_of_every_page(name: str) -> None:
    scenario = SCENARIOS[name]
    found = verdict(scenario.evidence, scenario.attempt)
    lines = written(name).splitlines()
    assert lines[0].startswith(f"# {found.sentence[:1].upper()}{found.sentence[1:]}")
    assert lines[0].endswith(f"({found.confidence})")
    assert lines[2] == f"**What to do:** {found.advice}"
    assert found.code in ("done", "running") or "`dflash resume runs/a`" in lines[2]
    assert f"`{found.code}`" in lines[4]
    assert "None" not in written(name)


def test_a_crash_is_told_with_rank_place_and_time() -> None:
    text = written("SIGSEGV")
    first = text.splitlines()[0]
    assert first.startswith("# Rank 1 crashed with SIGSEGV in phase step at step 1,204 of 10,000, ")
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(WALL + 30))
    assert re.search(rf"{moment}:\d\d \S+ \(proved\)$", first), "local time with its zone"
    for heading in ("Evidence", "Excluded", "Timeline", "Ranks", "Memory before the end", "Last lines"):
        assert f"\n## {heading}\n" in text
    assert "| **1** | 1001 | 1 | step | 1,204 of 10,000 | 1,000 | signal SIGSEGV | 9.0 GiB |" in text
    assert '  File "/app/kernel.py", line 12 in launch' in text
    assert "worker ended: rank 0, signal SIGTERM, as asked" in text


def test_stacks_are_grouped_and_the_odd_one_is_a_suspect() -> None:
    night = Night(ranks=4)
    night.sampled(100)
    night.beating(100)
    night.event(92.0, "hang", attempt=1, rank=0, code="hang.wait", action="kill", silent_s=62.0, names={})
    night.event(94.0, "stacks saved", attempt=1, files=[], groups={REDUCE: [0, 1, 3], ROWS: [2]})
    other = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in loader\n'
    main = 'Current thread 0x2 (most recent call first):\n  File "data.py", line 40 in next\n'
    dump = f"pid 7\nstate: S\n{other}\n{main}"
    evidence = replace(night.failed(99, code=54).evidence(at=110), stacks={"attempt-1-rank-2.txt": dump})
    found = verdict(evidence)
    assert found.ranks == (2,)
    text = page(evidence, found)
    stacks = text[text.index("## Stacks") :]
    assert f"rank 2 (suspect): {ROWS}" in stacks
    assert '  File "data.py", line 40 in next' in stacks
    assert f"ranks 0, 1 and 3: {REDUCE}" in stacks
    assert stacks.index("rank 2 (suspect)") < stacks.index("ranks 0, 1 and 3")


def test_what_workers_printed_cannot_break_the_page() -> None:
    night = Night()
    night.sampled(30)
    lines = ("~~~~~", "# not a heading", "| not | a | table |", "`" * 9)
    night.died(30.3, 1, code=3, lines=lines)
    night.raised(30.9, 0, "ValueError", "ValueError: a | b\n# c\n" + "x" * 9000)
    text = page(night.failed(33).evidence(), verdict(night.failed(33).evidence()))
    quoted = text[text.index("Rank 1 (`logs/train-1.log`)") :]
    assert quoted.splitlines()[2] == "~~~~~~", "the fence is longer than any line within"
    assert "# not a heading" in quoted
    assert len(text) < 60_000
    headings = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(headings) == 2, "the page's own, and the quoted one"
    table = [line for line in text.splitlines() if line.startswith("| ") and "rank" not in line]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 9 for line in table if "ValueError" in line)


def test_gaps_and_earlier_attempts_are_said() -> None:
    night = Night()
    said = verdict(SCENARIOS["kill -9"].evidence).as_dict()
    night.event(10.0, "verdict", attempt=1, verdict=said)
    night.sampled(30)
    night.beating(30.3)
    evidence = replace(night.evidence(), gaps=("2 damaged lines in x",))
    text = page(evidence, verdict(evidence))
    assert "## What could not be known\n\n- 2 damaged lines in x" in text
    assert "attempt 1: rank 1 was killed (SIGKILL)" in text


def test_a_rank_is_not_called_gone_from_a_host_that_cannot_see_it() -> None:
    night = Night()
    night.sampled(30)
    night.beating(30.3)
    here, there = night.evidence(300.0), night.evidence(300.0, host="login1", boot_id="another")
    assert page(here, verdict(here)).count("| gone without a word |") == night.ranks
    assert "gone without a word" not in (told := page(there, verdict(there)))
    assert told.count("| not on record, and not seen from here |") == night.ranks


def test_a_long_life_is_cut_in_the_middle() -> None:
    night = Night()
    for attempt in range(500):
        night.event(float(attempt), "restart", attempt=attempt, reason="again")
    text = page(night.evidence(), verdict(night.evidence()))
    assert "more ..." in text
    assert len(text.splitlines()) < 130
