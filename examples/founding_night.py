"""The founding night once more: python examples/founding_night.py [FOLDER]

A training under tmux, two ranks, and then everything that lives is killed at once by SIGKILL: the tmux server, the
command that shows progress, the supervisor, the workers. Nobody is left who could say what happened. Then, from this
shell: what does `dflash status` say, what does `dflash why` say, and does `dflash resume` go on? Without tmux the
command runs in a terminal of its own (a pty), which is killed too. Takes some minutes on two cores; run `make night`.
"""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path

BUNDLED = Path(str(resources.files("shared") / "bundled"))
DFLASH = [sys.executable, "-m", "shared"]
ROWS, STORE, RUN = "rows", "store.zarr", "train"
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
# The night comes between two checkpoints: some steps are lost, and resume says how many. A GPU's steps are over soon.
STEPS, SAVE_EVERY, KILL_AT_STEP = (600, 200, 280) if GPUS else (30, 10, 14)
TRAIN = (
    f"train --store {STORE} --run {RUN} --nproc {min(2, GPUS or 2)} --steps {STEPS} --save-every {SAVE_EVERY} "
    "--eval-every 1000 --num-layers 1 --batch-rows 4 --max-length 160 --anchors 8"
)


def main() -> int:
    """Make a small store, start the training, kill it whole, ask, go on."""
    given = sys.argv[1:]
    folder = Path(given[0] if given else tempfile.mkdtemp(prefix="founding-night-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"# in {folder}")
    make_store()
    server = start_training()
    wait_for(lambda: newest_step() >= KILL_AT_STEP, 600, f"step {KILL_AT_STEP}")
    killed = kill_everything(server)
    print(f"\n# {time.strftime('%H:%M:%S')}: SIGKILL to {killed}")
    print("# nobody is left; from another shell:")
    show("status", RUN)
    show("why", RUN)
    show("resume", RUN)
    return 0 if show("status", RUN) == 0 and newest_step() == STEPS else 1


def make_store() -> None:
    """A store of 32 short answers of the bundled target, if it is not there yet."""
    target = str(BUNDLED / "target")
    if not Path(STORE, "store.json").exists():
        quietly("prepare", str(BUNDLED / "prompts_train.jsonl"), "--target", target, "--regenerate", "--out", ROWS,
                "--max-rows", "32", "--max-new-tokens", "32", "--batch-size", "32", "--on-bad-row", "skip")  # fmt: skip
        quietly("extract", "--target", target, "--data", ROWS, "--out", STORE, "--shards", "1", "--num-taps", "3")
    shutil.rmtree(RUN, ignore_errors=True)


def start_training() -> list[int]:
    """Start it where a person starts it; returns the processes of the terminal around it."""
    command = shlex.join([*DFLASH, *TRAIN.split()])
    if shutil.which("tmux") is not None:
        socket = f"night-{os.getpid()}"
        print(f"\n$ tmux new-session -d 'dflash {TRAIN}'")
        tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
        subprocess.run([*tmux, "new-session", "-d", "-x", "120", "-y", "30", command], check=True)
        asked = subprocess.run([*tmux, "display-message", "-p", "#{pid}"], check=True, capture_output=True, text=True)
        return [int(asked.stdout)]
    print(f"\n$ dflash {TRAIN}   # in a terminal of its own")
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, shlex.split(command))
    os.set_blocking(terminal, False)
    return [child]


def newest_step() -> int:
    """The step at which the first rank is, from its heartbeat, as `dflash status` reads it."""
    from shared.beat import read_beat
    from shared.reporter import progress_path

    beat = read_beat(progress_path(Path(RUN), "train", 0))
    return int(beat.done) if beat is not None and beat.phase in ("step", "checkpoint", "drain", "done") else 0


def kill_everything(server: list[int]) -> str:
    """SIGKILL to all at once: the terminal first, as a cgroup that is killed has no order."""
    tree = [*server, *processes_of_the_run()]
    names = [f"{name_of(pid)} {pid}" for pid in tree]
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_of_the_run(), 10, "the end of all processes")
    return ", ".join(names)


def processes_of_the_run() -> list[int]:
    """Every process in whose command line the run's folder stands: viewer, supervisor, workers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            own = any(word == RUN or word.endswith(f"/{RUN}") for word in words)
            if own and (entry / "cwd").resolve() == Path.cwd() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return sorted(found)


def name_of(pid: int) -> str:
    """What a process is to the run."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        known = {"shared.worker": "worker", "manifests.supervisor": "supervisor", "tmux": "tmux server"}
        return next((name for text, name in known.items() if text in words), "dflash train")
    return "process"


def show(*arguments: str) -> int:
    """Run a command as a person would, its output as it comes."""
    print(f"\n$ dflash {shlex.join(arguments)}", flush=True)
    code = subprocess.run([*DFLASH, *arguments], stderr=subprocess.STDOUT, check=False).returncode
    if code:
        print(f"# exit code {code}")
    return code


def quietly(*arguments: str) -> None:
    """Run a command of the preparation."""
    print(f"$ dflash {arguments[0]} ...", flush=True)
    done = subprocess.run([*DFLASH, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\ndflash {arguments[0]} ended with {done.returncode}")


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {seconds:.0f} s; look into {Path.cwd()}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
