"""Which systemd unit, login and container we live in: what else must end for a run to end with it.

Own sessions and nohup do not leave a cgroup: what ends the unit ends the run. `read_session` gathers, `judge_session`
is pure. Called by manifests/doctor_machine.py. Next: manifests/doctor_folder.py.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from manifests.doctor_finding import Finding
from manifests.doctor_sources import text_of
from shared.kernel import Kernel, process

REMEDY = "systemd-run --user --same-dir --unit=dflash -p OOMPolicy=continue dflash train ..."
# Units whose death people do not expect to be that of their run: (pattern, what it is).
_UNITS = (
    (r"tmux-spawn-.*\.scope", "a tmux pane"),
    (r"session-.*\.scope", "a login session"),
    (r"(vte-spawn|app-|run-).*\.scope", "a terminal or application"),
    (r".*\.scope", "a scope"),
    (r".*\.service", "a service"),
)
# Longer than any process 1 that collects at all has taken.
REAPED_WITHIN_S = 5.0
_CONTAINERS = ("docker", "kubepods", "containerd", "libpod", "lxc", "garden", "slurm_step")


@dataclass(frozen=True)
class SessionFacts:
    """What surrounds this process; None where this process may not know it."""

    unit: str
    """The systemd unit of our cgroup, "" when there is none."""
    kind: str
    """What such a unit is, in words."""
    user_manager: bool
    """The unit lies below user@UID.service, which ends with the user's last session unless he lingers."""
    oom_policy: str
    """ "stop", "continue" or "kill" as systemd says, "" when it was not asked or did not answer."""
    systemd: bool
    """systemd runs this machine or container."""
    kill_user_processes: bool | None
    linger: bool | None
    container: str
    """ "" for none, or what it was known by."""
    pid1: str
    reaps: bool | None
    """Whether orphans that end are collected; None when it was not tried."""
    identity: tuple[str, ...]
    """What cannot be read of the identity of this boot and container."""


def read_session(kernel: Kernel, user: str, patience_s: float = 0.0) -> SessionFacts:
    """Gather the facts below `kernel.root`; with patience also ask systemctl (for a second) and leave an orphan behind.

    Both are about this machine: never with another root.
    """
    root = kernel.root
    path = unit_path(kernel)
    unit, kind = unit_of(path)
    systemd = (root / "run/systemd/system").is_dir()
    user_manager = "/user@" in path
    unreadable = {"boot id": kernel.boot_id(), "start of process 1": kernel.pid1_start()}
    return SessionFacts(
        unit=unit,
        kind=kind,
        user_manager=user_manager,
        oom_policy=_oom_policy(unit, user_manager) if patience_s and systemd and unit else "",
        systemd=systemd,
        kill_user_processes=_kill_user_processes(root, user),
        linger=(root / "var/lib/systemd/linger" / user).exists() if systemd else None,
        container=container_of(kernel),
        pid1=text_of(root / "proc/1/comm"),
        reaps=reaps_orphans(patience_s) if patience_s else None,
        identity=tuple(name for name, value in unreadable.items() if value is None),
    )


def judge_session(facts: SessionFacts) -> list[Finding]:
    """The findings of the part "session"."""
    return [scope(facts), _logout(facts), _pid1(facts), _identity(facts)]


def scope(facts: SessionFacts) -> Finding:
    """Whether the death of one process takes the whole unit down."""
    if not facts.unit:
        return Finding("session", "systemd unit", "ok", "none: closing this shell, ssh or tmux ends nothing")
    where = f"{facts.unit} ({facts.kind})"
    if facts.oom_policy == "continue":
        return Finding("session", "systemd unit", "ok", f"{where}, OOMPolicy=continue")
    policy = f"OOMPolicy={facts.oom_policy}" if facts.oom_policy else "OOMPolicy=stop unless set (systemd's default)"
    return Finding(
        "session", "systemd unit", "limited",
        f"{where}, {policy}: when the kernel kills one process of it for memory, systemd ends all of it, tmux and "
        "the supervisor too",
        f"start long runs in a unit of their own: {REMEDY}",
    )  # fmt: skip


def _logout(facts: SessionFacts) -> Finding:
    if not facts.systemd:
        return Finding("session", "logout", "ok", "no systemd here: a logout ends no process by itself")
    if facts.user_manager:
        if facts.linger:
            return Finding("session", "logout", "ok", "this user lingers: the user's units outlive the last session")
        return Finding(
            "session", "logout", "limited", "this user does not linger: all user units end with the last session",
            "loginctl enable-linger",
        )  # fmt: skip
    if not facts.unit.startswith("session-"):
        return Finding("session", "logout", "ok", "not part of a login session")
    if facts.kill_user_processes is False:
        return Finding("session", "logout", "ok", "KillUserProcesses=no: processes outlive the session")
    state = "cannot be read" if facts.kill_user_processes is None else "is yes"
    return Finding(
        "session", "logout", "limited", f"KillUserProcesses {state}: a logout may end every process of this session",
        f"loginctl enable-linger, then {REMEDY}",
    )  # fmt: skip


def _pid1(facts: SessionFacts) -> Finding:
    where = f"in a container ({facts.container})" if facts.container else "no container"
    found = f"{where}, process 1 is {facts.pid1 or 'hidden'}"
    if facts.reaps is False:
        return Finding(
            "session", "process 1", "limited", f"{found}: it does not collect orphans that ended, they stay as zombies",
            "start the container with an init: docker run --init, or tini as its entry point",
        )  # fmt: skip
    return Finding("session", "process 1", "ok", found + (", collects orphans" if facts.reaps else ""))


def _identity(facts: SessionFacts) -> Finding:
    if not facts.identity:
        found = "readable: a reboot, a container restart and a kill can be told apart"
        return Finding("session", "boot identity", "ok", found)
    return Finding(
        "session", "boot identity", "limited",
        f"{' and '.join(facts.identity)} cannot be read: a run that vanished in a restart will be called killed",
        "unmask /proc/sys/kernel/random and /proc/1 in the container",
    )  # fmt: skip


def unit_path(kernel: Kernel) -> str:
    """Our path in the hierarchy that systemd manages: v2, or v1's name=systemd; "" without one."""
    paths = {}
    for line in text_of(kernel.root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "name=systemd" or (number == "0" and not controllers):
            paths[controllers] = path
    return max(paths.values(), key=len, default="")


def unit_of(path: str) -> tuple[str, str]:
    """The innermost unit of a cgroup path and what it is; ("", "") when no part is one."""
    for part in reversed(path.split("/")):
        for pattern, kind in _UNITS:
            if re.fullmatch(pattern, part):
                return part, kind
    return "", ""


def container_of(kernel: Kernel) -> str:
    """What shows that this is a container; "" when nothing does."""
    root = kernel.root
    for path, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / path).exists():
            return kind
    if (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    told = [part for part in text_of(root / "proc/1/environ").split("\0") if part.startswith("container=")]
    if told:
        return told[0].removeprefix("container=")
    own = text_of(root / "proc/self/cgroup")
    return next((name for name in _CONTAINERS if name in own), "")


def reaps_orphans(patience_s: float) -> bool | None:
    """Whether a process whose parent is gone is collected when it ends; None if that was not seen within `patience_s`.

    Tried with a real one: a shell leaves a sleeping child behind. Whoever adopts it is who would adopt a worker's. Some
    that run as process 1 look only every second or two, so False needs a patience of several seconds.
    """
    try:
        done = subprocess.run(
            ["sh", "-c", "sleep 0.03 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, timeout=2, check=True
        )
        orphan = int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    deadline = time.monotonic() + patience_s
    while (found := process(orphan)) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    if found is None:
        return True
    return False if found.state == "Z" and patience_s >= REAPED_WITHIN_S else None


def _oom_policy(unit: str, user_manager: bool) -> str:
    command = ["systemctl", *(["--user"] if user_manager else []), "show", "--value", "-p", "OOMPolicy", unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _kill_user_processes(root: Path, user: str) -> bool | None:
    """What logind does at logout: the last setting counts, and a commented one is the default that was compiled in."""
    files = [root / "etc/systemd/logind.conf"]
    for place in ("usr/lib", "run", "etc"):
        files += sorted((root / place / "systemd/logind.conf.d").glob("*.conf"))
    found: bool | None = None
    excluded = {"root"}
    for text in map(text_of, files):
        if default := re.search(r"^#\s*KillUserProcesses=(\w+)", text, re.MULTILINE):
            found = _is_yes(default[1]) if found is None else found
        for given in re.findall(r"^KillUserProcesses=(\w+)", text, re.MULTILINE):
            found = _is_yes(given)
        for names in re.findall(r"^KillExcludeUsers=(.*)$", text, re.MULTILINE):
            excluded = set(names.split())
    return False if found and user in excluded else found


def _is_yes(text: str) -> bool:
    return text.lower() in ("yes", "true", "on", "1", "y", "t")
