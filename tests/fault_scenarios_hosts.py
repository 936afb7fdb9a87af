"""What the host does to a run: full disks, memory, everything gone at once. Collected by fault_scenarios.py."""

from __future__ import annotations

from dataclasses import replace

import fault_acts as acts
import fault_stage as stage
from fault_names import EXCEPTION, HANG, KILLED, tree
from fault_run import DONE, Expect, Scenario

FULL = Expect(code="disk.full", exit_code=41, weaker=("py.exit_code", "unknown", "log.full"))
DISKS = [
    Scenario(
        name="disk full", fault="write_a_lot", setup=stage.small_data_disk, needs="mount", expect=FULL, quick=True
    ),
    Scenario(
        name="disk full, unknown to us",
        fault="write_without_care",
        setup=stage.small_data_disk,
        needs="mount",
        expect=FULL,
    ),
    Scenario(
        name="no inodes left", fault="write_many_files", setup=stage.disk_of_few_files, needs="mount", expect=FULL
    ),
    Scenario(
        name="disk full, then room",
        fault="write_a_lot",
        act=acts.room_again,
        setup=stage.full_data_disk,
        needs="mount",
        spec={"on_disk_full": "pause", "restarts": 3},
        expect=DONE,
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="run folder's disk full",
        fault="write_a_lot",
        setup=stage.small_run_disk,
        needs="mount",
        expect=replace(FULL, confidence=("proved", "likely"), ranks="any"),
        quick=True,
    ),
    Scenario(
        name="file size limit (RLIMIT_FSIZE)",
        fault="write_past_its_limit",
        expect=Expect(code="disk.limit", exit_code=40, weaker=("unknown", "py.exit_code", "disk.read_only")),
        quick=True,
    ),
    Scenario(
        name="data becomes read-only",
        fault="write_a_lot",
        setup=stage.read_only_data,
        needs="mount",
        expect=Expect(code="disk.read_only", exit_code=40, weaker=("unknown", "py.exit_code")),
        quick=True,
    ),
    Scenario(
        name="run folder becomes read-only, then SIGKILL",
        act=acts.read_only_then_kill,
        plan={"hold": True},
        setup=stage.own_run_disk,
        needs="mount",
        expect=KILLED,
        quick=True,
    ),
    Scenario(
        name="ledger's disk full, then SIGKILL",
        act=acts.ledger_disk_full_then_kill,
        setup=stage.small_manifest_disk,
        needs="mount",
        expect=KILLED,
        quick=True,
    ),
    Scenario(
        name="whole disk full, then SIGKILL",
        act=acts.whole_disk_full_then_kill,
        plan={"hold": True},
        setup=stage.own_run_disk,
        needs="mount",
        expect=KILLED,
        quick=True,
    ),
    Scenario(
        name="log's disk full",
        fault="print_a_lot",
        setup=stage.full_log_disk,
        needs="mount",
        expect=Expect(code="log.full", exit_code=41, or_code=("disk.full",), weaker=("unknown", "py.exit_code")),
    ),
]

MEMORY = [
    Scenario(
        name="OOM kill in a real cgroup",
        fault="eat_memory",
        setup=stage.real_memory_cgroup,
        needs="memory cgroup",
        roles=("train", "extract"),
        expect=Expect(
            code="sig.kill.oom_cgroup",
            exit_code=55,
            weaker=("unknown", "sig.kill.external"),
            confidence=("proved", "likely"),
        ),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="OOM kill, cgroup v2 counts",
        act=acts.oom_in_cgroup,
        setup=stage.full_cgroup(2),
        expect=Expect(code="sig.kill.oom_cgroup", exit_code=55, weaker=("unknown",)),
        quick=True,
    ),
    Scenario(
        name="OOM kill, cgroup v1 counts",
        act=acts.oom_in_cgroup,
        setup=stage.full_cgroup(1),
        expect=Expect(code="sig.kill.oom_cgroup", exit_code=55, weaker=("unknown",)),
    ),
    Scenario(
        name="OOM kill, memory had been low",
        act=acts.oom_in_cgroup,
        setup=stage.made_host,
        expect=Expect(code="sig.kill.oom_cgroup", exit_code=55, confidence=("likely",), weaker=("unknown",)),
    ),
    Scenario(
        name="OOM kill, only vmstat can be read",
        act=acts.oom_on_host,
        setup=stage.full_host,
        expect=Expect(code="sig.kill.oom_host", exit_code=55, weaker=("unknown",)),
        quick=True,
    ),
    Scenario(
        name="SIGKILL, OOM kill of a bystander",
        act=acts.bystander_oom,
        setup=stage.made_host,
        expect=Expect(
            code="sig.kill.external",
            exit_code=51,
            confidence=("likely",),
            weaker=("unknown",),
        ),
        quick=True,
    ),
]

TREES = [
    Scenario(
        name="everything killed", act=acts.everything_killed, expect=tree("tree.killed", "proved", "likely"), quick=True
    ),
    Scenario(
        name="everything killed, memory at 41 %",
        act=acts.everything_killed,
        after=acts.memory_seen(0.41),
        expect=tree("tree.killed", "proved", "likely"),
    ),
    Scenario(
        name="everything killed, memory at 99 %",
        act=acts.everything_killed,
        after=acts.memory_seen(0.992),
        expect=tree("tree.oom_group", weaker=("unknown",)),
        quick=True,
    ),
    Scenario(
        name="everything killed, samples saw a full cgroup",
        act=acts.high_then_killed,
        setup=stage.made_host,
        expect=tree("tree.oom_group"),
    ),
    Scenario(
        name="everything killed, counted once (oom.group)",
        act=acts.everything_killed_and_counted,
        setup=stage.full_cgroup(2),
        expect=tree("tree.oom_group"),
    ),
    Scenario(
        name="host rebooted",
        act=acts.everything_killed,
        after=acts.rebooted,
        setup=stage.made_host,
        expect=tree("host.reboot", "proved"),
        quick=True,
    ),
    Scenario(
        name="container restarted",
        act=acts.everything_killed,
        after=acts.container_restarted,
        setup=stage.made_host,
        expect=tree("container.restart", "proved"),
        quick=True,
    ),
    Scenario(
        name="container restarted, other namespace",
        act=acts.everything_killed,
        after=acts.namespace_changed,
        setup=stage.made_host,
        expect=tree("container.restart", "proved"),
    ),
    Scenario(
        name="everything killed, pids given to others",
        act=acts.everything_killed,
        after=acts.pids_reused,
        needs="pid",
        expect=tree("tree.killed", "proved", "likely"),
        quick=True,
    ),
    Scenario(
        name="supervisor killed",
        act=acts.supervisor_killed,
        expect=tree("sup.killed", "proved", "likely", weaker=("unknown", "tree.killed")),
        quick=True,
    ),
    Scenario(
        name="supervisor killed, asked while workers live",
        act=acts.supervisor_killed_and_asked_at_once,
        expect=tree("sup.killed", "proved", weaker=("unknown", "running")),
        plan={"dawdle_s": 30.0, "deaf": True},
        outlived=True,
    ),
    Scenario(
        name="supervisor stopped for 5 s",
        act=acts.supervisor_stopped,
        plan={"dawdle_s": 4.0},
        expect=DONE,
        prompt=False,
        spec=HANG,
    ),
    Scenario(
        name="SIGHUP to the supervisor",
        act=acts.hangup_to_supervisor,
        plan={"dawdle_s": 0.3},
        expect=DONE,
        prompt=False,
    ),
    Scenario(
        name="evidence deleted",
        act=acts.kill,
        after=acts.evidence_deleted,
        expect=Expect(code="unknown", exit_code=51, ranks="any", confidence=("unknown",)),
        phases=("step",),
        quick=True,
    ),
    Scenario(
        name="evidence is noise",
        act=acts.kill,
        after=acts.evidence_is_noise,
        expect=Expect(code="unknown", exit_code=51, ranks="any", confidence=("unknown",)),
        phases=("step",),
    ),
    Scenario(
        name="SIGKILL, clock set back an hour", act=acts.kill, after=acts.clock_set(-3600), expect=KILLED, prompt=False
    ),
    Scenario(
        name="exception, clock set forward an hour",
        fault="exception",
        after=acts.clock_set(3600),
        expect=EXCEPTION,
        prompt=False,
    ),
]
