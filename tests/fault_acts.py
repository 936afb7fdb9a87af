"""What somebody outside does to a run: signals, kills, full disks, a second command, a reboot found later.

Each act is given the run when its victims have come to their moment. What a worker does to itself is in
fault_injections.py; which act belongs to which name is in fault_scenarios.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

from fault_hosts import fill, make_read_only
from fault_rewrite import clock_moved, memory_was, rewrite_events, rewrite_samples, take_pid
from fault_run import Live

from manifests.runs import recording
from shared.errors import RunBusy
from shared.kernel import process
from shared.stop_file import write_stop

STOPPED_NAMED_S = 10.0


def send(number: int) -> Callable[[Live], None]:
    """A signal to all victims, as fast as one can."""

    def act(live: Live) -> None:
        pids = [live.worker(rank) for rank in live.plan.ranks]
        for pid in pids:
            live.send(pid, number)

    return act


kill = send(signal.SIGKILL)


def stop_once(live: Live) -> None:
    """SIGSTOP, and nobody continues it."""
    send(signal.SIGSTOP)(live)
    _named_in_time(live)


def stop_for_good(live: Live) -> None:
    """SIGSTOP, again whenever somebody continues it: a debugger that holds on."""
    pid = live.worker(live.plan.ranks[0])
    live.send(pid, signal.SIGSTOP)
    acted = live.acted
    deadline = time.monotonic() + live.scenario.end_s
    while live.running and time.monotonic() < deadline:
        found = process(pid)
        if found is not None and found.state not in "TtZX":
            live.send(pid, signal.SIGSTOP)
        time.sleep(0.02)
    live.acted = acted
    _named_in_time(live)


def _named_in_time(live: Live) -> None:
    stopped = live.acted
    assert stopped is not None
    live.wait(lambda: bool(live.events("hang")), STOPPED_NAMED_S + 1, "a name for the stopped process")
    if hangs := live.events("hang"):
        after = hangs[0]["detail"]["mono"] - stopped
        if after > STOPPED_NAMED_S:
            live.notes.append(f"stopped process named after {after:.1f} s")


def everything_killed(live: Live) -> None:
    """Supervisor and workers, in any order, within a millisecond: a cgroup, a session, a container."""
    pids = [live.pid, *live.workers]
    live.rng.shuffle(pids)
    for pid in pids:
        live.send(pid, signal.SIGKILL)
    live.wait(lambda: not live.processes(), 60, "the end of all processes")


def supervisor_killed(live: Live) -> None:
    """Its workers save at their next boundary and leave by themselves."""
    live.send(live.pid, signal.SIGKILL)
    live.wait(lambda: not live.running and not live.processes(), 60, "the end of workers without a supervisor")


def supervisor_killed_and_asked_at_once(live: Live) -> None:
    """While the workers still live."""
    live.send(live.pid, signal.SIGKILL)
    live.wait(lambda: not live.running, 60, "the end of the supervisor")


def supervisor_stopped(live: Live) -> None:
    """Nobody watches for a while; the workers go on, and it takes no silence of that time for a hang."""
    live.send(live.pid, signal.SIGSTOP)
    time.sleep(1.0)
    found = live.judged()
    if found.code != "running" or "supervisor is stopped" not in found.sentence:
        live.notes.append(f"while stopped: {found.code}: {found.sentence}")
    time.sleep(4.5)
    live.send(live.pid, signal.SIGCONT)


def term_to_supervisor(live: Live) -> None:
    live.send(live.pid, signal.SIGTERM)


def interrupt_to_supervisor(live: Live) -> None:
    live.send(live.pid, signal.SIGINT)


def term_twice_to_supervisor(live: Live) -> None:
    """The workers do not listen: the second one kills."""
    live.send(live.pid, signal.SIGTERM)
    time.sleep(0.5)
    live.send(live.pid, signal.SIGTERM)
    live.wait(lambda: not live.running, 10, "the end after a second request")


def hangup_to_supervisor(live: Live) -> None:
    live.send(live.pid, signal.SIGHUP)


def stop_asked(live: Live) -> None:
    """`dflash stop`, from any shell."""
    live.acted = time.monotonic()
    write_stop(live.run_dir, False, "dflash stop")


def stop_asked_twice(live: Live) -> None:
    """The workers do not listen; the second request kills them."""
    stop_asked(live)
    time.sleep(0.6)
    write_stop(live.run_dir, True, "dflash stop --now")
    live.wait(lambda: not live.running, 10, "the end after a second request")


def second_command(live: Live) -> None:
    """The same folder once more while the run lives: refused, and the run does not notice."""
    try:
        with recording(live.run_dir, live.plan.role, {}):
            live.notes.append("a second command got the folder")
    except RunBusy as error:
        if str(live.pid) not in str(error):
            live.notes.append(f"the refusal names another owner: {error}")


def oom_in_cgroup(live: Live) -> None:
    """The kernel counts, then kills: the cgroup was full."""
    host = live.host
    assert host is not None
    host.oom_host += live.scenario.victims
    if host.oom_cgroup is not None:
        host.oom_cgroup += live.scenario.victims
    host.write()
    kill(live)


def oom_on_host(live: Live) -> None:
    """Only the host's count can be read."""
    oom_in_cgroup(live)


def bystander_oom(live: Live) -> None:
    """Another process of the host was the OOM killer's victim, ours were killed by hand in the same second."""
    host = live.host
    assert host is not None
    host.oom_host += 1
    host.write()
    kill(live)


def everything_killed_and_counted(live: Live) -> None:
    """memory.oom.group: the kernel counts one kill and takes all."""
    host = live.host
    assert host is not None
    host.oom_host += 1
    host.oom_cgroup = (host.oom_cgroup or 0) + 1
    host.write()
    everything_killed(live)


def memory_seen(used: float) -> Callable[[Live], None]:
    """Afterwards: the samples of the last minutes, and the last look at a death, had seen this share of it in use."""

    def at_death(event: dict[str, Any]) -> None:
        if "memory" in event["detail"]:
            memory_was(used)(event["detail"])

    def after(live: Live) -> None:
        rewrite_samples(live.run_dir, memory_was(used))
        rewrite_events(live.run_dir, at_death)

    return after


def rebooted(live: Live) -> None:
    """The host came up again; its folder is still there."""
    assert live.host is not None
    live.host.boot = "99999999-2222-3333-4444-555555555555"
    live.host.boot_age_s, live.host.pid1_start_s = 0.0, 3.0
    live.host.write()


def container_restarted(live: Live) -> None:
    """Same boot, another process 1, as after an OOM kill of a container."""
    assert live.host is not None
    live.host.pid1_start_s = time.monotonic() + 5.0
    live.host.write()


def namespace_changed(live: Live) -> None:
    """From another PID namespace a heart that beat within five seconds may still beat."""
    assert live.host is not None
    time.sleep(5.5)
    live.host.namespace = "pid:[4026539999]"
    container_restarted(live)


def pids_reused(live: Live) -> None:
    """Others have the numbers of its processes now: to ask for a pid alone would find the run alive."""
    takers = [take_pid(pid) for pid in (live.pid, *live.workers)]
    taken = [pid for pid in takers if pid is not None]
    if not taken:
        live.notes.append("no pid could be taken again")
    _ask_and_end(live, taken)


def _ask_and_end(live: Live, taken: list[int]) -> None:
    found = live.judged()
    for pid in taken:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    again = live.judged()
    if (found.code, found.ranks) != (again.code, again.ranks):
        live.notes.append(f"with other processes under its pids: {found.code}, else {again.code}")


def clock_set(seconds: float) -> Callable[[Live], None]:
    """Afterwards: the wall clock had been set at the moment of the fault; nothing may depend on it."""

    def after(live: Live) -> None:
        moments = [at for rank in live.plan.ranks if (at := live.moment(rank)) is not None]
        rewrite_events(live.run_dir, clock_moved(seconds, min(moments)))

    return after


def evidence_deleted(live: Live) -> None:
    """Everything but the record that a run began."""
    for name in ("supervision", "logs", "workers", "progress"):
        shutil.rmtree(live.run_dir / name, ignore_errors=True)
    for path in live.run_dir.glob("manifest/events.*"):
        path.unlink()
    for path in live.run_dir.glob("manifest/runs.*"):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def evidence_is_noise(live: Live) -> None:
    """Files of a dying disk: other bytes of the same size."""
    noise = live.rng.randbytes
    for pattern in ("supervision/*", "logs/*", "workers/*", "progress/*", "manifest/events.*"):
        for path in live.run_dir.glob(pattern):
            if path.is_file():
                path.write_bytes(noise(path.stat().st_size))
    for path in live.run_dir.glob("manifest/runs.*"):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def room_again(live: Live) -> None:
    """The disk is full until the run has paused; then somebody deletes something."""
    ballast = live.run_dir / "toy" / "data" / "ballast"
    if live.wait(lambda: bool(live.events("paused")), 60, "a pause"):
        time.sleep(0.5)
        ballast.unlink()
        live.wait(lambda: bool(live.events("continued")), 60, "going on when there is room")


def read_only_then_kill(live: Live) -> None:
    """As a file system does that met an error: what is open can be written, nothing new can."""
    make_read_only(live.run_dir)
    kill(live)


def ledger_disk_full_then_kill(live: Live) -> None:
    """No event can be appended any more; the ring has its room."""
    fill(live.run_dir / "manifest")
    kill(live)


def whole_disk_full_then_kill(live: Live) -> None:
    fill(live.run_dir)
    kill(live)


def high_then_killed(live: Live) -> None:
    """The samples see a full cgroup for more than a second, then all is gone."""
    assert live.host is not None
    live.host.used = int(0.992 * live.host.limit)
    live.host.write()
    time.sleep(2.2)
    everything_killed(live)
