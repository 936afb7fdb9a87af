"""The run folder, tried out for real, and what its file system promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_host import make_host

from manifests.doctor_finding import Finding
from manifests.doctor_folder import FolderFacts, file_system, judge_folder, measure, shared_memory
from manifests.doctor_machine import read_folder
from manifests.doctor_sources import Mount, mount_of, mounts
from shared.errors import PathNotWritable

DISK = Mount("/", "ext4", "/dev/sda1", frozenset({"rw"}))
GIB = 1 << 30


def findings(*, mount: Mount = DISK, temporary: Mount = DISK, fault: str = "", **measured: Any) -> dict[str, Finding]:
    """The lines for a folder that is fine but for what is given."""
    fine = {"free": 500 * GIB, "inodes": 10**6, "total_inodes": 10**7, "fsync": [0.001] * 20, "refused": {}}
    facts = FolderFacts("runs", mount, fine | measured, fault, (9 * GIB, 9 * GIB), "/tmp", temporary, 50 * GIB)
    return {finding.check: finding for finding in judge_folder(facts)}


def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure(str(tmp_path / "not" / "there" / "yet"))
    assert list(tmp_path.iterdir()) == []
    assert len(found["fsync"]) == 20
    assert all(seconds > 0 for seconds in found["fsync"])
    assert (found["refused"], found["free"] > 0) == ({}, True)


def test_what_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    with pytest.raises(PathNotWritable):
        measure("/proc/self")
    facts = read_folder(make_host(tmp_path), Path("/proc/self"))
    assert facts.fault.startswith("PathNotWritable: cannot write /proc/self")
    broken = [finding for finding in judge_folder(facts) if finding.verdict == "broken"]
    assert [finding.check for finding in broken] == ["run folder"]


def test_all_is_well_on_a_disk() -> None:
    assert {finding.verdict for finding in findings().values()} == {"ok"}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tmpfs", "goes with the machine or container"),
        ("overlay", "goes with the container"),
        ("nfs4", "may not reach other hosts"),
        ("lustre", "may not reach other hosts"),
        ("fuse.s3fs", "may not reach other hosts"),
    ],
)
def test_file_systems_that_promise_less(kind: str, says: str) -> None:
    found = file_system("runs", Mount("/x", kind, "there", frozenset()))
    assert (found.verdict, says in found.found) == ("limited", True)


@pytest.mark.parametrize(
    ("measured", "check", "verdict"),
    [
        ({"free": 5 * GIB}, "room", "limited"),
        ({"free": 5 << 20}, "room", "broken"),
        ({"inodes": 500}, "room", "limited"),
        ({"inodes": 5}, "room", "broken"),
        ({"inodes": 0, "total_inodes": 0}, "room", "ok"),
        ({"fsync": [0.002] * 19 + [1.5]}, "fsync", "limited"),
        ({"fsync": [0.08] * 20}, "fsync", "limited"),
        ({"refused": {"flock": "ENOLCK"}}, "locks, mmap", "broken"),
    ],
)
def test_each_measure_has_its_verdict(measured: dict[str, Any], check: str, verdict: str) -> None:
    assert findings(**measured)[check].verdict == verdict


def test_shared_memory_of_a_container_is_small() -> None:
    assert shared_memory((64 << 20, 64 << 20)).verdict == "limited"
    assert shared_memory((1 << 20, 20 * GIB)).verdict == "limited"
    assert shared_memory(None).verdict == "limited"
    assert shared_memory((20 * GIB, 20 * GIB)).verdict == "ok"


def test_compiled_code_needs_a_folder_it_may_run_from() -> None:
    found = findings(temporary=Mount("/tmp", "tmpfs", "tmpfs", frozenset({"rw", "noexec"})))["temporary folder"]
    assert (found.verdict, "noexec" in found.found) == ("limited", True)


def test_the_mount_that_holds_a_path_is_the_innermost(tmp_path: Path) -> None:
    table = mounts(make_host(tmp_path).root)
    assert mount_of(Path("/mnt/nfs/a/b"), table) == Mount("/mnt/nfs", "nfs4", "server:/a b", frozenset({"rw"}))
    assert mount_of(Path("/mnt/nfsx"), table).kind == "ext4"
    assert mount_of(Path("/x"), []).kind == "unknown"
