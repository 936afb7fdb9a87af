"""Disks and hosts around a run of the fault matrix: contexts that tests/fault_run.py enters before the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from fault_hosts import (
    GIB,
    Host,
    fill,
    inside_memory_cgroup,
    make_read_only,
    make_writable,
    remove_cgroup,
    small_disk,
)
from fault_run import Live

MIB = 1 << 20


@contextmanager
def small_data_disk(live: Live) -> Iterator[None]:
    """What the workers write goes to a disk of its own that is too small; their run folder has room."""
    with small_disk(live.run_dir / "toy" / "data", 4 * MIB):
        yield


@contextmanager
def disk_of_few_files(live: Live) -> Iterator[None]:
    """Room for bytes, not for files."""
    with small_disk(live.run_dir / "toy" / "data", 64 * MIB, inodes=20):
        yield


@contextmanager
def full_data_disk(live: Live) -> Iterator[None]:
    """As above, with room enough once a file is deleted. Room is looked for where the run folder is."""
    with small_disk(live.run_dir, 160 * MIB):
        (live.run_dir / "toy" / "data").mkdir(parents=True)
        ballast = fill(live.run_dir, leave=6 * MIB)
        ballast.rename(live.run_dir / "toy" / "data" / "ballast")
        yield


@contextmanager
def own_run_disk(live: Live) -> Iterator[None]:
    """The whole run folder on a disk of its own, with room."""
    with small_disk(live.run_dir, 64 * MIB):
        yield


@contextmanager
def small_run_disk(live: Live) -> Iterator[None]:
    """The whole run folder, logs and ledger included, on a disk that the workers fill."""
    with small_disk(live.run_dir, 8 * MIB):
        (live.run_dir / "toy" / "data").mkdir(parents=True)
        yield


@contextmanager
def small_manifest_disk(live: Live) -> Iterator[None]:
    """Only the ledger is on a small disk."""
    with small_disk(live.run_dir / "manifest", MIB):
        yield


@contextmanager
def full_log_disk(live: Live) -> Iterator[None]:
    """Only the logs are on a small disk."""
    with small_disk(live.run_dir / "logs", MIB):
        yield


@contextmanager
def read_only_data(live: Live) -> Iterator[None]:
    """What the workers write to cannot be written."""
    data = live.run_dir / "toy" / "data"
    data.mkdir(parents=True)
    make_read_only(data)
    try:
        yield
    finally:
        make_writable(data)


@contextmanager
def made_host(live: Live) -> Iterator[None]:
    """A host of files, with memory to spare."""
    live.host = Host(live.run_dir.with_name(live.run_dir.name + "-host"))
    live.host.write()
    yield


def full_cgroup(version: int) -> Callable[[Live], AbstractContextManager[None]]:
    """A host of files whose cgroup is nearly full."""

    @contextmanager
    def setup(live: Live) -> Iterator[None]:
        root = live.run_dir.with_name(live.run_dir.name + "-host")
        live.host = Host(root, version=version, used=int(63.9 * GIB))
        live.host.write()
        yield

    return setup


@contextmanager
def full_host(live: Live) -> Iterator[None]:
    """A host of files without memory, in a container that shows no counter of its own."""
    root = live.run_dir.with_name(live.run_dir.name + "-host")
    live.host = Host(root, available=8 * GIB, oom_cgroup=None)
    live.host.write()
    yield


@contextmanager
def real_memory_cgroup(live: Live) -> Iterator[None]:
    """A real cgroup of 400 MiB around all processes of the run."""
    start = live.start
    made = []

    def start_inside() -> None:
        with inside_memory_cgroup(400 * MIB) as own:
            made.append(own)
            start()

    live.start = start_inside  # type: ignore[method-assign]
    try:
        yield
    finally:
        live.end_everything()
        for own in made:
            remove_cgroup(own)
