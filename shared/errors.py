"""Every fault a user can cause or must act on, one class and one exit code each.

    DflashError
    ├── DataError            10-17  what was read
    ├── TargetError          20-26  the model to be drafted for
    ├── StoreError           30-35  the teacher store, where it lies
    ├── RunError             40-47  folders, disks, configuration
    ├── ProcessError         50-58  workers and numbers
    ├── CheckpointMismatch   60, ExportMismatch 61, NotLossless 62
    └── Interrupted          75     stopped on request, or without its supervisor; the same command goes on

A message says what is wrong, the two values, where, and what to do. Users see that one line; a
traceback means a bug of ours (exit 1). Click's own usage errors exit 2.
"""

from __future__ import annotations


class DflashError(Exception):
    """A fault with a sentence for the user and a stable exit code."""

    exit_code = 1


class DataError(DflashError):
    """Something about the input rows."""


class DataMissing(DataError):
    """A data file does not exist or cannot be opened."""

    exit_code = 10


class DataEmpty(DataError):
    """A data file holds no row."""

    exit_code = 11


class DataSyntax(DataError):
    """A line is not JSON."""

    exit_code = 12


class NoAssistantTurn(DataError):
    """A conversation has nothing to learn from."""

    exit_code = 13


class AllMasked(DataError):
    """A row has no supervised token."""

    exit_code = 14


class RowTooShort(DataError):
    """A row has fewer tokens than one block."""

    exit_code = 15


class BadRow(DataError):
    """A row of another shape than documented: keys, roles, types, ids."""

    exit_code = 16


class NothingLeft(DataError):
    """Every row was skipped."""

    exit_code = 17


class TargetError(DflashError):
    """Something about the target model."""


class TargetNotFound(TargetError):
    """Neither a folder with a model, nor a folder with a GGUF file, nor a reachable Hub id."""

    exit_code = 20


class NoChatTemplate(TargetError):
    """The tokenizer cannot render a conversation."""

    exit_code = 21


class LayerIdsOutOfRange(TargetError):
    """A tapped layer does not exist, repeats, or is not capturable."""

    exit_code = 22


class MaskTokenMissing(TargetError):
    """No mask token was given and the vocabulary has no spare row."""

    exit_code = 23


class MaskTokenOutOfRange(TargetError):
    """The mask token has no row in the target's embedding."""

    exit_code = 24


class MaskTokenInUse(TargetError):
    """The mask token occurs in the data or has another meaning."""

    exit_code = 25


class TargetUnsupported(TargetError):
    """An architecture or a version we cannot run correctly."""

    exit_code = 26


class StoreError(DflashError):
    """Something about a store or a prepared folder."""


class StoreMismatch(StoreError):
    """What is on disk was made from something else than what is asked."""

    exit_code = 30


class StoreMissing(StoreError):
    """There is no store at this path."""

    exit_code = 31


class StoreDamaged(StoreError):
    """A stored object is missing, cut, or fails its checksum."""

    exit_code = 32


class StoreIncomplete(StoreError):
    """Some planned blocks are not there yet."""

    exit_code = 33


class StorageRefused(StoreError):
    """Object storage did not let us in, did not answer, or answered with an error of its own."""

    exit_code = 34


class StoresDiffer(StoreError):
    """Two stores that were compared are not the same; what differs was printed."""

    exit_code = 35


class RunError(DflashError):
    """Something about the run folder or its configuration."""


class PathNotWritable(RunError):
    """An output path cannot be created or written."""

    exit_code = 40


class DiskFull(RunError):
    """The disk has no room for the next write; `needed_bytes` says how much would do, where that is known."""

    exit_code = 41
    needed_bytes: int | None = None


class TooManyShards(RunError):
    """More shards than rows."""

    exit_code = 42


class ConfigRefused(RunError):
    """Settings that contradict each other or name an unknown key."""

    exit_code = 43


class RunBusy(RunError):
    """Another living process owns this folder."""

    exit_code = 44


class RunNotRunning(RunError):
    """Asked to stop a run where nothing runs."""

    exit_code = 45


class MachineUnfit(RunError):
    """`dflash doctor` found something on this machine that training cannot do without."""

    exit_code = 46


class FolderLost(RunError):
    """The run's folder was deleted, moved or replaced while it ran; nothing of the run goes on."""

    exit_code = 47


class ProcessError(DflashError):
    """Something about the workers of a run."""


class WorkerFailed(ProcessError):
    """A worker ended with a bug; its log is named."""

    exit_code = 50


class WorkerKilled(ProcessError):
    """A signal ended a worker or the whole run: a crash in native code, or a kill from outside."""

    exit_code = 51


class NonFinite(ProcessError):
    """A loss, gradient or feature was not a finite number."""

    exit_code = 52


class CompileContract(ProcessError):
    """A region compiled more often than declared, or ran without its kernel."""

    exit_code = 53


class WorkerHung(ProcessError):
    """A worker made no progress for longer than its phase allows; stacks of all were saved."""

    exit_code = 54


class OutOfMemory(ProcessError):
    """The kernel's OOM killer ended a worker or the whole run."""

    exit_code = 55


class GpuFault(ProcessError):
    """A GPU ran out of memory, failed a kernel, or is gone."""

    exit_code = 56


class CommunicationFailed(ProcessError):
    """The ranks did not meet in the same collective."""

    exit_code = 57


class NoProgress(ProcessError):
    """The same failure came again and again without anything new saved: starting it once more would not help."""

    exit_code = 58


class CheckpointMismatch(DflashError):
    """A checkpoint belongs to another configuration."""

    exit_code = 60


class ExportMismatch(DflashError):
    """What was exported does not reload to the same drafter."""

    exit_code = 61


class NotLossless(DflashError):
    """Speculative decoding produced another text than the target alone."""

    exit_code = 62


class Interrupted(DflashError):
    """Stopped on request after saving; the same command continues."""

    exit_code = 75


class SupervisorGone(Interrupted):
    """A worker saved and left because its supervisor was killed: nobody would have seen how it ends."""


def error_classes() -> dict[str, type[DflashError]]:
    """All concrete error classes by name, so that a worker's fault keeps its class in the parent."""
    found: dict[str, type[DflashError]] = {}
    todo: list[type[DflashError]] = [DflashError]
    while todo:
        current = todo.pop()
        found[current.__name__] = current
        todo.extend(current.__subclasses__())
    return found
