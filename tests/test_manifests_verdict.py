"""Each accident has one right name, and with less evidence an honest one: never a wrong one."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from verdict_mutations import MUTATIONS
from verdict_night import GIB, HOST, PID1, START, WALL, Night
from verdict_scenarios import FAULT, PEER, Scenario, scenarios

from manifests.evidence import Evidence
from manifests.postmortem import page
from manifests.stop_requests import code_of
from manifests.verdict import Verdict, verdict
from manifests.verdict_advice import exit_code_of
from manifests.verdict_errors import from_log, name_error, name_text

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_each_accident_has_its_name(scenario: Scenario) -> None:
    found = verdict(scenario.evidence, scenario.attempt)
    assert (found.code, found.ranks, found.confidence) == (scenario.code, scenario.ranks, scenario.confidence)
    assert found.sentence
    assert found.evidence or found.code in ("done", "running", "py.exit_code")
    assert "runs/a" in found.advice or found.code == "done"
    assert Verdict.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert verdict(scenario.evidence, scenario.attempt) == found, "a pure function"


def test_the_scenarios_cover_all_codes() -> None:
    families = {
        "running", "done", "user.stop", "py.exception", "py.thread_lost", "py.exit0_undone", "py.exit_code", "sig.segv",
        "sig.abrt", "sig.bus", "sig.ill", "sig.fpe", "sig.bus.shm", "sig.kill.oom_cgroup", "sig.kill.oom_host",
        "sig.kill.external", "sig.term.external", "sig.int.external", "sig.hup", "tree.oom_group", "tree.killed",
        "container.restart", "host.reboot", "gpu.cuda_oom", "gpu.fault", "gpu.lost", "comm.mismatch", "hang.stopped",
        "hang.gil", "hang.wait", "hang.busy", "hang.io", "hang.startup", "disk.full", "disk.read_only", "disk.io",
        "disk.limit", "log.full", "data.corrupt", "data.nonfinite", "compile.contract", "refused.checkpoint_mismatch",
        "sup.killed", "progress.none", "storm", "unknown",
    }  # fmt: skip
    assert families <= {scenario.code for scenario in SCENARIOS.values()}
    assert len(SCENARIOS) >= 70


@pytest.mark.parametrize("source", MUTATIONS)
def test_without_a_source_no_name_is_wrong(source: str) -> None:
    degraded = []
    for scenario in SCENARIOS.values():
        before = verdict(scenario.evidence, scenario.attempt)
        found = verdict(MUTATIONS[source](scenario.evidence), scenario.attempt)
        assert scenario.allows(found), (scenario.name, found.code, found.ranks, found.confidence, found.sentence)
        if (found.code, found.confidence) != (before.code, before.confidence):
            degraded.append(f"{scenario.name}: {before.code} -> {found.code} ({found.confidence})")
    print(f"without {source}:", *degraded, sep="\n    ")  # noqa: T201 - pytest -s shows what each source is for
    # What these tell is always told once more: by the log, the event, the record of the run.
    assert degraded or source in ("fault lines", "last lines", "stop.json", "run's ending"), "it is good for nothing"


def test_values_of_any_kind_in_the_evidence_are_never_the_end() -> None:
    chance = random.Random(3)
    junk = [None, "x", -1, 1e308, [], {}, [None], {"a": 1}, True, float("nan"), 2**70]

    def spoilt(value: Any) -> Any:
        if chance.random() < 0.05:
            return chance.choice(junk)
        if isinstance(value, dict):
            return {key: item if key == "mono" else spoilt(item) for key, item in value.items()}
        return [spoilt(item) for item in value] if isinstance(value, list) else value

    for scenario in SCENARIOS.values():
        events = tuple(
            {**event, "detail": detail}
            for event in scenario.evidence.events
            if isinstance(detail := spoilt(event["detail"]), dict)
        )
        samples = tuple(
            s for sample in scenario.evidence.samples if isinstance(s := spoilt(sample), dict) and "mono" in s
        )
        endings = {r: e for r, ending in scenario.evidence.endings.items() if isinstance(e := spoilt(ending), dict)}
        evidence = replace(scenario.evidence, events=events, samples=samples, endings=endings)
        found = verdict(evidence, scenario.attempt)
        assert found.confidence in ("proved", "likely", "unknown")
        assert page(evidence, found).startswith("# ")


# Root before consequence.


def deaths(*made: tuple[float, int, dict[str, Any]], ranks: int = 3) -> Evidence:
    """A failed run of workers that die at these seconds."""
    night = Night(ranks=ranks)
    night.sampled(30)
    night.beating(30.0)
    for at, rank, facts in sorted(made, key=lambda one: one[0]):
        if "error" in facts:
            night.raised(at, rank, **facts)
        else:
            night.died(at, rank, **facts)
    return night.failed(40).evidence()


KEY = {"error": "KeyError", "message": "KeyError: 'x'"}
LOST = {"error": "RuntimeError", "message": PEER}


@pytest.mark.parametrize("apart", [0.0, 0.02, 0.5, 3.0])
def test_a_lost_peer_is_never_the_root(apart: float) -> None:
    for order in ((30.3, 30.3 + apart), (30.3 + apart, 30.3)):
        found = verdict(deaths((order[0], 0, LOST), (order[1], 2, KEY)))
        assert (found.code, found.ranks) == ("py.exception", (2,))
        assert any("rank 0" in line and "comm.peer_death" in line for line in found.cascade)


def test_two_roots_within_50_ms_are_both_named_and_later_ones_are_not() -> None:
    both = verdict(deaths((30.30, 0, KEY), (30.34, 2, KEY)))
    assert (both.code, both.ranks, both.confidence) == ("py.exception", (0, 2), "proved")
    other = {"error": "ValueError", "message": "ValueError: y"}
    apart = verdict(deaths((30.30, 2, KEY), (30.40, 0, other)))
    assert apart.ranks == (2,)
    assert "ValueError" in apart.cascade[0]
    unlike = verdict(deaths((30.30, 2, {"signal": 11, "fault": FAULT}), (30.32, 0, KEY)))
    assert unlike.ranks == (0, 2)
    assert unlike.confidence == "likely", "which of two different faults came first cannot be told"


def test_direct_evidence_goes_before_an_exit_code_of_the_same_moment() -> None:
    found = verdict(deaths((30.30, 0, {"code": 3}), (30.32, 1, {"signal": 11, "fault": FAULT})))
    assert (found.code, found.ranks) == ("sig.segv", (1,))


def test_what_we_killed_ourselves_is_no_anomaly() -> None:
    asked = {"signal": 9, "asked": True}
    found = verdict(deaths((30.3, 1, KEY), (30.2, 0, asked), (30.1, 2, asked | {"signal": 15})))
    assert (found.code, found.ranks) == ("py.exception", (1,))
    late = verdict(deaths((30.1, 0, LOST), (30.9, 1, KEY | {"asked": True})))
    assert (late.code, late.ranks) == ("py.exception", (1,)), "the root may raise after we asked all to leave"


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_no_order(jump: float) -> None:
    night = Night(ranks=2)
    night.sampled(30)
    night.beating(30.0)
    night.raised(30.3, 1, "KeyError", "KeyError: 'x'")
    night.raised(30.9, 0, "ValueError", "ValueError: y")
    night.failed(33)
    last = night.events[-3:]
    for event in last:  # the second death and all after it bear the new time
        event["time"] += jump
        event["detail"]["t"] += jump
    found = verdict(night.evidence())
    assert (found.code, found.ranks, "KeyError" in found.sentence) == ("py.exception", (1,), True)


def test_only_lost_peers_leave_the_cause_open() -> None:
    found = verdict(deaths((30.3, 0, LOST), (30.4, 1, LOST)))
    assert (found.code, found.confidence, found.ranks) == ("unknown", "unknown", (2,))
    assert "lost a peer" in found.sentence


@pytest.mark.parametrize("later", [71.0, 900.0])
def test_a_killed_supervisor_has_the_time_of_its_own_last_sign(later: float) -> None:
    """Two runs showed the moment of the question: 18:51:13 for a kill at 18:49:51, and "proved"."""
    night = Night()
    night.sampled(30)
    night.beating(later - 0.5)
    alive = {"alive_ranks": (0, 1), "owned": True, "rank_states": {0: "S", 1: "R"}}
    found = verdict(night.evidence(at=later, **alive))
    assert (found.code, found.time) == ("sup.killed", WALL + 30)
    for rank in (0, 1):
        night.ending(later, rank, "SupervisorGone", "its supervisor is gone: stopped at step 1204", 75)
    found = verdict(night.evidence(at=later + 60))
    assert (found.code, found.time) == ("sup.killed", WALL + 30)


def test_the_supervisors_last_sign_is_by_its_own_clock_not_by_when_the_disk_took_it() -> None:
    night = Night()
    night.sampled(30)
    night.event(30.5, "paused", code="disk.full")
    night.events[-1]["time"] = WALL + 200
    assert night.evidence().supervisor_time == WALL + 30.5
    assert replace(night.evidence(), events=(), samples=()).supervisor_time is None


# A request to stop: by whom, and what was saved by then.

ANN = {"user": "ann", "host": HOST, "pid": 9, "now": False, "via": "dflash stop"}


def asked(night: Night, by: dict[str, Any], saved: float | None, now: bool = False) -> Verdict:
    """A run that ended because somebody asked, with this on record as saved."""
    night.event(30.0, "stop asked", by=by, now=now)
    night.beats = {rank: replace(beat, saved=saved) for rank, beat in night.beats.items()}
    return verdict(night.interrupted(31).evidence())


def at(phase: str, done: float, unit: str = "steps", **more: Any) -> Night:
    night = Night(unit=unit, **more)
    night.sampled(30)
    night.beating(30.2, phase, done)
    return night


@pytest.mark.parametrize("by", [ANN, {"signal": "SIGTERM", "sender_pid": 7, "sender_command": "slurmd"}])
def test_saved_is_only_said_of_what_was_saved(by: dict[str, Any]) -> None:
    """In its imports, and paused at step 59 with a checkpoint of step 40, a run was said to have saved."""
    done = asked(at("checkpoint", 58), by, 58)
    assert "stopped after saving" in done.sentence
    early = asked(at("import", 0, "modules"), by, None)
    assert early.sentence.endswith(" in phase import at 0 of 10,000 modules; no save is on record")
    paused = asked(at("step", 59), by, 40)
    assert paused.sentence.endswith("at step 59 of 10,000; the newest save on record is that of step 40")
    killed = asked(at("step", 59), by, 40, now=True)
    assert "stopped at once" in killed.sentence
    for found in (early, paused, killed):
        assert "saving" not in found.sentence
        assert "saved" not in found.sentence
        assert found.code == ("user.stop" if by is ANN else "sig.term.external")


def test_without_heartbeats_nothing_is_said_about_saving() -> None:
    night = at("step", 59)
    night.beats = {}
    assert "sav" not in asked(night, ANN, None).sentence
    night = at("step", 59)
    del night.beats[0]  # rank 0 saves, and what it had saved is gone with its heartbeat
    assert "sav" not in asked(night, ANN, None).sentence


def test_an_attempt_that_came_less_far_has_saved_all_of_its_own() -> None:
    night = Night()
    night.sampled(10)
    night.died(10.0, 0, signal=9, done=1204)
    night.attempt = 2
    night.started(12.0)
    night.beating(30.2, "checkpoint", 1100)
    assert "after saving" in asked(night, ANN, 1100).sentence


def test_an_extraction_keeps_its_finished_blocks() -> None:
    assert "; 6 finished blocks are saved" in asked(at("step", 4096, "tokens", role="extract"), ANN, 3).sentence
    assert "; no finished block is on record" in asked(at("load", 0, "tokens", role="extract"), ANN, 0).sentence


@pytest.mark.parametrize(
    ("command", "code", "confidence"),
    [
        ("python -m shared stop tm/r", "user.stop", "proved"),
        ("/opt/venv/bin/python3.11 -u /opt/venv/bin/dflash stop r --now", "user.stop", "proved"),
        ("dflash stop", "user.stop", "proved"),
        ("bash -c dflash stop r; kill 300", "sig.term.external", "proved"),
        ("python -m shared status", "sig.term.external", "proved"),
        ("python guard.py dflash stop", "sig.term.external", "proved"),
        ("slurmstepd", "sig.term.external", "proved"),
        ("", "sig.term.external", "likely"),
        (f"/{'v' * 99}/python /{'v' * 99}/bin/dfl"[:200], "sig.term.external", "likely"),
    ],
)
def test_a_signal_of_dflash_stop_is_a_persons_request(command: str, code: str, confidence: str) -> None:
    """A folder that takes no file: `dflash stop` sends SIGTERM, and the run was said to be ended from outside."""
    by = {"signal": "SIGTERM", "sender_pid": 1500, "sender_uid": 0, "sender_command": command, "now": False}
    found = asked(at("step", 59), by, 59)
    assert (found.code, found.confidence) == (code, confidence)
    assert code_of(by) == code, "what the run's record says"
    assert "process 1500" in found.sentence


# Workers that never came to be.


def unstarted(*, verdicts: bool = True, events: bool = True) -> Verdict:
    """The folder was moved away: a SIGKILL, then three attempts without a log."""
    night = Night()
    night.sampled(30)
    night.died(30.3, 0, signal=9)
    said = "worker 0 could not be started: cannot write R/logs/train-0.log: No such file or directory"
    for attempt in (2, 3, 4):
        night.attempt = attempt
        night.event(30.0 + attempt, "attempt started", attempt=attempt)
        if events:
            facts = {"attempt": attempt, "rank": 0, "error": "PathNotWritable"}
            night.event(30.1 + attempt, "worker not started", said, **facts)
        if verdicts:
            night.event(30.2 + attempt, "verdict", attempt=attempt, verdict={"code": "unknown", "sentence": said})
    reason = "3 times the same failure, nothing new saved"
    return verdict(night.failed(36, code=58, reason=reason, verdict_code="progress.none").evidence())


def test_a_failure_that_came_three_times_is_told_with_the_name() -> None:
    """The headline named none, and the only evidence was "attempt 1 ended; nothing on record says how"."""
    for found in (unstarted(), unstarted(verdicts=False), unstarted(events=False)):
        assert (found.code, found.confidence) == ("progress.none", "proved")
        assert "nothing new saved; the last time: worker 0 could not be started: cannot write R/logs" in found.sentence
    assert unstarted(verdicts=False, events=False).confidence == "likely", "no failure has a name, each may be another"


def test_a_worker_that_could_not_be_started_is_the_end_of_its_attempt() -> None:
    night = Night()
    night.event(
        30.0, "worker not started", "worker 1 could not be started: no room", attempt=1, rank=1, error="DiskFull"
    )
    night.asked_away(30.5, 0)
    found = verdict(night.failed(31).evidence(), 1)
    assert (found.code, found.ranks, found.confidence, found.exit_code) == ("disk.full", (1,), "proved", 41)
    assert verdict(night.evidence(), 2).code == "unknown", "another attempt's"


def test_the_advice_for_a_moved_folder_can_be_followed() -> None:
    """`dflash resume Rm` was advised, and refused with exit 43: its command writes to R."""
    moved = replace(SCENARIOS["kill -9"].evidence, moved_from="/data/runs/a")
    assert verdict(moved).advice.endswith(
        "then: put runs/a back in the place of /data/runs/a, `dflash resume /data/runs/a`"
    )
    stopped = replace(SCENARIOS["dflash stop"].evidence, moved_from="/data/runs/a")
    assert (
        verdict(stopped).advice
        == "go on with: put runs/a back in the place of /data/runs/a, `dflash resume /data/runs/a`"
    )


# SIGKILL: out of memory only by a counter that moved.


def killed(before: Any, after: Any, share: float, available: float = 0.6, ranks: int = 2, victims: int = 1) -> Verdict:
    night = Night(ranks=ranks, oom=before)
    night.sampled(30, share, available)
    night.beating(30.2)
    for rank in range(victims):
        night.died(30.3 + rank / 1000, rank, signal=9, oom=after, share=share, available=available)
    return verdict(night.failed(33).evidence())


def counts(vmstat: int | None, cgroup: int | None) -> dict[str, int | None]:
    return {"vmstat": vmstat, "cgroup": cgroup}


@pytest.mark.parametrize(
    ("before", "after", "share", "available", "code", "confidence"),
    [
        (counts(4, 0), counts(5, 1), 0.81, 0.6, "sig.kill.oom_cgroup", "proved"),
        (counts(4, 0), counts(5, 1), 0.79, 0.6, "sig.kill.oom_cgroup", "likely"),
        (counts(None, 0), counts(None, 2), 0.95, 0.6, "sig.kill.oom_cgroup", "proved"),
        (counts(4, 0), counts(5, 1), 0.5, 0.04, "sig.kill.oom_host", "proved"),
        (counts(4, None), counts(5, None), 0.5, 0.04, "sig.kill.oom_host", "proved"),
        (counts(4, None), counts(5, None), 0.5, 0.06, "sig.kill.oom_host", "likely"),
        (counts(4, 0), counts(5, 0), 0.5, 0.04, "sig.kill.oom_host", "likely"),
        (counts(4, 0), counts(5, 0), 0.5, 0.1, "sig.kill.oom_host", "likely"),
        (counts(4, 0), counts(5, 0), 0.5, 0.6, "sig.kill.external", "likely"),
        (counts(4, 0), counts(4, 0), 0.99, 0.6, "sig.kill.external", "proved"),
        (counts(4, None), counts(4, None), 0.5, 0.6, "sig.kill.external", "proved"),
        (counts(None, 0), counts(None, 0), 0.5, 0.6, "sig.kill.external", "proved"),
        (counts(None, None), counts(None, None), 0.4, 0.6, "sig.kill.external", "likely"),
        (counts(None, None), counts(None, None), 0.97, 0.6, "unknown", "unknown"),
        (counts(None, None), counts(None, None), 0.6, 0.6, "unknown", "unknown"),
        (counts(9, 3), counts(2, 0), 0.97, 0.6, "unknown", "unknown"),  # the counters began anew: not comparable
    ],
)
def test_a_sigkill_by_its_counters(
    before: Any, after: Any, share: float, available: float, code: str, confidence: str
) -> None:
    found = killed(before, after, share, available)
    assert (found.code, found.confidence) == (code, confidence)


def test_an_oom_kill_of_somebody_on_this_host_is_no_name_when_memory_is_not_on_record() -> None:
    night = Night(ranks=2, oom=counts(4, 0))
    night.beating(30.2)
    night.died(30.3, 1, signal=9, oom=counts(5, 0))
    del night.events[-1]["detail"]["memory"]
    found = verdict(night.failed(33).evidence())
    assert (found.code, found.confidence, found.ranks) == ("unknown", "unknown", (1,))


def test_one_oom_kill_and_two_dead_proves_neither() -> None:
    found = killed(counts(4, 0), counts(5, 1), 0.99, victims=2)
    assert (found.code, found.confidence, found.ranks) == ("sig.kill.oom_cgroup", "likely", (0, 1))
    assert killed(counts(4, 0), counts(6, 2), 0.99, victims=2).confidence == "proved"


def test_an_oom_kill_of_an_earlier_death_is_not_counted_twice() -> None:
    night = Night(ranks=2, role="extract", unit="tokens")
    night.sampled(30, 0.99)
    night.beating(30.2)
    night.died(30.3, 0, signal=9, oom=counts(42, 1), share=0.99)
    night.sampled(40, 0.4)
    night.oom = counts(41, 0)  # the supervisor compares with what it saw half a minute before
    night.died(40.3, 1, signal=9, oom=counts(42, 1))
    found = verdict(night.failed(43).evidence())
    assert (found.code, found.ranks, found.confidence) == ("sig.kill.external", (1,), "proved")


def test_stale_samples_are_no_evidence_of_memory() -> None:
    night = Night()
    night.sampled(20, 0.99)
    night.beating(30.2)
    night.died(30.3, 1, signal=9, oom=counts(42, 1))
    found = verdict(night.failed(33).evidence())
    assert (found.code, found.confidence) == ("sig.kill.oom_cgroup", "likely"), "memory was high ten seconds before"
    night = Night()
    night.sampled(26, 0.99)
    night.beating(30.4)
    assert verdict(night.evidence()).code == "sup.killed", "hearts beat on for four seconds after the last sample"


def test_high_memory_counts_only_just_before_the_death() -> None:
    night = Night()
    night.sampled(20, 0.99)
    night.sampled(30, 0.41)
    night.beating(30.2)
    night.died(30.3, 1, signal=9, oom=counts(42, 1))
    assert verdict(night.failed(33).evidence()).confidence == "likely"


def test_a_bus_error_is_shm_only_when_it_was_full() -> None:
    night = Night()
    night.sampled(30, shm_free=5 << 20)
    night.died(30.3, 1, signal=7)
    assert verdict(night.failed(33).evidence()).code == "sig.bus"
    night.event(30.0, "nothing")
    full = Night()
    full.sampled(30)
    full.died(30.3, 1, signal=7, shm_free=0)
    assert verdict(full.failed(33).evidence()).code == "sig.bus.shm"


# Nobody left.


def tree(share: float = 0.41, available: float = 0.6, **now: Any) -> Verdict:
    night = Night()
    night.sampled(30, share, available)
    night.beating(30.4)
    return verdict(night.evidence(**now))


@pytest.mark.parametrize(
    ("share", "available", "code", "confidence"),
    [
        (0.41, 0.6, "tree.killed", "proved"),
        (0.79, 0.6, "tree.killed", "proved"),
        (0.85, 0.6, "tree.killed", "likely"),
        (0.91, 0.6, "tree.oom_group", "likely"),
        (0.5, 0.04, "tree.oom_group", "likely"),
    ],
)
def test_a_vanished_tree_by_its_memory(share: float, available: float, code: str, confidence: str) -> None:
    found = tree(share, available)
    assert (found.code, found.confidence) == (code, confidence)
    assert any("reboot" in line for line in found.excluded)
    assert any("container" in line for line in found.excluded)


def test_counters_of_a_vanished_tree() -> None:
    assert tree(0.6, oom=counts(44, 3)).code == "tree.oom_group"
    assert tree(0.6, oom=counts(44, 0)).code == "tree.killed", (
        "the host's kills were of others: our cgroup's stood still"
    )
    assert tree(0.6, oom=counts(44, None)).code == "tree.oom_group"
    assert tree(0.2, oom=counts(44, 3), at=40).code == "tree.oom_group"
    assert tree(0.2, oom=counts(44, 3), at=4000).code == "tree.killed", "an hour later others were killed there"
    assert tree(0.2, oom=counts(None, None)).confidence == "likely"
    assert tree(0.6, oom=counts(None, None)).code == "unknown"


def test_pressure_alone_speaks_for_memory() -> None:
    night = Night()
    night.sampled(30, pressure={"memory": 71.0, "io": 2.0})
    night.beating(30.4)
    assert verdict(night.evidence()).code == "tree.oom_group"


def test_a_supervisor_that_is_killed_between_two_attempts() -> None:
    night = Night()
    night.sampled(30)
    night.died(20.0, 1, signal=11)
    night.asked_away(21.0, 0)
    night.event(22.0, "restart", attempt=1, ranks=[0, 1], delay_s=45, reason="")
    assert verdict(night.evidence()).code == "sup.killed"
    night.events.pop()
    found = verdict(night.evidence())
    assert (found.code, found.ranks) == ("sig.segv", (1,)), "nobody had answered to the crash yet"
    assert "supervisor vanished" in found.cascade[-1]


def test_a_reboot_long_after_the_last_sign_is_only_likely() -> None:
    soon = tree(boot_id="b", boot_time=WALL + 400, time=WALL + 500)
    late = tree(boot_id="b", boot_time=WALL + 90_000, time=WALL + 99_000)
    assert (soon.code, soon.confidence) == ("host.reboot", "proved")
    assert (late.code, late.confidence) == ("host.reboot", "likely")


def test_another_container_on_the_same_host_is_no_restart() -> None:
    here = {"supervisor_alive": None, "pid_ns": "pid:[9]"}
    assert tree(pid1_start=int((START + 40) * 100), **here).code == "container.restart"
    older = tree(pid1_start=PID1 // 2, **here)
    assert (older.code, older.confidence) == ("unknown", "unknown"), "it was there while the run still lived"
    moved = tree(pid1_start=int((START + 40) * 100), host="pod-2", **here)
    assert (moved.code, moved.confidence) == ("container.restart", "likely")


def test_a_run_seen_from_another_host_or_container() -> None:
    elsewhere = {"host": "login1", "boot_id": "b", "supervisor_alive": None, "owned": None}
    assert tree(at=70, **elsewhere).code == "running"
    assert tree(at=70, **elsewhere).confidence == "likely"
    assert "login1" in tree(at=70, **elsewhere).sentence
    late = tree(at=100, **elsewhere)
    assert (late.code, late.confidence) == ("unknown", "unknown")
    assert HOST in late.sentence
    container = {"pid_ns": "pid:[9]", "pid1_start": 1, "supervisor_alive": None}
    assert tree(at=32, **container).code == "running", "the same kernel: its heart beats"
    assert tree(at=90, owned=True, **container).code == "running", "the same kernel: its lock is held"


# A run that lives.


def living(**now: Any) -> tuple[Night, Callable[[], Verdict]]:
    night = Night()
    night.sampled(30)
    night.beating(30.3)
    states = {"alive_ranks": (0, 1), "rank_states": {0: "R", 1: "S"}, "supervisor_alive": True, "owned": True}
    return night, lambda: verdict(night.evidence(**({"at": 30.5} | states | now)))


def test_notes_on_a_living_run() -> None:
    _, seen = living()
    assert (seen().code, seen().exit_code, seen().evidence) == ("running", 0, ())
    _, seen = living(rank_states={0: "T", 1: "S"})
    assert seen().ranks == (0,)
    assert "kill -CONT 1000" in seen().evidence[0]
    _, seen = living(supervisor_state="T")
    assert "the supervisor is stopped" in seen().sentence
    night, seen = living(at=60)
    night.beat(30.3, 1)
    night.beat(59.9, 0)
    assert seen().ranks == (1,)
    assert "GIL" in seen().evidence[0]
    night, seen = living(at=100)
    for rank in (0, 1):
        night.beat(99.9, rank, reported=30.0 + 60 * rank)
    assert seen().ranks == (0,)
    assert "no progress in phase step for 70 s" in seen().evidence[0]
    night, seen = living()
    night.event(29.0, "paused", "the disk is full: 1 GB free, 3 GB needed", code="disk.full")
    assert "paused: the disk is full" in seen().sentence
    night.event(29.5, "continued")
    assert "paused" not in seen().sentence


def test_a_supervisor_that_is_gone_while_workers_live() -> None:
    _, seen = living(supervisor_alive=False)
    assert (seen().code, seen().confidence) == ("sup.killed", "proved")
    assert "ranks 0 and 1" in seen().sentence


# Ends on record.


def test_a_run_that_failed_outside_its_workers_says_its_own_sentence() -> None:
    night = Night()
    night.sampled(30)
    for rank in (0, 1):
        night.died(30.0, rank, code=0, ending=night.ending(30.0, rank, "", "", 0))
    found = verdict(night.failed(31, "StoreIncomplete: 3 of 9 blocks are missing", 33).evidence())
    assert (found.code, found.exit_code, found.confidence) == ("refused.store_incomplete", 33, "likely")
    assert "3 of 9 blocks" in found.sentence


def test_the_code_on_record_counts_when_the_events_are_gone() -> None:
    night = Night(supervised=False)
    night.beating(30.0)
    record = {
        "run_id": "r1",
        "command": "train",
        "exit_code": 55,
        "time": WALL + 31,
        "detail": {"code": "sig.kill.oom_host"},
    }
    night.ended = record | {"state": "failed", "message": "OutOfMemory: rank 0 was killed"}
    found = verdict(night.evidence())
    assert (found.code, found.confidence, found.exit_code) == ("sig.kill.oom_host", "likely", 55)
    assert found.sentence == "rank 0 was killed"
    night.ended |= {"detail": {"code": "sig.term.external"}, "state": "interrupted", "exit_code": 75}
    assert (verdict(night.evidence()).code, verdict(night.evidence()).exit_code) == ("sig.term.external", 75)
    night.ended |= {"detail": {}}
    found = verdict(night.evidence())
    assert (found.code, found.exit_code) == ("unknown", 75), "by whom is not on record"


def test_what_a_worker_met_after_our_signal_is_no_root() -> None:
    ours = {"number": 15, "name": "SIGTERM", "sender_pid": 7, "sender_command": "python -m manifests.supervisor /r"}
    night = Night(supervised=False)
    night.sampled(30)
    night.beat(30.0, 0)
    night.beat(30.9, 1)
    night.ending(31.0, 1, "DiskFull", "disk full while writing /d/x (0 bytes free)", 41, signal=ours)
    night.ended = {
        "run_id": "r1",
        "command": "train",
        "state": "failed",
        "exit_code": 51,
        "message": "",
        "time": WALL + 33,
    }
    found = verdict(night.evidence())
    assert (found.code, found.ranks) == ("unknown", (0,)), "rank 0 went first, and without a word"
    night.endings.clear()
    night.logs["train-1.log"] = ("asked to stop: SIGTERM from process 7 of user 0 (python -m manifests.supervisor /r)",
                                 "ended by DiskFull: disk full while writing /d/x (0 bytes free)")  # fmt: skip
    assert verdict(night.evidence()).ranks == (0,)
    night.logs["train-1.log"] = night.logs["train-1.log"][1:]
    assert (verdict(night.evidence()).code, verdict(night.evidence()).confidence) == ("disk.full", "likely")


def test_a_worker_that_was_sampled_no_more_had_ended_before() -> None:
    night = Night()
    night.sampled(30)
    night.beating(30.4)
    night.samples[-1]["ranks"].pop("1")
    found = verdict(night.evidence())
    assert found.code == "unknown"
    assert "rank 1 ended, and the record of it is gone" in found.sentence


def test_workers_that_were_just_started_have_no_heartbeat_yet() -> None:
    night = Night()
    night.sampled(3)
    found = verdict(night.evidence(at=20))
    assert (found.code, found.confidence) == ("tree.killed", "likely")
    night.sampled(30)
    assert verdict(night.evidence()).code == "unknown", "half a minute later they have one"


def test_torchrun_ends_all_ranks_when_one_is_gone() -> None:
    note = {
        "number": 15,
        "name": "SIGTERM",
        "sender_pid": 70,
        "sender_uid": 0,
        "sender_command": "python bin/torchrun x",
    }
    night = Night(supervised=False)
    night.beat(30.0, 1)
    night.beat(33.0, 0)
    night.ending(33.0, 0, "Interrupted", "stopped at step 1204", 75, signal=note)
    found = verdict(night.evidence())
    assert (found.code, found.ranks) == ("unknown", (1,)), "nobody saw how rank 1 ended"
    assert "rank 0" in found.cascade[0]
    night.faults[1] = FAULT
    assert (verdict(night.evidence()).code, verdict(night.evidence()).ranks) == ("sig.segv", (1,))
    night.ending(33.0, 1, "Interrupted", "stopped at step 1204", 75, signal=note)
    found = verdict(night.evidence())
    assert (found.code, found.exit_code) == ("sig.term.external", 75), "it was told to end all"
    assert "torchrun" in found.sentence


def test_without_a_supervisor_the_order_is_told_by_the_heartbeats() -> None:
    for silent, code in ((20.0, "unknown"), (29.5, "py.exception"), (33.0, "py.exception")):
        night = Night(supervised=False)
        night.beat(silent, 1)
        night.beat(30.0, 0)
        night.ending(30.1, 0, "ValueError", "ValueError: shapes differ")
        found = verdict(night.evidence())
        assert found.code == code
        assert found.confidence == {20.0: "unknown", 29.5: "likely", 33.0: "proved"}[silent]


def test_a_supervisor_that_failed_itself() -> None:
    night = Night()
    night.event(30.0, "supervisor failed", "ZeroDivisionError: division by zero", traceback="...")
    found = verdict(night.failed(31, "Bug: the supervisor failed", 1).evidence())
    assert (found.code, found.ranks) == ("py.exception", ())
    assert "supervisor itself failed: ZeroDivisionError" in found.sentence
    night = Night()
    night.sampled(30)
    night.logs["train-supervisor.log"] = ("Traceback (most recent call last):", '  File "x.py"', "OSError: no ring")
    assert "OSError: no ring" in verdict(night.evidence()).sentence


def test_an_end_that_only_the_ring_has() -> None:
    night = Night()
    night.sampled(30)
    night.raised(30.3, 1, "DiskFull", "disk full while writing /d/x (0 bytes free)", 41)
    evidence = replace(night.failed(33, code=41).evidence(), ended=None)
    found = verdict(evidence)
    assert (found.code, found.ranks, found.exit_code) == ("disk.full", (1,), 41)


def test_an_attempt_by_itself() -> None:
    night = Night()
    night.sampled(30)
    night.raised(10.0, 1, "KeyError", "KeyError: 'x'")
    night.asked_away(11.0, 0)
    night.attempt = 2
    night.started(15.0)
    night.died(30.3, 0, signal=11, fault=FAULT)
    evidence = night.evidence()
    assert (verdict(evidence, 1).code, verdict(evidence, 1).ranks) == ("py.exception", (1,))
    assert (verdict(evidence, 2).code, verdict(evidence, 2).ranks) == ("sig.segv", (0,))
    assert verdict(evidence, 3).code == "unknown"
    assert verdict(night.failed(33).evidence()).code == "sig.segv"


def test_a_stop_during_an_attempt_is_its_end() -> None:
    night = Night()
    night.event(29.0, "stop asked", by={"user": "ann", "host": HOST, "via": "Ctrl-C"}, now=False)
    night.died(30.0, 0, signal=9, asked=True)
    assert verdict(night.evidence(), 1).code == "user.stop"
    assert "ann@node7 (Ctrl-C)" in verdict(night.evidence(), 1).sentence
    night.raised(30.1, 1, "KeyError", "KeyError: 'x'")
    assert verdict(night.evidence(), 1).code == "py.exception", "a fault while stopping is a fault"


def test_a_fault_while_stopping_is_named_alike_for_the_attempt_and_for_the_run() -> None:
    """`dflash why` said user.stop of a run that the kernel had killed while it saved, `dflash status` said OOM."""
    night = Night()
    night.event(29.0, "stop asked", by=ANN, now=False)
    night.died(30.0, 0, signal=9, oom={"vmstat": 42, "cgroup": 0}, share=0.6, available=0.01)
    night.interrupted(31)
    for found in (verdict(night.evidence()), verdict(night.evidence(), 1)):
        assert found.code == "sig.kill.oom_host"
        assert any("a request to stop by ann@node7" in line for line in found.evidence)


def test_what_the_supervisor_named_then_counts_when_nothing_else_is_left() -> None:
    night = Night()
    said = verdict(SCENARIOS["SIGSEGV"].evidence).as_dict()
    night.event(31.0, "verdict", attempt=1, verdict=said)
    night.failed(33)
    assert verdict(night.evidence()) == Verdict.from_dict(said)
    assert verdict(night.evidence(), 1) == Verdict.from_dict(said)


def test_verdicts_of_other_versions_are_understood() -> None:
    assert Verdict.from_dict({"code": "sig.segv", "ranks": [1], "colour": "red"}).ranks == (1,)
    assert Verdict.from_dict({}).code == "unknown"


# Exceptions by name and text.


@pytest.mark.parametrize(
    ("error", "message", "code", "cascade"),
    [
        ("RuntimeError", PEER, "comm.peer_death", True),
        ("DistNetworkError", "The client socket has failed to connect to 127.0.0.1", "comm.peer_death", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", "comm.peer_death", True),
        ("RuntimeError", "[3] is setting up NCCL communicator: Broken pipe", "comm.peer_death", True),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "py.exception", False),
        ("RuntimeError", "Broken pipe", "py.exception", False),
        ("ValueError", "Connection closed by peer", "py.exception", False),
        ("RuntimeError", "CUDA error: unspecified launch failure", "gpu.fault", False),
        ("RuntimeError", "CUDA error: out of memory", "gpu.cuda_oom", False),
        ("RuntimeError", "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", "gpu.fault", False),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x'", "py.exception", False),
        ("DataMissing", "no such file", "refused.data_missing", False),
        ("MaskTokenInUse", "mask token 7 occurs", "refused.mask_token_in_use", False),
    ],
)
def test_names_of_exceptions(error: str, message: str, code: str, cascade: bool) -> None:
    named = name_error(error, message)
    assert (named.code, named.cascade) == (code, cascade)


def test_native_aborts_are_named_by_their_logs() -> None:
    watchdog = "[rank1]:[E] ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)"
    assert name_text(watchdog) is not None
    night = Night()
    night.sampled(30)
    for rank in (0, 1):
        night.died(
            30.3, rank, signal=6, lines=(watchdog, "terminate called after throwing an instance of 'c10::Error'")
        )
    assert verdict(night.failed(33).evidence()).code == "comm.mismatch"
    night = Night()
    night.sampled(30)
    night.died(30.3, 1, signal=6, lines=("what():  CUDA error: device-side assert triggered",))
    assert (verdict(night.failed(33).evidence()).code) == "gpu.fault"
    night = Night()
    night.sampled(30)
    night.died(30.3, 1, signal=6, lines=("free(): invalid pointer",))
    found = verdict(night.failed(33).evidence())
    assert found.code == "sig.abrt"
    assert any("free(): invalid pointer" in line for line in found.evidence)


def test_the_end_of_a_log_tells_of_its_exception() -> None:
    bare = (
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "    g()",
        "torch.OutOfMemoryError: CUDA oom",
    )
    assert from_log(bare) == {
        "error": "OutOfMemoryError",
        "message": "torch.OutOfMemoryError: CUDA oom",
        "thread": None,
    }
    assert from_log(("x", "thread writer 1 ended by OSError: OSError: full"))["thread"] == "writer 1"  # type: ignore[index]
    assert from_log(("all well", "step 7")) is None


def test_a_full_disk_without_an_ending_is_known_by_its_code() -> None:
    night = Night()
    night.sampled(30, disk_free=4096)
    night.died(30.3, 1, code=41)
    found = verdict(night.failed(33).evidence())
    assert (found.code, found.confidence, found.exit_code) == ("disk.full", "likely", 41)
    night = Night()
    night.sampled(30)
    night.died(30.3, 1, code=41)
    assert verdict(night.failed(33).evidence()).code == "py.exit_code", "there was room"


# Hangs.


def test_a_stop_that_was_continued_in_time_is_no_hang() -> None:
    night = Night()
    night.sampled(60)
    night.beating(60.0)
    night.event(20.0, "hang", attempt=1, rank=1, code="hang.stopped", action="named", silent_s=4.0, state="T", names={})
    night.raised(60.3, 0, "KeyError", "KeyError: 'x'")
    found = verdict(night.failed(63).evidence())
    assert (found.code, found.ranks) == ("py.exception", (0,))


def test_without_stacks_the_waiting_rank_is_not_guessed() -> None:
    night = Night(ranks=4)
    night.sampled(100)
    night.beating(100.0)
    waits = {str(rank): "hang.wait" for rank in range(4)}
    night.event(
        92.0, "hang", attempt=1, rank=2, code="hang.wait", action="kill", silent_s=62.0, limit_s=60.0, names=waits
    )
    found = verdict(night.failed(99, code=54).evidence(at=110))
    assert (found.code, found.ranks, found.confidence) == ("hang.wait", (), "likely")
    night.events[-3]["detail"]["names"] = waits | {"1": "hang.busy"}
    found = verdict(night.evidence(at=110))
    assert (found.code, found.ranks, found.confidence) == ("hang.busy", (1,), "likely"), "the odd one out"


def test_a_collective_that_a_short_stack_does_not_show_is_told_by_the_phase() -> None:
    night = Night(ranks=3)
    night.sampled(100)
    for rank, phase in enumerate(("step", "compile", "step")):
        night.beat(100.0, rank, phase, 0)
    waits = {str(rank): "hang.wait" for rank in range(3)}
    night.event(
        92.0, "hang", attempt=1, rank=1, code="hang.wait", action="kill", silent_s=36.0, limit_s=36.0, names=waits
    )
    deep = "readinto (socket.py:700) < read (store.py:4) < get (store.py:9) < wait (store.py:20)"
    stacks = {deep: [0], "all_reduce (distributed_c10d.py:2800) < step (train.py:120)": [2], "lock (build.py:3)": [1]}
    night.event(93.0, "stacks saved", attempt=1, files=[], groups=stacks)
    found = verdict(night.failed(99, code=54).evidence(at=110))
    assert (found.code, found.ranks) == ("hang.wait", (1,))


def gpu_hang(stacks: dict[str, list[int]], codes: dict[int, str]) -> Verdict:
    night = Night(ranks=len(codes))
    night.sampled(100)
    night.beating(100.0)
    names = {str(rank): code for rank, code in codes.items()}
    night.event(92.0, "hang", attempt=1, rank=0, code=codes[0], action="kill", silent_s=62.0, limit_s=60.0, names=names)
    night.event(93.0, "stacks saved", attempt=1, files=[], groups=stacks)
    return verdict(night.failed(99, code=54).evidence(at=110))


def test_what_the_gpus_did_when_a_hang_was_named_is_evidence() -> None:
    def evidence(gpus: Any) -> list[str]:
        night = Night(ranks=1)
        night.sampled(100)
        night.beating(100.0)
        detail = {"attempt": 1, "rank": 0, "code": "hang.busy", "action": "kill", "names": {"0": "hang.busy"}}
        night.event(92.0, "hang", **detail, silent_s=62.0, limit_s=60.0, gpus=gpus)
        found = verdict(night.failed(99, code=54).evidence(at=110))
        assert (found.code, found.ranks) == ("hang.busy", (0,))
        return [line for line in found.evidence if "GPU" in line]

    working, idle, silent = ({"index": i, "utilisation": u} for i, u in enumerate((100, 3, None)))
    kernel = "GPU 0 100 % busy (a kernel ran there, or a collective waited)"
    assert evidence([working, idle, silent]) == [f"when it was named: {kernel}, GPU 1 3 % busy"]
    for nothing in ([], [silent], "damaged", ["damaged"], None):
        assert evidence(nothing) == []


def test_ranks_that_all_wait_for_the_gpu() -> None:
    item, other = "item (train.py:50)", "synchronize (feed.py:9)"
    alike = gpu_hang({item: [0, 1]}, {0: "hang.busy", 1: "hang.busy"})
    assert (alike.code, alike.ranks, alike.confidence) == ("hang.busy", (0, 1), "likely")
    odd = gpu_hang({item: [0, 2, 3], other: [1]}, dict.fromkeys(range(4), "hang.busy"))
    assert (odd.code, odd.ranks, odd.confidence) == ("hang.busy", (1,), "likely")
    waits = gpu_hang({"no Python stack": [0, 1]}, {0: "hang.busy", 1: "hang.wait"})
    assert (waits.code, waits.ranks, waits.confidence) == ("hang.busy", (0,), "likely")


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("py.exception", 50), ("sig.segv", 51), ("tree.killed", 51), ("hang.wait", 54), ("sig.kill.oom_host", 55),
        ("tree.oom_group", 55), ("gpu.cuda_oom", 56), ("comm.mismatch", 57), ("progress.none", 58), ("storm", 58),
        ("disk.full", 41), ("disk.io", 40), ("user.stop", 75), ("data.nonfinite", 52), ("compile.contract", 53),
        ("data.corrupt", 32), ("refused.checkpoint_mismatch", 60), ("refused.something_new", 50), ("done", 0),
        ("running", 0), ("unknown", 50), ("host.reboot", 51), ("sup.killed", 51), ("never.heard", 50),
    ],
)  # fmt: skip
def test_exit_codes(code: str, number: int) -> None:
    assert exit_code_of(code) == number
    assert exit_code_of("sig.term.external", 75) == 75
    assert exit_code_of("sig.term.external") == 51
    assert all(exit_code_of(scenario.code) != 137 for scenario in SCENARIOS.values())


def test_a_verdict_names_memory_of_the_biggest_ranks() -> None:
    found = verdict(SCENARIOS["OOM of the cgroup"].evidence)
    assert any(f"rank 1 {9 * GIB / GIB:.1f} GiB" in line for line in found.evidence)
    assert any("OOM kills on this host 41 -> 42, in this cgroup 0 -> 1" in line for line in found.evidence)
    assert dataclasses.asdict(found)["exit_code"] == 55
