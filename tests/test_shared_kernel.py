"""Host facts from made-up proc and sys trees, for v1, v2 and hybrid cgroups; facts about processes from real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import until

from shared.kernel import (
    ROOT_VARIABLE,
    Kernel,
    command_line,
    host_identity,
    is_same,
    own_start_ticks,
    process,
    session_members,
)

GIB = 2**30
V1_MOUNT = "35 31 0:32 {at} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 25 0:26 {at} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def host(root: Path, **files: str) -> Kernel:
    """A root with these files; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Kernel(root)


def v2(folder: Path, used: int, limit: str, kills: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"anon {used - cache}\nfile {cache}\nactive_file {cache}\ninactive_file 0\n")
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 3\noom 1\noom_kill {kills}\noom_group_kill 0\n")


def v1(folder: Path, used: int, limit: int, kills: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 9\ntotal_inactive_file {cache}\ntotal_active_file 0\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def test_facts_of_the_host(tmp_path: Path) -> None:
    kernel = host(
        tmp_path,
        proc__sys__kernel__random__boot_id="aaaa-bbbb\n",
        proc__stat="cpu 1 2 3\nbtime 1700000000\nprocesses 9\n",
        proc__vmstat="nr_free 5\noom_kill 42\n",
        proc__meminfo="MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  250 kB\n",
        proc__pressure__memory="some avg10=9.00 avg60=0\nfull avg10=3.50 avg60=0.00 avg300=0.00 total=1\n",
    )
    stat = " ".join(["1 (a (b) c) S 0 1 1", *["0"] * 6, "0 5 7", *["0"] * 6, "77", "0 3", *["0"] * 20])
    host(tmp_path, proc__1__stat=stat)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert host_identity(kernel) == {"boot": "aaaa-bbbb", "pid1_start": 77, "pid_ns": "pid:[4026531836]"}
    assert kernel.boot_time() == 1.7e9
    assert kernel.oom_counts() == {"vmstat": 42, "cgroup": None}
    assert kernel.memory() == {"current": None, "max": None, "available": 256_000, "total": 1_024_000}
    assert kernel.pressure() == {"memory": 3.5}
    assert kernel.readable()["vmstat"] is True
    assert kernel.readable()["cgroup_oom"] is False


def test_an_empty_root_knows_nothing_and_does_not_complain(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert host_identity(kernel) == {"boot": None, "pid1_start": None, "pid_ns": None}
    assert (kernel.cgroup(), kernel.pressure(), kernel.shm(), kernel.boot_time()) == (None, None, None, None)
    assert kernel.oom_counts() == {"vmstat": None, "cgroup": None}
    assert set(kernel.memory().values()) == {None}
    assert not any(kernel.readable().values())


def test_junk_is_no_number(tmp_path: Path) -> None:
    junk = "\x00\xff oom_kill\noom_kill many\nfull avg10=\nMemTotal:\n"
    kernel = host(tmp_path, proc__vmstat=junk, proc__pressure__memory=junk, proc__meminfo=junk, proc__1__stat=junk)
    host(tmp_path, proc__self__cgroup=junk, proc__self__mountinfo=junk, proc__stat=junk)
    assert kernel.oom_counts() == {"vmstat": None, "cgroup": None}
    assert kernel.memory()["total"] is None
    assert (kernel.pressure(), kernel.pid1_start(), kernel.cgroup()) == (None, None, None)


@pytest.mark.parametrize(
    ("own", "at", "folder"),
    [
        ("/", "/", ""),  # a cgroup namespace
        ("/a/b", "/", "a/b"),
        ("/docker/x", "/docker/x", ""),  # a container without one sees its own path in both
        ("/docker/x/inner", "/docker/x", "inner"),
        ("/../other", "/", ""),  # moved outside of its namespace
        ("/docker/xyz", "/docker/x", ""),
    ],
)
def test_the_cgroup_is_found_below_its_mount(tmp_path: Path, own: str, at: str, folder: str) -> None:
    for make, mount, line, top in (
        (v2, V2_MOUNT, f"0::{own}\n", tmp_path / "two/sys/fs/cgroup"),
        (v1, V1_MOUNT, f"5:cpu:/\n4:memory,x:{own}\n0::/\n", tmp_path / "one/sys/fs/cgroup/memory"),
    ):
        root = tmp_path / ("two" if make is v2 else "one")
        make(top / folder, 3 * GIB, 4 * GIB, 7)  # type: ignore[operator]
        kernel = host(root, proc__self__cgroup=line, proc__self__mountinfo=mount.format(at=at))
        assert kernel.cgroup() == str(top / folder)
        assert kernel.oom_counts()["cgroup"] == 7
        assert (kernel.memory()["current"], kernel.memory()["max"]) == (3 * GIB, 4 * GIB)


def test_a_hybrid_host_has_its_memory_in_v1(tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory/job", GIB, 2 * GIB, 1)
    (tmp_path / "sys/fs/cgroup/unified/job").mkdir(parents=True)
    mounts = V2_MOUNT.format(at="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ") + V1_MOUNT.format(at="/")
    kernel = host(tmp_path, proc__self__cgroup="4:memory:/job\n0::/job\n", proc__self__mountinfo=mounts)
    assert kernel.oom_counts()["cgroup"] == 1
    assert kernel.memory()["max"] == 2 * GIB


def test_the_tightest_limit_of_nested_cgroups_counts_and_the_cache_does_not(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup"
    v2(top / "pod", 30 * GIB, str(32 * GIB), 0, cache=GIB)
    v2(top / "pod/job", 20 * GIB, "max", 0, cache=9 * GIB)
    v2(top, 90 * GIB, "max", 0)
    kernel = host(tmp_path, proc__self__cgroup="0::/pod/job\n", proc__self__mountinfo=V2_MOUNT.format(at="/"))
    assert (kernel.memory()["current"], kernel.memory()["max"]) == (29 * GIB, 32 * GIB)
    (top / "pod/memory.max").write_text("max\n")
    assert (kernel.memory()["current"], kernel.memory()["max"]) == (11 * GIB, None)


def test_v1_without_a_limit_has_none(tmp_path: Path) -> None:
    v1(tmp_path / "sys/fs/cgroup/memory", 5 * GIB, 9_223_372_036_854_771_712, 0, cache=2 * GIB)
    kernel = host(tmp_path, proc__self__cgroup="4:memory:/\n", proc__self__mountinfo=V1_MOUNT.format(at="/"))
    assert (kernel.memory()["current"], kernel.memory()["max"]) == (3 * GIB, None)


def test_the_counter_of_another_cgroup_can_be_asked_for(tmp_path: Path) -> None:
    v2(tmp_path / "sys/fs/cgroup/other", GIB, "max", 12)
    kernel = Kernel(tmp_path)
    assert kernel.oom_counts(str(tmp_path / "sys/fs/cgroup/other"))["cgroup"] == 12
    assert kernel.oom_counts(str(tmp_path / "sys/fs/cgroup/gone"))["cgroup"] is None


def test_the_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    assert Kernel().root == tmp_path
    monkeypatch.delenv(ROOT_VARIABLE)
    assert Kernel().root == Path("/")


def test_this_host_has_an_identity_and_memory() -> None:
    kernel = Kernel()
    assert len(kernel.boot_id() or "") == 36
    assert (kernel.pid_namespace() or "").startswith("pid:[")
    memory = kernel.memory()
    assert 0 < (memory["available"] or 0) < (memory["total"] or 0)
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)  # the monotonic clock stands still in a suspended machine
    assert abs((kernel.boot_time() or 0) + since_boot - time.time()) < 3600


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.read(1)
    yield child
    child.send_signal(signal.SIGCONT)
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_process_is_known_by_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    seen = process(sleeper.pid)
    assert seen is not None
    assert seen.parent == os.getpid()
    assert seen.rss > 1 << 20
    assert is_same(sleeper.pid, seen.start_ticks)
    assert not is_same(sleeper.pid, seen.start_ticks + 1), "the same pid given to another process is not ours"
    assert "time.sleep(60)" in command_line(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: (found := process(sleeper.pid)) is not None and found.state == "T")
    assert is_same(sleeper.pid, seen.start_ticks), "a stopped process lives"
    sleeper.kill()
    until(lambda: (found := process(sleeper.pid)) is not None and found.state == "Z")
    assert not is_same(sleeper.pid, seen.start_ticks), "a zombie does not"
    sleeper.wait()
    assert process(sleeper.pid) is None
    assert command_line(sleeper.pid) == ""


def test_own_process_and_cpu_ticks() -> None:
    before = process(os.getpid())
    assert before is not None
    assert before.start_ticks == own_start_ticks() > 0
    started = time.process_time()
    while time.process_time() - started < 0.05:
        pass
    after = process(os.getpid())
    assert after is not None
    assert after.cpu_ticks > before.cpu_ticks


def test_members_of_a_session_are_found() -> None:
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert leader.stdout is not None
        leader.stdout.read(1)
        until(lambda: len(session_members(leader.pid)) == 2)
        assert leader.pid in [pid for pid, _ in session_members(leader.pid)]
    finally:
        for pid, _ in session_members(leader.pid):
            os.kill(pid, signal.SIGKILL)
        leader.wait()
        assert leader.stdout is not None
        leader.stdout.close()
