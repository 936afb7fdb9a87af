"""What a worker does to itself or has done to it: endings, signals, hangs. Collected by fault_scenarios.py."""

from __future__ import annotations

import signal

import fault_acts as acts
from fault_names import EXCEPTION, EXIT_0, EXIT_CODE, HANG, KILLED, LATE, LOST_THREAD, crash, hang
from fault_run import DONE, Expect, Scenario

ENDINGS = [
    Scenario(name="exception", fault="exception", expect=EXCEPTION, quick=True),
    Scenario(name="exception of 50 MB", fault="exception_of_50_mb", expect=EXCEPTION, prompt=False, quick=True),
    Scenario(name="exception that is no text", fault="exception_that_is_no_text", expect=EXCEPTION, quick=True),
    Scenario(name="exception about itself", fault="exception_about_itself", expect=EXCEPTION, quick=True),
    Scenario(name="endless recursion", fault="endless_recursion", expect=EXCEPTION),
    Scenario(name="exception without text", fault="exception_without_text", expect=EXCEPTION, quick=True),
    Scenario(name="exception in a helper thread", fault="exception_in_a_thread", expect=LOST_THREAD, quick=True),
    Scenario(name="helper thread, main waits", fault="exception_in_a_thread_while_main_waits", expect=LOST_THREAD),
    Scenario(name="SystemExit 3", fault="system_exit_3", expect=EXIT_CODE, quick=True),
    Scenario(name="SystemExit 0", fault="system_exit_0", expect=EXIT_0, quick=True),
    Scenario(name="KeyboardInterrupt", fault="keyboard_interrupt", expect=EXCEPTION),
    Scenario(name="os._exit(0)", fault="os_exit_0", expect=EXIT_0, quick=True),
    Scenario(name="os._exit(3)", fault="os_exit_3", expect=EXIT_CODE, quick=True),
    Scenario(name="MemoryError (RLIMIT_AS)", fault="out_of_address_space", expect=EXCEPTION, quick=True),
    Scenario(name="exception, a child left behind", fault="leave_a_child_and_die", expect=EXCEPTION),
    Scenario(
        name="exception, a thread that never ends",
        fault="fail_beside_a_thread",
        spec=HANG,
        expect=EXCEPTION,
        phases=LATE,
    ),
    Scenario(
        name="exception, an end that never comes",
        fault="fail_and_never_leave",
        spec=HANG,
        expect=EXCEPTION,
        phases=LATE,
    ),
]

SIGNALS = [
    Scenario(name="SIGKILL", act=acts.kill, expect=KILLED, quick=True),
    Scenario(name="SIGKILL by itself", fault="kill_itself", expect=KILLED),
    Scenario(
        name="SIGTERM to a rank",
        act=acts.send(signal.SIGTERM),
        expect=Expect(code="sig.term.external", exit_code=75, weaker=("unknown", "user.stop")),
        quick=True,
    ),
    Scenario(
        name="SIGINT to a rank",
        act=acts.send(signal.SIGINT),
        expect=Expect(code="sig.int.external", exit_code=75, weaker=("unknown", "user.stop")),
    ),
    Scenario(
        name="SIGHUP to a rank",
        act=acts.send(signal.SIGHUP),
        expect=DONE,
        plan={"dawdle_s": 0.3},
        prompt=False,
        quick=True,
    ),
    Scenario(name="SIGSEGV", fault="segv", expect=crash("segv"), quick=True),
    Scenario(name="SIGABRT", fault="abort", expect=crash("abrt"), quick=True),
    Scenario(name="SIGBUS (mapped file cut short)", fault="bus", expect=crash("bus"), quick=True),
    Scenario(name="SIGFPE", fault="fpe", expect=crash("fpe")),
    Scenario(name="two ranks at once", act=acts.kill, victims=2, roles=("train",), expect=KILLED, quick=True),
    Scenario(name="root, then cascade", act=acts.kill, roles=("train",), world=4, expect=KILLED, quick=True),
    Scenario(name="exception, then cascade", fault="exception", roles=("train",), world=4, expect=EXCEPTION),
]

HANGS = [
    Scenario(
        name="SIGSTOP, left alone",
        act=acts.stop_once,
        spec=HANG,
        plan={"dawdle_s": 3.0},  # it goes on at once when it is continued
        expect=Expect(code="done", exit_code=0, ranks="none", named="hang.stopped"),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="SIGSTOP, held",
        act=acts.stop_for_good,
        spec=HANG,
        plan={"silent": True},
        expect=hang("stopped"),
        prompt=False,
    ),
    Scenario(name="GIL held", fault="hold_the_gil", spec=HANG, expect=hang("gil"), prompt=False, quick=True),
    Scenario(
        name="wait in native code",
        fault="wait_in_native_code",
        spec=HANG,
        expect=hang("wait"),
        prompt=False,
        quick=True,
    ),
    Scenario(name="wait in Python", fault="wait_in_python", spec=HANG, expect=hang("wait"), prompt=False),
    Scenario(name="busy loop", fault="spin", spec=HANG, expect=hang("busy"), prompt=False, quick=True),
    Scenario(
        name="wait in the kernel (vfork)",
        fault="wait_in_the_kernel",
        spec=HANG,
        expect=hang("io"),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="start-up that never ends",
        fault="never_begin",
        spec=HANG,
        phases=("import",),
        expect=hang("startup"),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="skipped collective (gloo)",
        fault="skip_a_collective",
        entry="fault_gloo:work",
        world=3,
        roles=("train",),
        phases=("step",),
        spec={"hang_limit_scale": 0.1},
        expect=Expect(
            code="comm.mismatch", exit_code=57, confidence=("likely", "proved"), weaker=("hang.wait", "unknown")
        ),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="another collective (gloo)",
        fault="another_collective",
        entry="fault_gloo:work",
        world=3,
        roles=("train",),
        phases=("step",),
        spec={"hang_limit_scale": 0.1},
        expect=Expect(
            code="comm.mismatch", exit_code=57, confidence=("likely", "proved"), weaker=("hang.wait", "unknown")
        ),
        prompt=False,
    ),
    Scenario(
        name="outside the collective (gloo)",
        fault="sleep_outside",
        entry="fault_gloo:work",
        world=3,
        roles=("train",),
        phases=("step",),
        spec={"hang_limit_scale": 0.1},
        expect=hang("wait"),
        prompt=False,
    ),
    Scenario(
        name="SIGKILL, peers under gloo",
        act=acts.kill,
        entry="fault_gloo:work",
        world=3,
        roles=("train",),
        phases=("step",),
        expect=KILLED,
        quick=True,
    ),
    Scenario(
        name="exception, peers under gloo",
        fault="exception",
        entry="fault_gloo:work",
        world=3,
        roles=("train",),
        phases=("step",),
        expect=EXCEPTION,
    ),
]
