"""Lives of a run: restarts, stops, and slow but healthy ones, which raise no alarm. For fault_scenarios.py."""

from __future__ import annotations

import fault_acts as acts
from fault_names import HANG
from fault_run import DONE, Expect, Scenario

LIVES = [
    Scenario(
        name="two runs on one folder",
        act=acts.second_command,
        plan={"dawdle_s": 0.5},
        expect=DONE,
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="SIGKILL, restarted",
        act=acts.kill,
        spec={"restarts": 3},
        expect=DONE,
        prompt=True,
        quick=True,
    ),
    Scenario(name="exception, restarted", fault="exception", spec={"restarts": 3}, expect=DONE),
    Scenario(
        name="crash loop",
        fault="exception",
        plan={"attempts": 99},
        spec={"restarts": 5},
        phases=("load", "compile"),
        expect=Expect(code="progress.none", exit_code=58, weaker=("py.exception", "py.exit_code", "unknown")),
        quick=True,
    ),
    Scenario(
        name="crash loop with progress",
        fault="exception",
        plan={"attempts": 4, "tick": 5, "steps": 24},
        spec={"restarts": 1},
        phases=("step",),
        expect=DONE,
        quick=True,
    ),
    Scenario(
        name="storm",
        fault="exception",
        plan={"attempts": 99, "tick": 5, "steps": 100},
        spec={"restarts": 3, "hang_limit_scale": 0.05},
        phases=("step",),
        expect=Expect(code="storm", exit_code=58, weaker=("py.exception", "py.exit_code", "unknown")),
    ),
    Scenario(
        name="user stop",
        act=acts.stop_asked,
        expect=Expect(code="user.stop", exit_code=75, ranks="any", weaker=("unknown", "sig.term.external")),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="user stop, twice, deaf workers",
        act=acts.stop_asked_twice,
        plan={"deaf": True},
        expect=Expect(code="user.stop", exit_code=75, ranks="any", weaker=("unknown", "sig.term.external")),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="SIGTERM to the supervisor",
        act=acts.term_to_supervisor,
        expect=Expect(code="sig.term.external", exit_code=75, ranks="any", weaker=("unknown", "user.stop")),
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="SIGINT to the supervisor",
        act=acts.interrupt_to_supervisor,
        expect=Expect(code="sig.int.external", exit_code=75, ranks="any", weaker=("unknown", "user.stop")),
        prompt=False,
    ),
    Scenario(
        name="SIGTERM to the supervisor, twice, deaf workers",
        act=acts.term_twice_to_supervisor,
        plan={"deaf": True},
        expect=Expect(code="sig.term.external", exit_code=75, ranks="any", weaker=("unknown", "user.stop")),
        prompt=False,
    ),
]

HEALTHY = [
    Scenario(
        name="healthy: 20 times slower steps",
        fault="slow_down_20_times",
        spec=HANG,
        phases=("step",),
        expect=DONE,
        prompt=False,
        quick=True,
    ),
    Scenario(
        name="healthy: slow saves",
        plan={"fault": "", "slow": {"checkpoint": 40.0}},
        fault="",
        spec=HANG,
        phases=("checkpoint",),
        expect=DONE,
        prompt=False,
    ),
    Scenario(
        name="healthy: busy children",
        fault="compile_with_children",
        spec={"hang_limit_scale": 0.05},
        phases=("load", "compile", "step", "checkpoint"),
        expect=DONE,
        prompt=False,
    ),
    Scenario(
        name="healthy: long load that reports",
        fault="",
        plan={"slow": {"load": 75.0}},
        spec=HANG,
        phases=("load",),
        expect=DONE,
        prompt=False,
    ),
    Scenario(
        name="healthy: GIL held for 3 s",
        fault="hold_the_gil_3_s",
        spec={"hang_limit_scale": 0.1},
        expect=DONE,
        prompt=False,
        quick=True,
    ),
    Scenario(name="healthy: silent for nearly the limit", fault="pause_silently", spec=HANG, expect=DONE, prompt=False),
]
