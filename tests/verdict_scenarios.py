"""Accidents, each as the evidence that it would leave and its true name: what tests of the verdict judge by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verdict_night import HOST, TRACE, WALL, Night

from manifests.evidence import Evidence
from manifests.verdict import Verdict


@dataclass(frozen=True)
class Scenario:
    """An accident and its true name.

    `weaker` are names that say less and are still true: allowed when a source of evidence is gone, if the confidence
    falls too. `also`: names that are as true by themselves (the failure that came three times, for progress.none).
    """

    name: str
    evidence: Evidence
    code: str
    ranks: tuple[int, ...] = ()
    confidence: str = "proved"
    weaker: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    attempt: int | None = None

    def allows(self, found: Verdict) -> bool:
        """Whether a verdict on less evidence is right or honest: no other code, no other rank, no false certainty."""
        same = found.code in (self.code, *self.also)
        weaker = found.code in ("unknown", *self.weaker) and found.confidence != "proved"
        return (same or weaker) and (found.code == "unknown" or set(found.ranks) <= set(self.ranks))


def _two(signal: int | None = None, **facts: Any) -> Night:
    """Rank 1 dies at 30.3 s by `facts`, rank 0 is ended because of it."""
    night = Night()
    share, available = facts.get("share", 0.41), facts.get("available", 0.6)
    night.sampled(30, share, available)
    night.beating(30.2)
    night.died(30.3, 1, signal=signal, **facts)
    night.sampled(31, 0.2, max(available, 0.3))
    night.asked_away(31.5, 0)
    return night


def _raised(error: str, message: str, code: int = 1, **more: Any) -> Night:
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    night.raised(30.3, 1, error, message, code, **more)
    night.asked_away(31.5, 0)
    night.sampled(31)
    return night


FAULT = ("Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):",
         '  File "/app/kernel.py", line 12 in launch')  # fmt: skip
_EXIT = ("py.exit_code",)


def exceptions() -> list[Scenario]:
    """Everything that a worker can write about itself."""
    found = []
    named = [
        ("ValueError", "ValueError: shapes differ", 1, "py.exception"),
        ("KeyboardInterrupt", "KeyboardInterrupt", 130, "py.exception"),
        ("MemoryError", "MemoryError", 1, "py.exception"),
        ("SystemExit", "SystemExit(3) before the work was done", 3, "py.exit_code"),
        ("SystemExit", "SystemExit(0) before the work was done", 50, "py.exit0_undone"),
        ("OutOfMemoryError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB.", 1, "gpu.cuda_oom"),
        ("AcceleratorError", "AcceleratorError: CUDA error: device-side assert triggered", 1, "gpu.fault"),
        ("RuntimeError", "RuntimeError: CUDA error: an illegal memory access was encountered", 1, "gpu.fault"),
        ("RuntimeError", "RuntimeError: No CUDA-capable device is detected", 1, "gpu.fault"),
        ("RuntimeError", "RuntimeError: CUDA error: GPU is lost; reboot the system to recover it", 1, "gpu.lost"),
        ("RuntimeError", "RuntimeError: Detected mismatch between collectives on ranks.", 1, "comm.mismatch"),
        ("DiskFull", "disk full while writing /d/step-7 (0 bytes free); make room", 41, "disk.full"),
        ("PathNotWritable", "cannot write /d/x: Read-only file system; choose another", 40, "disk.read_only"),
        ("PathNotWritable", "cannot use /d/x: Input/output error; change", 40, "disk.io"),
        ("PathNotWritable", "cannot write /d/x: File too large; choose another", 40, "disk.limit"),
        ("PathNotWritable", "cannot write /d/x: Permission denied; choose another", 40, "refused.path_not_writable"),
        ("StoreDamaged", "block 412 fails its checksum", 32, "data.corrupt"),
        ("NonFinite", "loss is nan at step 7", 52, "data.nonfinite"),
        ("CompileContract", "region compiled 3 times, declared 1", 53, "compile.contract"),
        ("CheckpointMismatch", "checkpoint of another configuration", 60, "refused.checkpoint_mismatch"),
    ]
    for error, message, code, name in named:
        night = _raised(error, message, code).failed(33, f"{error}: {message}", code)
        weaker = (*_EXIT, "py.exception") if not name.startswith("py.exit") else _EXIT
        found.append(Scenario(f"{name} by {message[:40]}", night.evidence(), name, (1,), weaker=weaker))
    thread = _raised("OSError", "OSError: queue broke", 50, thread="writer").failed(33)
    found.append(Scenario("thread lost", thread.evidence(), "py.thread_lost", (1,), weaker=(*_EXIT, "py.exception")))
    printing = TRACE + '  File "/app/worker.py", line 7, in step\n    print(line)\n'
    log = _raised("DiskFull", "disk full while writing . (0 bytes free); make room", 41, traceback=printing).failed(33)
    found.append(Scenario("log disk full", log.evidence(), "log.full", (1,), weaker=("disk.full", *_EXIT)))
    exits = _two(code=3).failed(33)
    found.append(Scenario("os._exit(3)", exits.evidence(), "py.exit_code", (1,)))
    zero = _two(code=0).failed(33)
    found.append(Scenario("os._exit(0)", zero.evidence(), "py.exit0_undone", (1,)))
    return found


def signals() -> list[Scenario]:
    """Workers that a signal ended."""
    found = []
    for number, name in ((11, "segv"), (6, "abrt"), (4, "ill"), (8, "fpe"), (7, "bus")):
        night = _two(number, fault=FAULT if number == 11 else ()).failed(33, code=51)
        found.append(Scenario(f"SIG{name.upper()}", night.evidence(), f"sig.{name}", (1,)))
    shm = Night()
    shm.sampled(30, shm_free=4096)
    shm.beating(30.2)
    shm.died(30.3, 1, signal=7)
    shm.asked_away(31.5, 0)
    found.append(Scenario("/dev/shm full", shm.failed(33).evidence(), "sig.bus.shm", (1,), weaker=("sig.bus",)))
    found.append(Scenario("kill -9", _two(9).failed(33).evidence(), "sig.kill.external", (1,)))
    unread: dict[str, int | None] = {"vmstat": None, "cgroup": None}
    blind = Night(oom=unread)
    blind.sampled(30)
    blind.beating(30.2)
    blind.died(30.3, 1, signal=9, oom=unread)
    blind.asked_away(31.5, 0)
    found.append(
        Scenario("kill -9, no counters", blind.failed(33).evidence(), "sig.kill.external", (1,), confidence="likely")
    )
    own: dict[str, int | None] = {"vmstat": 42, "cgroup": 1}
    full = _two(9, oom=own, share=0.998).failed(33, code=55)
    found.append(Scenario("OOM of the cgroup", full.evidence(), "sig.kill.oom_cgroup", (1,)))
    unseen = _two(9, oom=own, share=0.6).failed(33, code=55)
    found.append(
        Scenario("OOM of the cgroup, fast", unseen.evidence(), "sig.kill.oom_cgroup", (1,), confidence="likely")
    )
    host = _two(9, oom=own, available=0.02, share=0.6).failed(33, code=55)
    found.append(Scenario("OOM of the host", host.evidence(), "sig.kill.oom_host", (1,)))
    foreign = _two(9, oom={"vmstat": 42, "cgroup": 0}, available=0.02, share=0.6).failed(33, code=55)
    found.append(
        Scenario("OOM of the host, cgroup still", foreign.evidence(), "sig.kill.oom_host", (1,), confidence="likely")
    )
    for number, code in ((15, "sig.term.external"), (2, "sig.int.external"), (1, "sig.hup")):
        found.append(
            Scenario(f"signal {number} before it could listen", _two(number).failed(33).evidence(), code, (1,))
        )
    return [*found, *_noted_signals()]


def _noted_signals() -> list[Scenario]:
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    note = {"number": 15, "name": "SIGTERM", "sender_pid": 77, "sender_uid": 0, "sender_command": "systemd"}
    night.raised(30.3, 1, "Interrupted", "stopped at step 1204", 75, signal=note)
    night.raised(30.32, 0, "Interrupted", "stopped at step 1204", 75)
    worker = night.failed(33, "Interrupted: stopped at step 1204", 75)
    found = [Scenario("SIGTERM to one rank", worker.evidence(), "sig.term.external", (1,), weaker=("user.stop",))]
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    night.event(30.0, "stop asked", by={"signal": "SIGTERM", "sender_pid": 77, "sender_command": "slurmd"}, now=False)
    for rank in (0, 1):
        night.raised(30.3, rank, "Interrupted", "stopped at step 1204", 75, asked=True)
    supervisor = night.interrupted(31).evidence()
    found.append(Scenario("SIGTERM to the supervisor", supervisor, "sig.term.external", weaker=("user.stop",)))
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    night.stop = {"user": "ann", "host": HOST, "pid": 9, "tty": "/dev/pts/3", "now": False, "via": "dflash stop"}
    night.event(30.0, "stop asked", by=night.stop, now=False)
    for rank in (0, 1):
        night.raised(30.3, rank, "Interrupted", "stopped at step 1204", 75, asked=True)
    found.append(Scenario("dflash stop", night.interrupted(31).evidence(), "user.stop"))
    night = Night()
    night.sampled(30)
    night.beating(30.2)
    command = "/opt/venv/bin/python3 /opt/venv/bin/dflash stop runs/a"
    by = {"signal": "SIGTERM", "sender_pid": 1500, "sender_uid": 0, "sender_command": command, "now": False}
    night.event(30.0, "stop asked", by=by, now=False)
    for rank in (0, 1):
        night.raised(30.3, rank, "Interrupted", "stopped at step 1204", 75, asked=True)
    signalled = night.interrupted(31).evidence()
    weaker = ("sig.term.external",)
    return [*found, Scenario("dflash stop, a folder that takes no file", signalled, "user.stop", weaker=weaker)]


PEER = "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4321 (gloo)"


def cascades() -> list[Scenario]:
    """More than one rank fails: the root, or both."""
    night = Night(ranks=3)
    night.sampled(30)
    night.beating(30.2)
    night.raised(30.28, 0, "RuntimeError", PEER)  # noticed first, and still no root
    night.died(30.35, 1, signal=11, fault=FAULT)
    night.raised(30.4, 2, "RuntimeError", PEER)
    found = [Scenario("root, its victims first", night.failed(33).evidence(), "sig.segv", (1,))]
    night = Night(ranks=3)
    night.sampled(30)
    night.beating(30.2)
    night.died(30.3, 0, signal=9)
    night.died(30.301, 2, signal=9)
    night.raised(30.5, 1, "RuntimeError", PEER)
    found.append(Scenario("two killed at once", night.failed(33).evidence(), "sig.kill.external", (0, 2)))
    night = Night(ranks=2)
    night.sampled(30)
    night.beating(30.2)
    night.died(30.3, 0, code=0, ending=night.ending(30.3, 0, "", "", 0))
    night.raised(30.5, 1, "RuntimeError", PEER)
    left = night.failed(33).evidence()
    found.append(
        Scenario(
            "left while the other waits", left, "comm.mismatch", (0,), confidence="likely", also=("py.exit0_undone",)
        )
    )
    night = Night(ranks=2)
    night.sampled(30)
    night.beating(30.2)
    text = "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8812, OpType=ALLREDUCE)"
    for rank in (0, 1):
        night.raised(30.3 + rank / 50, rank, "DistBackendError", text)
    waited = night.failed(33).evidence()
    found.append(Scenario("all waited in vain", waited, "comm.mismatch", (0, 1), confidence="likely", weaker=_EXIT))
    return found


REDUCE = "all_reduce (distributed_c10d.py:2800) < step (train.py:120)"
ROWS = "next (data.py:40) < step (train.py:100)"


def _hung(
    code: str, stacks: dict[str, list[int]], others: dict[int, str], rank: int = 1, ahead: float = 0, **detail: Any
) -> Night:
    night = Night()
    night.sampled(100)
    night.beating(30.0)
    for which in (0, 1):
        night.beat(100.0, which, done=1204 + (ahead if which == rank else 0), reported=30.0)
    if code == "hang.stopped":
        night.event(34.0, "hang", attempt=1, rank=rank, code=code, phase="step", silent_s=4.0, limit_s=60.0, state="T",
                    action="named", names={})  # fmt: skip
    seen: dict[str, Any] = {
        "silent_s": 62.0,
        "limit_s": 60.0,
        "state": "S",
        "cpu_share": 0.0,
        "alive_age": 0.4,
        "phase": "step",
    }
    night.event(92.0, "hang", attempt=1, rank=rank, code=code, action="kill",
                names={str(r): c for r, c in others.items()}, **(seen | detail))  # fmt: skip
    night.event(94.0, "stacks saved", attempt=1, files=[], groups=stacks)
    for which in (0, 1):
        night.died(99.0, which, signal=9, asked=True, done=1204 + (ahead if which == rank else 0))
    return night.failed(101, code=54)


def hangs() -> list[Scenario]:
    """Ranks that stand still."""
    both: dict[str, list[int]] = {REDUCE: [0], ROWS: [1]}
    waits = {0: "hang.wait", 1: "hang.wait"}
    stopped = _hung("hang.stopped", both, waits | {1: "hang.stopped"}, state="T")
    held = _hung("hang.gil", both, waits | {1: "hang.gil"}, alive_age=61.0)
    victim = _hung("hang.wait", {REDUCE: [1], ROWS: [0]}, waits)
    busy = _hung("hang.busy", both, waits | {1: "hang.busy"}, cpu_share=1.0)
    kernel = _hung("hang.io", both, waits | {1: "hang.io"}, state="D")
    start = _hung("hang.startup", {}, {1: "hang.startup"}, phase="import")
    skipped = _hung("hang.wait", both, waits, ahead=1).evidence(at=120)
    weaker = ("hang.wait", "hang.busy")
    return [
        Scenario("SIGSTOP", stopped.evidence(at=120), "hang.stopped", (1,)),
        Scenario("GIL held", held.evidence(at=120), "hang.gil", (1,)),
        Scenario("waits in the loader", _hung("hang.wait", both, waits).evidence(at=120), "hang.wait", (1,)),
        Scenario("named the victim", victim.evidence(at=120), "hang.wait", (0,)),
        Scenario("busy loop", busy.evidence(at=120), "hang.busy", (1,)),
        Scenario("D state", kernel.evidence(at=120), "hang.io", (1,)),
        Scenario("start-up", start.evidence(at=120), "hang.startup", (1,)),
        Scenario("skipped a collective", skipped, "comm.mismatch", (1,), confidence="likely", weaker=weaker),
    ]


def trees() -> list[Scenario]:
    """Nobody is left."""

    def night(share: float = 0.41, **more: Any) -> Night:
        made = Night()
        made.sampled(30, share, **more)
        made.beating(30.4)
        return made

    moved = {"vmstat": 44, "cgroup": 3}
    none = {"vmstat": 0, "cgroup": 0}
    rebooted = night().evidence(
        boot_id="boot-b", boot_time=WALL + 200, mono=90.0, time=WALL + 290, pid1_start=40, oom=none
    )
    stopped = night()
    for rank in (0, 1):
        stopped.ending(32.0, rank, "SupervisorGone", "its supervisor is gone: stopped at step 1204", 75)
        stopped.logs[f"train-{rank}.log"] = ("ended by SupervisorGone: its supervisor is gone: stopped at step 1204",)
        stopped.beat(32.0, rank, "drain")
    outlived = night()
    outlived.beating(70.0)
    seen = night()
    seen.died(30.2, 0, signal=9)
    return [
        Scenario("all killed", night().evidence(), "tree.killed"),
        Scenario("all killed, one seen to die", seen.evidence(), "tree.killed"),
        Scenario("all killed, memory 99 %", night(0.99).evidence(), "tree.oom_group", confidence="likely"),
        Scenario("all killed, counters moved", night(0.85).evidence(oom=moved), "tree.oom_group", confidence="likely"),
        Scenario("host full", night(0.5, available=0.01).evidence(), "tree.oom_group", confidence="likely"),
        Scenario("reboot", rebooted, "host.reboot"),
        Scenario("container restarted", night(0.95).evidence(at=90, pid1_start=506_000, pid_ns="pid:[4026532777]",
                                                             supervisor_alive=None, oom={"vmstat": 41, "cgroup": None}),
                 "container.restart"),
        Scenario("supervisor killed", stopped.evidence(), "sup.killed"),
        Scenario("supervisor killed, workers live",
                 outlived.evidence(at=70.5, alive_ranks=(0, 1), owned=True, rank_states={0: "S", 1: "R"}), "sup.killed",
                 also=("running",)),
        Scenario("supervisor killed, workers later", outlived.evidence(at=900), "sup.killed", confidence="likely"),
    ]  # fmt: skip


def policies() -> list[Scenario]:
    """What the restart policy adds."""
    found = []
    for code, reason in (
        ("progress.none", "3 times the same failure, nothing new saved"),
        ("storm", "10 starts within 30 minutes"),
    ):
        night = _raised("KeyError", "KeyError: 'loss'").failed(33, code=58, reason=reason, verdict_code=code)
        found.append(Scenario(code, night.evidence(), code, (1,), also=("py.exception",), weaker=_EXIT))
    night = Night()
    night.sampled(30)
    night.beating(30.0, "done", 10_000)
    for rank in (0, 1):
        night.died(30.1, rank, code=0, ending=night.ending(30.1, rank, "", "", 0))
    night.ended = {
        "run_id": "r1",
        "command": "train",
        "state": "finished",
        "exit_code": 0,
        "message": "",
        "time": WALL + 31,
    }
    found.append(Scenario("finished", night.evidence(), "done"))
    night = Night()
    night.sampled(30)
    night.beating(30.3)
    living = night.evidence(
        at=30.5, supervisor_alive=True, owned=True, alive_ranks=(0, 1), rank_states={0: "R", 1: "S"}
    )
    return [*found, Scenario("running", living, "running")]


def unsupervised() -> list[Scenario]:
    """torchrun or Slurm: heartbeats, endings, fault files, and a record of the start."""
    night = Night(supervised=False)
    night.beating(30.0)
    night.ending(30.2, 0, "RuntimeError", PEER)
    night.ending(30.1, 1, "ValueError", "ValueError: shapes differ")
    found = [Scenario("torchrun, exception", night.evidence(), "py.exception", (1,), weaker=_EXIT)]
    night = Night(supervised=False)
    night.beating(30.0)
    night.faults[1] = FAULT
    night.ending(30.2, 0, "RuntimeError", PEER)
    found.append(Scenario("torchrun, crash", night.evidence(), "sig.segv", (1,), confidence="likely"))
    night = Night(supervised=False)
    night.beating(30.0)
    night.ending(30.2, 0, "RuntimeError", PEER)
    return [*found, Scenario("torchrun, one gone", night.evidence(), "unknown", (1,), confidence="unknown")]


def extraction() -> list[Scenario]:
    """Independent workers: one is started again, the newest anomaly is the one that ended the run."""
    night = Night(role="extract", unit="tokens")
    night.sampled(30)
    night.beating(30.2)
    night.died(30.3, 1, signal=9)
    night.event(31.0, "restart", attempt=1, ranks=[1], delay_s=1, reason="")
    night.attempt = 2
    night.event(32.0, "worker spawned", attempt=2, rank=1, pid=night.pid(1), start_ticks=490_200)
    night.sampled(60)
    night.raised(60.3, 1, "ValueError", "ValueError: bad row")
    night.attempt = 1
    night.died(64.0, 0, code=75, asked=True, ending=night.ending(64.0, 0, "Interrupted", "stopped", 75))
    evidence = night.failed(65).evidence(at=90)
    first = Scenario("extract, first death", evidence, "sig.kill.external", (1,), attempt=1)
    return [Scenario("extract, last death", evidence, "py.exception", (1,), weaker=_EXIT), first]


def scenarios() -> list[Scenario]:
    """All of them."""
    groups = (exceptions, signals, cascades, hangs, trees, policies, unsupervised, extraction)
    return [scenario for group in groups for scenario in group()]
