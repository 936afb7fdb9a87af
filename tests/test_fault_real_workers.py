"""The fault matrix on real workers: `dflash train` on a toy store, `dflash extract` on the bundled target.

What is asked of toys must hold for torch, gloo and zarr too: the name of what happened, and nothing lost or repeated:
a training that was killed and went on has the same weights to the bit, an extraction the same store.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_run import command, config_of, environment
from toy_store import counting_texts, make_store

from manifests.commit import read
from manifests.demo import bundled
from manifests.evidence import collect
from manifests.verdict import Verdict, verdict
from shared.beat import BeatState, read_beat
from shared.kernel import process, session_members
from shared.phases import SCALE_VARIABLE
from shared.reporter import progress_path
from stage2_train.checkpoint_folder import folder_of

pytestmark = [pytest.mark.crash, pytest.mark.slow]

STEPS = 12
DFLASH = [sys.executable, "-m", "shared"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(24))


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted training."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(training(store, run), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)


def training(store: Path, run: Path, *more: str) -> list[str]:
    """A training of two ranks; `more` comes last."""
    return command(config_of(store, run), "--nproc=2", f"--steps={STEPS}", "--save-every=3", *more)


class Running:
    """A command of ours and what it started."""

    def __init__(self, line: list[str], folder: Path, role: str) -> None:
        self.folder, self.role = folder, role
        self.process = subprocess.Popen(
            line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def beat(self, rank: int) -> BeatState | None:
        return read_beat(progress_path(self.folder, self.role, rank))

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come: {self.story()}"
            time.sleep(0.01)

    def in_phase(self, phase: str, rank: int) -> None:
        """Wait until a rank is in a phase, or has been."""

        def there() -> bool:
            beat = self.beat(rank)
            return beat is not None and (beat.phase == phase or phase in beat.spent)

        self.until(there, f"phase {phase} of rank {rank}")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event["detail"] for event in collect(self.folder).events if event["event"] == name]

    @property
    def supervisor(self) -> int:
        return int(self.events("supervisor started")[-1]["pid"])

    def worker(self, rank: int) -> int:
        return int([event["pid"] for event in self.events("worker spawned") if event["rank"] == rank][-1])

    def judged(self) -> Verdict:
        return verdict(collect(self.folder))

    def ended(self, seconds: float = 300.0) -> int:
        code = self.process.wait(seconds)
        self.until(lambda: not self.left(), "the end of all processes", 60)
        return code

    def left(self) -> list[int]:
        started = [*self.events("worker spawned"), *self.events("supervisor started")]
        ours = [
            event["pid"]
            for event in started
            if (leader := process(event["pid"])) is None or leader.start_ticks == event["start_ticks"]
        ]
        return [pid for session in ours for pid, _ in session_members(session)]

    def story(self) -> str:
        said = [f"{event['event']}: {event['message']}" for event in collect(self.folder).events]
        logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("logs/*.log"))]
        return "\n".join([*said, *logs])

    def end_everything(self) -> None:
        with suppress(Exception):
            kill(self.left())
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def start() -> Iterator[Callable[[list[str], Path, str], Running]]:
    started: list[Running] = []

    def begin(line: list[str], folder: Path, role: str = "train") -> Running:
        started.append(Running(line, folder, role))
        return started[-1]

    yield begin
    for running in started:
        running.end_everything()


def require_same_weights(one: Path, two: Path) -> None:
    first, second = (load_file(folder_of(run, STEPS) / "drafter.safetensors") for run in (one, two))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("phase", ["load", "step", "checkpoint"])
def test_a_killed_rank_is_named_and_the_training_goes_on(
    store: Path, whole: Path, tmp_path: Path, start: Any, phase: str
) -> None:
    rank = random.Random(phase).randrange(2)
    running = start(training(store, tmp_path / "run", "--hang-limit-scale=0.5"), tmp_path / "run")
    running.in_phase(phase, rank)
    kill([running.worker(rank)])
    assert running.ended() == 0, running.story()
    first = running.events("verdict")[0]["verdict"]
    assert (first["code"], first["ranks"], first["confidence"]) == ("sig.kill.external", [rank], "proved")
    assert len(running.events("attempt started")) == 2
    assert running.judged().code == "done"
    require_same_weights(whole, tmp_path / "run")


def test_everything_killed_is_named_and_resumed_exactly(store: Path, whole: Path, tmp_path: Path, start: Any) -> None:
    run = tmp_path / "run"
    running = start(training(store, run), run)
    running.until(lambda: (beat := running.beat(0)) is not None and (beat.saved or 0) >= 3, "a checkpoint")
    kill([running.process.pid, running.supervisor, running.worker(0), running.worker(1)])
    running.until(lambda: not running.left(), "the end of all processes")
    found = running.judged()
    assert (found.code, found.exit_code) == ("tree.killed", 51), found
    said = subprocess.run([*DFLASH, "status", str(run)], capture_output=True, text=True, check=True).stdout
    assert "lost" in said
    assert "tree.killed" in said
    resumed = subprocess.run(
        [*DFLASH, "resume", str(run)], env=environment(), capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert running.judged().code == "done"
    require_same_weights(whole, run)


def test_sigterm_saves_and_exits_75(store: Path, whole: Path, tmp_path: Path, start: Any) -> None:
    run = tmp_path / "run"
    running = start(training(store, run), run)
    running.in_phase("step", 0)
    kill([running.supervisor], signal.SIGTERM)
    assert running.ended() == 75, running.story()
    found = running.judged()
    assert (found.code, found.exit_code) == ("sig.term.external", 75), found
    assert str(os.getpid()) in found.sentence
    again = start(training(store, run), run)
    assert again.ended() == 0, again.story()
    require_same_weights(whole, run)


def test_a_killed_supervisor_is_named_and_its_workers_save(
    store: Path, whole: Path, tmp_path: Path, start: Any
) -> None:
    run = tmp_path / "run"
    running = start(training(store, run), run)
    running.in_phase("step", 1)
    kill([running.supervisor])
    assert running.ended() not in (0, 137)
    found = running.judged()
    assert (found.code, found.exit_code) == ("sup.killed", 51), found
    again = start(training(store, run), run)
    assert again.ended() == 0, again.story()
    require_same_weights(whole, run)


def test_a_stopped_rank_is_named_and_goes_on(store: Path, whole: Path, tmp_path: Path, start: Any) -> None:
    run = tmp_path / "run"
    running = start(training(store, run), run)
    running.in_phase("step", 1)
    kill([running.worker(1)], signal.SIGSTOP)
    running.until(lambda: bool(running.events("hang")), "a name for the stopped process", 10)
    hang = running.events("hang")[0]
    assert (hang["code"], hang["rank"], hang["action"]) == ("hang.stopped", 1, "named")
    kill([running.worker(1)], signal.SIGCONT)
    assert running.ended() == 0, running.story()
    assert len(running.events("hang")) == 1
    require_same_weights(whole, run)


def test_data_that_is_not_finite_is_no_reason_to_try_again(tmp_path: Path, start: Any) -> None:
    store = make_store(tmp_path / "toy.zarr", counting_texts(24), corrupt=1)
    running = start(training(store, tmp_path / "run"), tmp_path / "run")
    assert running.ended() == 52, running.story()
    found = running.judged()
    assert (found.code, found.exit_code) == ("data.nonfinite", 52), found
    assert len(running.events("attempt started")) == 1


def extraction(folder: Path, name: str) -> list[str]:
    """The bundled target over 40 short conversations, two workers."""
    data = folder / "rows.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
    texts = [" ".join(words[i % 7 :]) for i in range(40)]
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": text}]}
        for i, text in enumerate(texts)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, prepared = str(bundled() / "target"), str(folder / "prepared")
    if not Path(prepared).exists():
        line = [*DFLASH, "prepare", str(data), "--target", target, "--out", prepared]
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    settings = "--num-taps 2 --topk 4 --shards 2 --device cpu --block-tokens 60 --batch-tokens 120"
    return [*DFLASH, "extract", "--target", target, "--data", prepared, "--out", str(folder / name), *settings.split()]


def shard_seals(store: Path) -> dict[int, Any]:
    return {record["block"]: record["seal"] for record in read(store, "shards") if record["state"] == "done"}


def test_a_killed_extraction_worker_is_started_again_alone(tmp_path: Path, start: Any) -> None:
    done = subprocess.run(
        extraction(tmp_path, "whole.zarr"), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    store = tmp_path / "killed.zarr"
    running = start(extraction(tmp_path, store.name), store, "extract")
    running.until(lambda: len(shard_seals(store)) >= 2, "two blocks")
    other = running.worker(1)
    kill([running.worker(0)])
    assert running.ended() == 0, running.story()
    first = running.events("verdict")[0]["verdict"]
    assert (first["code"], first["ranks"]) == ("sig.kill.external", [0])
    assert running.worker(1) == other
    assert shard_seals(store) == shard_seals(tmp_path / "whole.zarr")


def test_an_extraction_killed_whole_is_named_and_resumed(tmp_path: Path, start: Any) -> None:
    store = tmp_path / "x.zarr"
    running = start(extraction(tmp_path, store.name), store, "extract")
    running.until(lambda: len(shard_seals(store)) >= 2, "two blocks")
    kill([running.process.pid, running.supervisor, running.worker(0), running.worker(1)])
    running.until(lambda: not running.left(), "the end of all processes")
    found = running.judged()
    assert (found.code, found.exit_code) == ("tree.killed", 51), found
    done = subprocess.run(
        [*DFLASH, "resume", str(store)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert running.judged().code == "done"
