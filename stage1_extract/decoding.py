"""Many answers at once: rows of different lengths decode together, and a finished row's place goes to the next prompt.

Called by stage1_extract/regenerate.py. `SlotDecoder` serves attention-only targets; keys and values lie at
[row, head, position], so rows need no padding between prompt and answer. Other targets (recurrent or sliding layers)
go through stage1_extract/decoding_padded.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from shared.slot_cache import SlotLayer, Slots, cache_argument
from shared.target import Target
from stage1_extract.sampling import pick, uniforms
from stage1_extract.slot_attention import bytes_per_position, grouped_attention, is_attention_only

# Steps between two looks at which rows have ended: each look waits for the device, and a row ends at most this late.
LOOK_EVERY = 8
# The visible part of the cache grows in steps of this, so that few different shapes occur.
_BUCKET = 64
_PREFILL_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: the caller's key, token ids, the most tokens to write, and the row's own sampling seed."""

    key: int
    prompt: Sequence[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids as written, the end token included; not `finished` when the limit came first."""

    key: int
    ids: list[int]
    finished: bool


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings: temperature 0 is greedy; `batch_size` None is what memory allows; `eos` ends an answer."""

    temperature: float
    batch_size: int | None
    eos: tuple[int, ...]


def rows_that_fit(target: Target, capacity: int, asked: int | None, requests: int) -> int:
    """How many rows decode together: as asked, or half of the free device memory, at most 4,096 (32 on CPU)."""
    if asked is None:
        asked = 32
        if target.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(target.device)
            logits = 4 * 3 * target.lm_head_weight.shape[0]
            asked = int(max(1, min(4096, free // 2 // (capacity * bytes_per_position(target) + logits))))
    return max(1, min(asked, requests))


class SlotDecoder:
    """R rows with their state on the device; a row is free, or decoding one request."""

    def __init__(self, target: Target, settings: Decoding, rows: int, capacity: int, max_new: int) -> None:
        self.target, self.settings, self.rows, self.capacity = target, settings, rows, capacity
        device = target.device
        self._cache: Cache | None = None
        self._slots = Slots()
        self._argument = cache_argument(target)
        self._eos = torch.tensor(settings.eos, device=device)
        self._positions = torch.arange(capacity, device=device)
        self._token = torch.zeros(rows, dtype=torch.long, device=device)
        self._length = torch.zeros(rows, dtype=torch.long, device=device)
        self._count = torch.zeros(rows, dtype=torch.long, device=device)
        self._limit = torch.ones(rows, dtype=torch.long, device=device)
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        self._written = torch.zeros((rows, max_new), dtype=torch.long, device=device)
        self._uniform = torch.zeros((rows, max_new), device=device)
        self._reach = np.zeros(rows, dtype=np.int64)  # host's upper bound of each row's length
        self.requests: list[Request | None] = [None] * rows

    @property
    def free(self) -> list[int]:
        """Rows without a request."""
        return [row for row, request in enumerate(self.requests) if request is None]

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> None:
        """Put requests into free rows: run their prompts, right-padded, and take their first tokens."""
        rows = self.free[: len(requests)]
        lengths = [len(request.prompt) for request in requests]
        ids = torch.zeros((len(requests), max(lengths)), dtype=torch.long)
        for i, request in enumerate(requests):
            ids[i, : lengths[i]] = torch.as_tensor(list(request.prompt))
        device = self.target.device
        cache = DynamicCache(config=self.target.text_config)
        out = self.target.decoder(input_ids=ids.to(device), use_cache=True, **{self._argument: cache})
        self._keep(cache, rows)
        where = torch.tensor(rows, device=device)
        length = torch.tensor(lengths, device=device)
        logits = self.target.logits(out.last_hidden_state[torch.arange(len(rows), device=device), length - 1])
        if self.settings.temperature > 0.0:
            width = self._uniform.shape[1]
            self._uniform[where] = torch.from_numpy(
                np.stack([uniforms(request.seed, width) for request in requests])
            ).to(device)
        self._length[where], self._count[where], self._done[where] = length, 0, False
        self._limit[where] = torch.tensor([request.max_new_tokens for request in requests], device=device)
        for row, request, reach in zip(rows, requests, lengths, strict=True):
            self.requests[row], self._reach[row] = request, reach
        self._take(where, pick(logits, self.settings.temperature, self._uniform[where, 0]))

    def _keep(self, cache: Cache, rows: Sequence[int]) -> None:
        """Copy a prefill's keys and values into these rows of the slot cache, made at the first call."""
        if self._cache is None:
            layers = []
            for layer in cache.layers:
                shape = (self.rows, layer.keys.shape[1], self.capacity, layer.keys.shape[3])
                wide = (*shape[:3], layer.values.shape[3])
                # zeros, not empty: a masked position still meets a probability of 0, and 0 x NaN is NaN.
                layers.append(SlotLayer(self._slots, layer.keys.new_zeros(shape), layer.values.new_zeros(wide)))
            self._cache = Cache(layers=layers)
        index = torch.tensor(rows, device=self.target.device)
        for own, layer in zip(self._cache.layers, cache.layers, strict=True):
            own.keys[index, :, : layer.keys.shape[2]] = layer.keys
            own.values[index, :, : layer.values.shape[2]] = layer.values

    def _take(self, rows: Tensor, token: Tensor) -> None:
        """Record a token for these rows [n]; rows that are done keep what they have."""
        done = self._done[rows]
        count = self._count[rows]
        column = count.clamp_max(self._written.shape[1] - 1)
        self._written[rows, column] = torch.where(done, self._written[rows, column], token)
        count = count + (~done).long()
        self._count[rows] = count
        self._token[rows] = token
        self._done[rows] = done | torch.isin(token, self._eos) | (count >= self._limit[rows])

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row that is not done."""
        visible = min(self.capacity, -(-int(self._reach.max() + 1) // _BUCKET) * _BUCKET)
        self._slots.visible, self._slots.index = visible, self._length[:, None, None, None]
        logits = self.target.logits(self._forward(self._positions[:visible] <= self._length[:, None]))
        # A done row must not move on: its place in the cache ends where its request's does.
        self._length += (~self._done).long()
        self._reach = np.minimum(self._reach + 1, self.capacity - 1)
        uniform = self._uniform.gather(1, self._count.clamp_max(self._uniform.shape[1] - 1)[:, None])[:, 0]
        self._take(torch.arange(self.rows, device=self.target.device), pick(logits, self.settings.temperature, uniform))

    def _forward(self, seen: Tensor) -> Tensor:
        """Hidden states [R, H] of every row's newest token; `seen` bool [R, S] are the positions it may look at."""
        assert self._cache is not None
        inputs = {"input_ids": self._token[:, None], "position_ids": self._length[:, None], self._argument: self._cache}
        mask = seen[:, None, None]
        if str(self.target.decoder.config._attn_implementation) == "sdpa":
            with grouped_attention(self.target):
                out = self.target.decoder(**inputs, attention_mask=mask, use_cache=True)
        else:
            # Eager attention adds its mask to the scores; a boolean one would hide nothing.
            added = torch.zeros(mask.shape, dtype=self.target.dtype, device=mask.device)
            added.masked_fill_(~mask, torch.finfo(self.target.dtype).min)
            out = self.target.decoder(**inputs, attention_mask=added, use_cache=True)
        return cast(Tensor, out.last_hidden_state[:, -1])

    def collect(self) -> list[Answer]:
        """Answers of rows that are done; their rows become free."""
        done = self._done.cpu().numpy()
        ready = [row for row, request in enumerate(self.requests) if request is not None and done[row]]
        if not ready:
            return []
        written, counts = self._written[ready].cpu().numpy(), self._count[ready].cpu().numpy()
        answers = []
        for row, ids, count in zip(ready, written, counts, strict=True):
            request = self.requests[row]
            assert request is not None
            kept = [int(token) for token in ids[:count]]
            answers.append(Answer(request.key, kept, kept[-1] in self.settings.eos))
            self.requests[row] = None
            self._reach[row] = 0
        self._length[torch.tensor(ready, device=self.target.device)] = 0
        return answers


def decode(
    target: Target, requests: Sequence[Request], settings: Decoding, stop: Callable[[], bool]
) -> Iterator[list[Answer]]:
    """Answer all requests, longest prompts first; gives what ended every few tokens, which may be nothing.

    `stop()` is asked after each prefill and each lot, so that no silence lasts longer than one of them; once it is true
    the answers that ended are all there is.
    """
    if not requests:
        return
    if not is_attention_only(target):
        from stage1_extract.decoding_padded import decode_padded

        yield from decode_padded(target, requests, settings, stop)
        return
    waiting = deque(sorted(requests, key=lambda request: -len(request.prompt)))
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    capacity = -(-capacity // _BUCKET) * _BUCKET
    rows = rows_that_fit(target, capacity, settings.batch_size, len(requests))
    decoder = SlotDecoder(target, settings, rows, capacity, max(request.max_new_tokens for request in requests))
    while True:
        free = len(decoder.free)
        # Refill in lots: prompts run more efficiently together, and half a second of a few idle rows costs less.
        while waiting and free and (free >= max(1, rows // 16) or free == rows):
            lot = _lot(waiting, free)
            decoder.admit(lot)
            free -= len(lot)
            if stop():
                return
        if free == rows and not waiting:
            return
        for _ in range(LOOK_EVERY):
            decoder.step()
        yield decoder.collect()
        if stop():
            return


def _lot(waiting: deque[Request], free: int) -> list[Request]:
    """The next prompts that fit into one prefill."""
    lot = [waiting.popleft()]
    while waiting and len(lot) < free and (len(lot) + 1) * len(lot[0].prompt) <= _PREFILL_TOKENS:
        lot.append(waiting.popleft())
    return lot
