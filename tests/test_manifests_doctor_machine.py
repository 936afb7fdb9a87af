"""What `dflash doctor` says of a machine, from trees of files that show one trap each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from doctor_host import LIMITS, PLAIN, level, make_host

from manifests.doctor_finding import Finding
from manifests.doctor_gpus import GpuFacts
from manifests.doctor_limits import judge_limits, read_limits
from manifests.doctor_machine import machine_findings, warnings
from manifests.doctor_memory import judge_memory, read_memory
from manifests.doctor_session import container_of, judge_session, read_session, reaps_orphans
from shared.kernel import Kernel

NO_GPUS = GpuFacts(0, (), "", "", "", "")
TMUX = "user.slice/user-7.slice/user@7.service/tmux.slice/tmux-spawn-1.scope"
IN_TMUX: dict[str, str | None] = {"proc/self/cgroup": f"0::/{TMUX}\n", **level(TMUX)}
IN_SESSION: dict[str, str | None] = {"proc/self/cgroup": "0::/user.slice/user-7.slice/session-3.scope\n"}


def memory_of(root: Path, *changes: Mapping[str, str | None]) -> dict[str, Finding]:
    kernel = make_host(root, *changes)
    return {finding.check: finding for finding in judge_memory(read_memory(kernel, container_of(kernel)))}


def session_of(root: Path, *changes: Mapping[str, str | None]) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge_session(read_session(make_host(root, *changes), "someone"))}


def limits_of(root: Path, *changes: Mapping[str, str | None]) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge_limits(read_limits(make_host(root, *changes)))}


def test_a_plain_machine_promises_everything(tmp_path: Path) -> None:
    found = memory_of(tmp_path)
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["cgroup"].found == "v2, /system.slice/train.service"
    assert "0 at the 2 levels" in found["OOM kills a group"].found


@pytest.mark.parametrize("place", ["system.slice/train.service", "system.slice"])
def test_a_group_kill_at_any_level_is_named(tmp_path: Path, place: str) -> None:
    found = memory_of(tmp_path, level(place, group=1))["OOM kills a group"]
    assert found.verdict == "limited"
    assert f"memory.oom.group is 1 at /{place}:" in found.found


def test_a_group_kill_of_a_container_with_its_own_cgroup_namespace(tmp_path: Path) -> None:
    container = {"proc/self/cgroup": "0::/\n", ".dockerenv": "", **level(".", limit="1000000", group=1)}
    found = memory_of(tmp_path, container)
    assert "memory.oom.group is 1 at /:" in found["OOM kills a group"].found
    assert "this container" in found["systemd-oomd"].found


def test_little_room_in_the_cgroup_counts_though_the_host_has_plenty(tmp_path: Path) -> None:
    full = level("system.slice/train.service", limit=str(10 << 30), current=int(9.5 * (1 << 30)))
    found = memory_of(tmp_path, full)["room"]
    assert found.verdict == "limited"
    assert found.found.startswith("9.5 GiB of 10 GiB used in this cgroup")


def test_counters_that_cannot_be_read_limit_what_a_sigkill_is_called(tmp_path: Path) -> None:
    events = "sys/fs/cgroup/system.slice/train.service/memory.events"
    found = memory_of(tmp_path / "a", {events: None})["OOM counters"]
    assert (found.verdict, "at most as likely" in found.found) == ("limited", True)
    found = memory_of(tmp_path / "b", {events: None, "proc/vmstat": None})["OOM counters"]
    assert (found.verdict, "no SIGKILL will be called OOM" in found.found) == ("limited", True)


def test_oomd_is_seen_by_its_process(tmp_path: Path) -> None:
    assert memory_of(tmp_path, {"proc/812/comm": "systemd-oomd\n"})["systemd-oomd"].verdict == "limited"


def test_a_limit_on_tasks_of_either_cgroup_version(tmp_path: Path) -> None:
    new = {f"sys/fs/cgroup/system.slice/pids.{name}": text for name, text in (("max", "512"), ("current", "80"))}
    assert memory_of(tmp_path / "v2", new)["tasks"].found.startswith("80 of 512")
    old: dict[str, str | None] = {
        "proc/self/cgroup": "5:pids:/docker/x\n4:memory:/docker/x\n",
        "proc/self/mountinfo": "22 21 0:30 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/cgroup.procs": "",
        "sys/fs/cgroup/pids/pids.max": "100\n",
        "sys/fs/cgroup/pids/pids.current": "9\n",
    }
    found = memory_of(tmp_path / "v1", old)
    assert found["tasks"].found.startswith("9 of 100")
    assert found["OOM kills a group"].found == "no: cgroup v1 kills single processes"


def test_a_tmux_scope_is_torn_down_as_a_whole_and_ends_with_the_last_login(tmp_path: Path) -> None:
    found = session_of(tmp_path, IN_TMUX)
    assert found["systemd unit"].verdict == "limited"
    assert found["systemd unit"].found.startswith("tmux-spawn-1.scope (a tmux pane), OOMPolicy=stop")
    assert "systemd-run --user" in found["systemd unit"].advice
    assert found["logout"].advice == "loginctl enable-linger"
    linger = session_of(tmp_path / "linger", IN_TMUX, {"var/lib/systemd/linger/someone": ""})
    assert linger["logout"].verdict == "ok"


@pytest.mark.parametrize(
    ("config", "verdict"),
    [
        ("[Login]\n#KillUserProcesses=no\n", "ok"),
        ("[Login]\n#KillUserProcesses=yes\n", "limited"),
        ("[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\n", "limited"),
        ("[Login]\nKillUserProcesses=yes\nKillExcludeUsers=root someone\n", "ok"),
        (None, "limited"),
    ],
)
def test_what_a_logout_does_to_a_login_session(tmp_path: Path, config: str | None, verdict: str) -> None:
    assert session_of(tmp_path, IN_SESSION, {"etc/systemd/logind.conf": config})["logout"].verdict == verdict


def test_a_drop_in_wins_over_the_main_file(tmp_path: Path) -> None:
    files = {
        "etc/systemd/logind.conf": "[Login]\nKillUserProcesses=no\n",
        "etc/systemd/logind.conf.d/site.conf": "[Login]\nKillUserProcesses=yes\n",
    }
    assert session_of(tmp_path, IN_SESSION, files)["logout"].verdict == "limited"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"proc/1/environ": "A=1\0container=lxc\0"}, "lxc"),
        ({"proc/self/cgroup": "4:memory:/kubepods/burstable/pod1/c\n"}, "kubepods"),
        ({}, ""),
    ],
)
def test_containers_are_recognised(tmp_path: Path, files: dict[str, str | None], kind: str) -> None:
    assert container_of(make_host(tmp_path, files)) == kind


def test_process_1_that_does_not_collect_is_said(tmp_path: Path) -> None:
    facts = dataclasses.replace(read_session(make_host(tmp_path), "someone"), reaps=False, container="docker")
    found = judge_session(facts)[2]
    assert (found.verdict, "docker run --init" in found.advice) == ("limited", True)
    assert reaps_orphans(0.0) in (None, True)


def test_without_boot_identity_restarts_look_like_kills(tmp_path: Path) -> None:
    found = session_of(tmp_path, {"proc/sys/kernel/random/boot_id": None})["boot identity"]
    assert (found.verdict, found.found.startswith("boot id cannot be read")) == ("limited", True)


def test_limits_and_rights(tmp_path: Path) -> None:
    found = limits_of(tmp_path / "plain")
    assert {check for check, finding in found.items() if finding.verdict != "ok"} == {"stacks of a hang"}
    assert "only of descendants (ptrace_scope 1)" in found["stacks of a hang"].found
    tight = {
        "proc/self/limits": LIMITS.format(files=128, address="4000000000"),
        "dev/kmsg": None,
        "sys/class/infiniband/mlx5_0/x": "",
    }
    found = limits_of(tmp_path / "tight", tight)
    assert found["open files"].verdict == "broken"
    assert found["address space"].found == "3.7 GiB"
    assert {found[check].verdict for check in ("address space", "kernel log", "locked memory")} == {"limited"}
    privileged = limits_of(tmp_path / "privileged", {"proc/self/status": "CapEff:\t000001ffffffffff\n"})
    assert privileged["stacks of a hang"].found.startswith("ptrace allowed")


def test_a_machine_that_shows_nothing_still_gets_every_line(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    parts = list(machine_findings(Kernel(tmp_path / "root"), tmp_path, NO_GPUS, 0.0))
    assert [findings[0].part for findings in parts] == ["memory", "session", "disks", "limits", "GPUs", "software"]
    assert not [finding for findings in parts for finding in findings if finding.verdict == "broken"]


def test_the_warnings_of_a_launch_are_one_sentence_each(tmp_path: Path) -> None:
    assert warnings(make_host(tmp_path / "plain"), Path("/somewhere")) == []
    traps = {"proc/self/mountinfo": PLAIN["proc/self/mountinfo"].replace("ext4", "overlay"), "proc/vmstat": None}
    found = warnings(make_host(tmp_path / "traps", IN_TMUX, level(TMUX, group=1), traps), Path("/somewhere"))
    assert [line.split(":")[0] for line in found] == [
        "file system",
        "OOM kills a group",
        "OOM counters",
        "systemd unit",
    ]
    assert "goes with the container" in found[0]
