"""Trials of `dflash extract` that die: what to run, when to kill, and what must hold after the same command ran again.

Used by tests/test_stage1_kills.py, test_stage1_power_loss.py and test_stage1_disk_full.py; the processes are
tests/fault_server.py's.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fault_calls import WRITES, Event, Kill, Whom, read_log
from fault_client import server

from manifests.query import ask
from shared.errors import WorkerKilled

# How a command ends that was killed itself, or whose supervisor or worker was.
KILLED = (-signal.SIGKILL, WorkerKilled.exit_code)


@dataclass
class Outcome:
    """How one run of the command ended."""

    code: int
    output: str
    events: list[Event]

    @property
    def landed(self) -> bool:
        """Whether a planned kill was met."""
        return any(event.kind.startswith("killed") for event in self.events)


@dataclass
class Trial:
    """One store, on which the command runs as often as it takes."""

    folder: Path
    name: str = "x.zarr"
    """The store's path below the watched folder."""
    runs: int = 0
    story: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """What lies below is watched; the path that the command is given."""
        return self.folder / "disk"

    @property
    def disk(self) -> Path:
        """The same folder as seen from here."""
        return server().view / self.place.relative_to("/")

    @property
    def store(self) -> Path:
        """The store under trial."""
        return self.disk / self.name

    def extract(
        self, *more: object, timer: dict[str, Any] | None = None, linger: bool = False, **settings: Any
    ) -> Outcome:
        """Run the command once. `timer`, `linger`: see fault_server.py; settings: see `request`."""
        done = server().ask("run", **self.request(*more, **settings), timer=timer, linger=linger)
        return self.outcome(done["code"])

    def start(self, *more: object, **settings: Any) -> int:
        """Begin the command; `finish` waits for it."""
        return int(server().ask("start", **self.request(*more, **settings))["pid"])

    def finish(self, pid: int) -> Outcome:
        """Wait for a command that was started."""
        return self.outcome(server().ask("finish", pid=pid)["code"])

    def request(
        self,
        *more: object,
        shards: int = 1,
        kill: Kill | None = None,
        contents: bool = False,
        workers_end_s: float = 60.0,
    ) -> dict[str, Any]:
        """What to ask of the server for one run of the command."""
        self.disk.mkdir(parents=True, exist_ok=True)
        self.runs += 1
        self.story.append(f"{shards} shards, {kill or ''} {' '.join(map(str, more))}")
        return {
            "arguments": [*command(self.place / self.name), "--shards", str(shards), *map(str, more)],
            "folder": str(self.place),
            "output": str(self.output),
            "log": str(self.log),
            "kill": asdict(kill) if kill else None,
            "contents": contents,
            "workers_end_s": workers_end_s,
        }

    @property
    def output(self) -> Path:
        """What the latest run says."""
        return self.folder / f"output-{self.runs}.txt"

    @property
    def log(self) -> Path:
        """The calls of the latest run."""
        return self.folder / f"calls-{self.runs}.log"

    def outcome(self, code: int) -> Outcome:
        """How the latest run ended."""
        self.story.append(f"  exit {code}")
        return Outcome(code, self.output.read_text(), list(read_log(self.log)))

    def wake(self) -> None:
        """Let a worker go on that sleeps since its command was killed."""
        (self.folder / "wake").touch()

    def text(self) -> str:
        """Everything a person needs to see what happened."""
        outputs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("output-*.txt"))]
        logs = [path.read_text()[-2000:] for path in sorted(self.store.glob("logs/*.log"))]
        return "\n".join([*self.story, *outputs, *logs])


def command(store: Path) -> list[str]:
    """The words of the command without --shards."""
    root = server().root
    # A kill ends the run, a full disk too: what one command leaves is what the next one finds.
    settings = "--target-layer-ids 0,1 --topk 4 --block-tokens 150 --batch-tokens 200 --device cpu"
    settings += " --restarts 0 --on-disk-full stop"
    return [
        "extract",
        "--target",
        str(root / "target"),
        "--data",
        str(root / "rows"),
        "--out",
        str(store),
        *settings.split(),
    ]


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: its files, its calls, what a query answers, and how long a run took."""

    files: dict[str, bytes]
    outcome: Outcome
    counts: dict[str, Any]
    seconds: float

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len({path.split("/")[1] for path in self.files if re.match(r"blocks/[0-9]{6}/", path)})


@cache
def reference() -> Reference:
    """Made once with two workers, with the log of what each fsync made durable."""
    trial = Trial(server().root / "reference")
    started = time.monotonic()
    outcome = trial.extract(shards=2, contents=True)
    seconds = time.monotonic() - started
    assert outcome.code == 0, trial.text()
    return Reference(arrays_and_target(trial.store), outcome, counts(trial.store), seconds)


def arrays_and_target(store: Path) -> dict[str, bytes]:
    """Every file below blocks/ and target/, hidden ones too; the store's own random number is taken out of the group's.

    No block holds that number: `require_whole` compares all their bytes.
    """
    found = [path for part in ("blocks", "target") for path in (store / part).rglob("*") if path.is_file()]
    files = {str(path.relative_to(store)): path.read_bytes() for path in found}
    if "blocks/zarr.json" in files:
        files["blocks/zarr.json"] = re.sub(rb'(?<="store_uuid": ")[0-9a-f]+', b"*", files["blocks/zarr.json"])
    return files


def counts(store: Path) -> dict[str, Any]:
    """What `dflash query` answers about the store."""
    answer = ask([store], QUERY)
    names, rows = answer.names, answer.rows
    return dict(zip(names, rows[0], strict=True))


QUERY = """
SELECT count(*) AS blocks,
       sum(documents) AS documents,
       sum(tokens) AS tokens,
       sum(bytes) AS bytes,
       (SELECT count(*) FROM stored_documents) AS stored_documents,
       (SELECT count(DISTINCT document_index) FROM stored_documents) AS distinct_documents,
       (SELECT sum(n_tokens) FROM stored_documents) AS stored_tokens,
       (SELECT sum(rows) FROM skip_reasons) AS skipped
FROM stored_blocks
"""


def require_whole(trial: Trial) -> None:
    """What must hold once the command ended well, whatever happened before."""
    expected = reference()
    found = arrays_and_target(trial.store)
    assert sorted(found) == sorted(expected.files), trial.text()
    assert [path for path in found if found[path] != expected.files[path]] == [], trial.text()
    assert counts(trial.store) == expected.counts, trial.text()
    left = [str(path) for path in trial.disk.rglob("*.partial")]
    assert left == [], f"{left}\n{trial.text()}"


def sites(events: Sequence[Event]) -> dict[str, list[tuple[str, int]]]:
    """Calls of a run that a kill can be planned at: {class: [(label, how often one process made it)]}.

    A class is a label with its numbers taken out, so that a drawing over classes meets rare calls as often as common.
    """
    made: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind != "gone":
            # Opening a file that is new is logged as its creation; the call is the same.
            made[event.role, re.sub("^create ", "open ", event.label)] += 1
    most: dict[str, int] = defaultdict(int)
    for (_, label), count in made.items():
        most[label] = max(most[label], count)
    classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for label, count in sorted(most.items()):
        classes[re.sub(r"[0-9]+", "#", label)].append((label, count))
    return dict(classes)


def draw_kill(rng: random.Random, events: Sequence[Event], whom: Whom) -> Kill:
    """A kill before, in or after a call, drawn over the classes of calls."""
    classes = sites(events)
    chosen = rng.choice(sorted(classes))
    label, count = rng.choice(classes[chosen])
    when = rng.choice(["before", "after", *(["middle"] if label.split()[0] in WRITES else [])])
    return Kill(label=label, occurrence=occurrence(rng, label, count), when=when, whom=whom)


def occurrence(rng: random.Random, label: str, count: int) -> int:
    """Which of the calls with this label; how often progress and samples are written is up to the clock."""
    return 1 if "/progress/" in label or "/supervision/" in label else rng.randint(1, count)
