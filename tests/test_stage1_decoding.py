"""Batched answers are the answers of plain decoding one by one, whatever the batch, the refills and the family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_target import save_target

from shared.target import Target, load_target
from stage1_extract.decoding import LOOK_EVERY, Decoding, Request, decode
from stage1_extract.sampling import pick, uniforms
from stage1_extract.slot_attention import is_attention_only

# Many end tokens, so that a random model meets one now and then.
EOS = tuple(range(8, 320, 9))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        kind: save_target(root / kind, kind, spread=0.4) for kind in ("llama", "qwen3", "qwen3_5", "gpt_oss", "gemma3")
    }


def plain(target: Target, prompt: Sequence[int], limit: int) -> list[int]:
    """Greedy decoding the slow way: the whole text again for every token, no cache."""
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) - len(prompt) < limit:
            ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in EOS:
                break
    return ids[len(prompt) :]


def requests(count: int, limit: int = 20, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(i, rng.integers(8, 300, rng.integers(3, 40)).tolist(), int(rng.integers(1, limit + 1)), 1000 + i)
        for i in range(count)
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "gpt_oss", "gemma3"])
def test_greedy_equals_plain_decoding(folders: dict[str, Path], kind: str, batch_size: int) -> None:
    target = load_target(str(folders[kind]), device="cpu", dtype="float32")
    assert is_attention_only(target) == (kind in ("llama", "qwen3"))
    asked = requests(8)
    found = {a.key: a for lot in decode(target, asked, Decoding(0.0, batch_size, EOS), lambda: False) for a in lot}
    assert sorted(found) == list(range(8))
    for request in asked:
        answer = found[request.key]
        assert answer.ids == plain(target, request.prompt, request.max_new_tokens)
        assert answer.finished == (answer.ids[-1] in EOS)


def test_the_cases_above_hold_ended_and_cut_answers(folders: dict[str, Path]) -> None:
    target = load_target(str(folders["llama"]), device="cpu", dtype="float32")
    answers = [plain(target, request.prompt, request.max_new_tokens) for request in requests(15)]
    ended = sum(answer[-1] in EOS for answer in answers)
    assert 0 < ended < 15


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_sampled_answer_depends_on_its_seed_alone(folders: dict[str, Path], kind: str) -> None:
    target = load_target(str(folders[kind]), device="cpu", dtype="float32")
    asked = requests(9)
    runs = []
    for order, batch in ((asked, 9), (asked[::-1], 2), (asked[4:5], 1)):
        runs.append(
            {a.key: a.ids for lot in decode(target, order, Decoding(1.0, batch, EOS), lambda: False) for a in lot}
        )
    assert runs[0] == runs[1]
    assert runs[2][4] == runs[0][4]
    other = [Request(r.key, r.prompt, r.max_new_tokens, r.seed + 1) for r in asked]
    assert {a.key: a.ids for lot in decode(target, other, Decoding(1.0, 9, EOS), lambda: False) for a in lot} != runs[0]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20000
    uniform = torch.from_numpy(uniforms(3, n))
    for temperature in (0.5, 1.0, 2.0):
        counts = torch.bincount(pick(logits.expand(n, 4), temperature, uniform), minlength=4) / n
        torch.testing.assert_close(counts, torch.softmax(logits / temperature, 0), atol=0.015, rtol=0.0)
    assert pick(logits[None], 0.0, uniform[:1]).tolist() == [2]
    # The last number below one must never fall off the end of the distribution.
    assert pick(logits[None], 1.0, torch.tensor([1.0 - 2**-24])).item() in (0, 1, 2, 3)


def test_uniforms_differ_between_seeds_and_repeat_for_one() -> None:
    assert np.array_equal(uniforms(5, 10), uniforms(5, 20)[:10])
    assert not np.array_equal(uniforms(5, 10), uniforms(6, 10))


def test_stopping_gives_what_is_finished_and_no_half_answers(folders: dict[str, Path]) -> None:
    target = load_target(str(folders["llama"]), device="cpu", dtype="float32")
    seen: list[int] = []
    for lot in decode(target, requests(30), Decoding(0.0, 2, EOS), lambda: True):
        seen += [answer.key for answer in lot]
    assert len(seen) < 30


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3"])
def test_it_is_asked_to_stop_every_few_tokens_though_no_answer_ends(folders: dict[str, Path], kind: str) -> None:
    """Every look is a sign of life: answers of thousands of tokens had none until the first of a batch ended."""
    target = load_target(str(folders[kind]), device="cpu", dtype="float32")
    looks: list[int] = []
    asked = [Request(i, [5 + i, 9, 30], 5 * LOOK_EVERY, 0) for i in range(3)]
    lots = list(decode(target, asked, Decoding(0.0, 3, ()), lambda: bool(looks.append(0))))
    assert len(looks) >= 5
    assert [len(answer.ids) for lot in lots for answer in lot] == [5 * LOOK_EVERY] * 3


def test_nothing_asked_gives_nothing(folders: dict[str, Path]) -> None:
    target = load_target(str(folders["llama"]), device="cpu", dtype="float32")
    assert list(decode(target, [], Decoding(0.0, None, EOS), lambda: False)) == []
