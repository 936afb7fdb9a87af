"""A thread that takes teacher outputs off the device, puts blocks together and commits them while the next batch runs.

Called by stage1_extract/worker.py. A block is published first (one rename), then the records of its documents are
appended, its shard record last.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from manifests.commit import Ledger
from manifests.records import DocumentRecord, ShardRecord, SkipRecord
from shared.errors import NonFinite
from shared.rows import PreparedRows
from shared.store import Arrays
from shared.store_layout import block_name, from_bf16
from shared.store_write import write_block
from stage1_extract.block_encoder import BlockEncoder, EncodedBatch, to_host
from stage1_extract.headroom import Headroom
from stage1_extract.teacher import TeacherOutput

# Batches waiting to leave the device: the device never waits, and memory stays bounded.
_WAITING = 2
# What a document's record repeats of its line in the prepared data.
_KEPT = ("doc_id", "source", "line", "n_tokens", "n_supervised", "split", "truncated")


@dataclass(slots=True)
class _Block:
    """One block being put together: arrays of each document that came off the device, and those of the whole block."""

    number: int
    started: float
    documents: dict[int, Arrays] = field(default_factory=dict)
    whole: Arrays = field(default_factory=dict)
    errors: list[Arrays] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


class BlockWriter:
    """Use as a context manager; an error of the thread is raised by the next call."""

    def __init__(
        self,
        store: Path,
        rank: int,
        rows: PreparedRows,
        encoder: BlockEncoder,
        headroom: Headroom,
        told: Callable[[int, int], None] = lambda committed, written: None,
    ) -> None:
        """`told` hears, from the writer's threads, how many blocks are committed and bytes written so far."""
        self.store, self.rank, self.rows, self.encoder, self.headroom = store, rank, rows, encoder, headroom
        self._told = told
        self._written = 0
        self.committed: dict[int, str] = {}
        """Blocks that are recorded as done, with their seals."""
        self._ledger = Ledger(store, f"extract-{rank}")
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="block-writer", daemon=True)
        self._block: _Block | None = None
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> BlockWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        self._queue.put(("stop", None))
        self._thread.join()
        if kind is None:
            self._raise()

    def begin(self, block: int) -> None:
        """The outputs that follow belong to this block."""
        self.encoder.begin()
        self._put("begin", block)

    def add(self, documents: Sequence[int], output: TeacherOutput) -> None:
        """One batch: its documents' row numbers, in the output's order. Waits when two batches are waiting already."""
        batch = self.encoder(output)
        event = None
        if batch.finite.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._put("add", (list(documents), batch, event))

    def end(self) -> None:
        """Commit the block."""
        self._put("end", None)

    def wait(self) -> None:
        """Return when everything given so far is committed. Raises what the thread met."""
        self._queue.join()
        self._raise()

    def _put(self, what: str, value: Any) -> None:
        self._raise()
        self._queue.put((what, value))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            what, value = self._queue.get()
            try:
                if what == "stop":
                    return
                if self._error is None:  # after an error only empty the queue, so that nobody waits for ever
                    self._handle(what, value)
            except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
                self._error = error
            finally:
                self._queue.task_done()

    def _handle(self, what: str, value: Any) -> None:
        if what == "begin":
            self._block = _Block(value, time.time())
        elif what == "add":
            self._take(*value)
        else:
            assert self._block is not None
            block, self._block = self._block, None
            self.headroom.patiently(f"block {block.number}", lambda: self._commit(block))

    def _take(self, documents: list[int], batch: EncodedBatch, event: Any) -> None:
        """Copy one batch to host memory on a stream of its own, and cut it into documents."""
        assert self._block is not None
        if event is None:
            host = to_host(batch)
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(batch.finite.device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(event)
                host = to_host(batch)
        start = 0
        for document, length in zip(documents, batch.lengths, strict=True):
            where = slice(start, start + length)
            start += length
            if host.zero[where].all(axis=0).any():
                taps = np.flatnonzero(host.zero[where].all(axis=0)).tolist()
                raise NonFinite(
                    f"document {document}: the features of taps {taps} are all zero; a kernel of this target does not "
                    "work here (seen with hybrid attention), and a drafter trained on zeros accepts nothing"
                )
            if not host.finite[where].all():
                self._block.skipped.append(document)
                continue
            ids, mask = self.rows.document(document)
            assert len(ids) == length, f"document {document} has {len(ids)} tokens, the features are of {length}"
            self._block.documents[document] = {"input_ids": ids, "loss_mask": mask} | {
                name: a[where] for name, a in host.per_token.items()
            }
            self._block.errors.append({name: error[where] for name, error in host.relative_error.items()})
            self._block.whole = host.per_block

    def _commit(self, block: _Block) -> None:
        """Publish the block and record it. After a full disk it is done again from the start: only records count."""
        self._skip(block.skipped)
        if not block.documents:
            raise NonFinite(
                f"every document of block {block.number} has NaN or infinite features; try --dtype bfloat16 or float32"
            )
        order = sorted(block.documents)
        parts = [block.documents[document] for document in order]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} | block.whole
        lengths = [len(part["input_ids"]) for part in parts]
        splits = self.rows.splits
        arrays["document_offsets"] = np.cumsum([0, *lengths], dtype=np.int64)
        arrays["document_index"] = np.asarray(order, dtype=np.int64)
        arrays["document_split"] = np.asarray([splits[document] == "heldout" for document in order], dtype=np.uint8)
        written = _publish(self.store, block.number, arrays, self._wrote)
        mass = np.exp(from_bf16(arrays["topk_logits"]) - arrays["logsumexp"][:, None]).sum(axis=1)
        self._ledger.append(*self._document_records(block.number, written["seal"], arrays, mass))
        self._ledger.append(
            ShardRecord(
                block=block.number,
                rank=self.rank,
                documents=written["documents"],
                tokens=written["tokens"],
                bytes=written["bytes"],
                seconds=time.time() - block.started,
                seal=written["seal"],
                detail={"files": written["files"], "skipped": len(block.skipped), "topk_mass": float(mass.mean())}
                | self.encoder.error_detail(block.errors),
            )
        )
        self.committed[block.number] = written["seal"]
        self._told(len(self.committed), self._written)

    def _wrote(self, size: int) -> None:
        # Two threads write a block's arrays: a sum that misses a piece still moves.
        self._written += size
        self._told(len(self.committed), self._written)

    def _document_records(
        self, block: int, seal: str, arrays: Arrays, mass: np.ndarray[Any, Any]
    ) -> list[DocumentRecord]:
        """One record per stored document; `mass` float32 [N] is what the top k hold of each token's probability."""
        offsets = arrays["document_offsets"]
        means = np.add.reduceat(mass, offsets[:-1]) / np.diff(offsets)
        lines = [self.rows.documents[index] for index in arrays["document_index"].tolist()]
        return [
            DocumentRecord(
                document_index=line["index"],
                **{name: line[name] for name in _KEPT},
                block=block,
                topk_mass=float(mean),
                token_sha=line["sha"][:16],
                seal=seal,
            )
            for line, mean in zip(lines, means, strict=True)
        ]

    def _skip(self, documents: Sequence[int]) -> None:
        lines = [self.rows.documents[document] for document in sorted(documents)]
        self._ledger.append(
            *(
                SkipRecord(
                    doc_id=line["doc_id"],
                    source=line["source"],
                    line=line["line"],
                    reason="nonfinite",
                    message="NaN or infinity in the target's features or logits",
                )
                for line in lines
            )
        )


def _publish(store: Path, block: int, arrays: Arrays, told: Callable[[int], None]) -> dict[str, Any]:
    """Write the block; one that was published by a worker that died before its record is made again."""
    final = store / block_name(block)
    if final.exists():
        shutil.rmtree(final)
    return write_block(store, block, arrays, told)
