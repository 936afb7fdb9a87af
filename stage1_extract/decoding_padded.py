"""Answers from targets with recurrent or sliding layers: left-padded batches that shrink as rows end.

Called by stage1_extract/decoding.py. Slower than its slot decoder, but right for every cache that transformers makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from shared.slot_cache import cache_argument
from shared.target import Target
from stage1_extract.decoding import LOOK_EVERY, Answer, Decoding, Request, rows_that_fit
from stage1_extract.sampling import pick, uniforms


def decode_padded(
    target: Target, requests: Sequence[Request], settings: Decoding, stop: Callable[[], bool]
) -> Iterator[list[Answer]]:
    """Answer all requests in batches of similar prompt length; gives what ended every few tokens, as `decode`."""
    ordered = sorted(requests, key=lambda request: -len(request.prompt))
    while ordered:
        capacity = len(ordered[0].prompt) + max(request.max_new_tokens for request in ordered)
        rows = rows_that_fit(target, capacity, settings.batch_size, len(ordered))
        batch, ordered = ordered[:rows], ordered[rows:]
        for answers in _decode_batch(target, batch, settings):
            yield answers
            if stop():
                return


@torch.inference_mode()
def _decode_batch(target: Target, batch: list[Request], settings: Decoding) -> Iterator[list[Answer]]:
    device, width, argument = target.device, max(len(request.prompt) for request in batch), cache_argument(target)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt) :] = torch.as_tensor(list(request.prompt))
        mask[row, width - len(request.prompt) :] = 1
    most = max(request.max_new_tokens for request in batch)
    uniform = torch.from_numpy(np.stack([uniforms(request.seed, most) for request in batch])).to(device)
    step_ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=target.text_config)
    living = list(range(len(batch)))
    written: list[list[int]] = [[] for _ in batch]
    for number in range(most):
        hidden = target.decoder(
            input_ids=step_ids, attention_mask=mask, position_ids=positions, use_cache=True, **{argument: cache}
        ).last_hidden_state
        token = pick(target.logits(hidden[:, -1]), settings.temperature, uniform[:, number])
        ended: list[Answer] = []
        stay: list[int] = []
        for place, (row, value) in enumerate(zip(living, token.tolist(), strict=True)):
            written[row].append(value)
            if value in settings.eos or len(written[row]) >= batch[row].max_new_tokens:
                ended.append(Answer(batch[row].key, written[row], value in settings.eos))
            else:
                stay.append(place)
        if len(stay) < len(living):
            living = [living[place] for place in stay]
            if not living:
                yield ended
                return
            keep = torch.tensor(stay, device=device)
            cache.reorder_cache(keep)
            token, mask, positions, uniform = _rows(keep, token, mask, positions, uniform)
        if ended or number % LOOK_EVERY == LOOK_EVERY - 1:
            yield ended
        step_ids = token[:, None]
        mask = torch.cat([mask, mask.new_ones((len(living), 1))], -1)
        positions = positions[:, -1:] + 1


def _rows(keep: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.index_select(0, keep) for tensor in tensors]
