"""The acceptance estimate is decoding: of a tiny target's own text, and of held-out text drafted block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoding import PROMPTS, Drafter, fitted, slow_drafts, slow_greedy, slow_speculative, tiny_target
from toy_run import ALONE, command, config_of, run_command, run_here
from toy_store import MASK, Text, counting_texts, make_store

from shared.errors import NonFinite
from shared.store_layout import from_bf16
from stage2_train.acceptance import acceptance_length
from stage2_train.anchors import eligible_anchors, run_ends
from stage2_train.estimate import estimate, passes, walk
from stage2_train.packing import pack


@pytest.mark.parametrize("shift", [False, True])
def test_the_walk_over_a_targets_own_text_is_its_decoding(shift: bool) -> None:
    """Teacher-forced blocks at every position of the greedy text give the very cycles that decoding makes."""
    target, (exact, _) = tiny_target(), fitted("qwen3", shift=shift)
    drafter = Drafter(exact.config)
    drafter.load_state_dict(exact.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # right in some places, wrong in others
        for parameter in drafter.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    lengths = set()
    for prompt in PROMPTS:
        text = slow_greedy(target, prompt, 24)
        document, mask = [*prompt, *text], np.asarray([0] * len(prompt) + [1] * len(text))
        anchors = eligible_anchors(mask)
        remaining = run_ends(mask, anchors) - anchors - 1
        right = []
        for anchor, left in zip(anchors.tolist(), remaining.tolist(), strict=True):
            drafts = slow_drafts(target, drafter, document[:anchor], document[anchor])[:left]
            agree = [draft == word for draft, word in zip(drafts, document[anchor + 1 :], strict=False)]
            right.append(agree.index(False) if False in agree else len(agree))
        said, cycles = slow_speculative(target, drafter, prompt, 24)
        assert said == text
        found = walk(anchors, np.asarray(right), remaining)
        assert [cycle.kept for cycle in found] == [cycle.kept for cycle in cycles]
        lengths |= {cycle.kept for cycle in found}
    assert len(lengths) > 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_walk_covers_an_answer_once(right: list[int]) -> None:
    """From the first anchor to the end of the answer, each cycle beginning where the last one ended."""
    count = len(right)
    remaining = np.arange(count, 0, -1)
    at, want = 0, []
    while at < count:
        want.append(min(min(right[at], count - at) + 1, count - at))
        at += want[-1]
    assert sum(want) == count
    found = walk(np.arange(5, 5 + count), np.minimum(right, remaining), remaining)
    assert [cycle.kept for cycle in found] == want


def test_a_walk_goes_on_at_the_next_answer() -> None:
    anchors, remaining = np.asarray([2, 3, 9, 10, 11]), np.asarray([2, 1, 3, 2, 1])
    cycles = walk(anchors, np.asarray([2, 0, 0, 1, 1]), remaining)
    assert [(cycle.accepted, cycle.kept) for cycle in cycles] == [(2, 2), (0, 1), (1, 2)]


def slow_estimate(parts: Any, texts: list[Text]) -> float:
    """Decode every held-out document on its own text: draft, compare, move on; nothing is batched or packed."""
    drafter, engine, store = parts.drafter, parts.engine, parts.heldout.store
    size, first = drafter.config.block_size, 0 if drafter.config.shift_labels else 1
    lengths: list[int] = []
    for ref in parts.heldout.documents:
        ids = texts[ref.index].input_ids
        mask = texts[ref.index].loss_mask
        bits = store.read_document(ref, ("hidden_states",))["hidden_states"]
        features = torch.from_numpy(from_bf16(bits)).flatten(1)[None]
        at, end = mask.index(1), len(ids)
        while at < end - 1:
            cache = drafter.new_cache(1, max(at, 1))
            if at:
                drafter.extend(cache, features[:, :at])
            block = torch.tensor([[ids[at]] + [MASK] * (size - 1)])
            states = drafter.draft(cache, engine.embed_tokens[block], at + torch.arange(size)[None])
            drafts = (states[0, first:] @ engine.head.weight.t()).argmax(-1).tolist()
            gained = 1
            while gained <= len(drafts) and at + gained < end and drafts[gained - 1] == ids[at + gained]:
                gained += 1
            lengths.append(min(gained, end - 1 - at))
            at += lengths[-1]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    "changes",
    [{}, {"shift_labels": True}, {"slot_0": True}, {"labels": "teacher", "loss": "ce"}, {"loss": "kl"}],
    ids=str,
)
def test_the_estimate_is_decoding_played_back_on_held_out_text(tmp_path: Path, changes: dict[str, Any]) -> None:
    texts = counting_texts(24)
    store = make_store(tmp_path / "x.zarr", texts, topk=4)  # a teacher that often disagrees with the text
    parts = run_here(
        config_of(
            store,
            tmp_path / "run",
            **{"steps": 40, "anchors": 47, "eval_every": 100, "save_every": 100, "loss": "ce", "weighting": "decay"}
            | changes,
        )
    )
    found = estimate(parts.drafter, parts.heldout, parts.share, parts.engine, ALONE)
    assert found["acceptance_length_estimate"] == pytest.approx(slow_estimate(parts, texts))
    assert 1.1 < found["acceptance_length_estimate"] < parts.engine.objective.drafts + 1


def test_a_stretch_that_drafts_well_is_not_counted_once_per_position() -> None:
    """Half the text drafts perfectly, half not at all: positions alone would say (16 + 1) / 2."""
    easy, hard = np.full(160, 15), np.zeros(160, np.int64)
    anchors = np.arange(320)
    cycles = walk(anchors, np.concatenate([easy, hard]), 320 - anchors)
    assert acceptance_length([cycles]) == pytest.approx(320 / (160 / 16 + 160))


@pytest.mark.parametrize("anchors", [5, 16])
def test_few_anchors_a_row_only_take_more_passes(tmp_path: Path, anchors: int) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(24))
    whole = run_here(config_of(store, tmp_path / "run", steps=20, anchors=47, eval_every=100, save_every=100))
    part = run_here(config_of(store, tmp_path / "other", steps=1, anchors=anchors, micro_rows=1))
    exact = estimate(whole.drafter, whole.heldout, whole.share, whole.engine, ALONE)
    assert estimate(whole.drafter, part.heldout, part.share, part.engine, ALONE) == pytest.approx(exact, rel=1e-5)
    rows = pack(part.heldout.lengths(), range(len(part.heldout.documents)), 48)
    assert passes(part.heldout, [rows]) > 47 // anchors - 3
    assert passes(part.heldout, [[()]]) == 1


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_held_out_document_that_is_not_finite_is_named(tmp_path: Path, precision: str) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(16), corrupt=7, precision=precision)
    with pytest.raises(
        NonFinite, match=r"held-out estimate at step 0; rank 0 read .* document 7 that are not finite: ex"
    ):
        run_here(config_of(store, tmp_path / "run"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_process_gives_the_same_reason(tmp_path: Path, parallel: str) -> None:
    """The command ends with the reason's own code: had one rank gone on alone, the other would wait in a collective."""
    store = make_store(tmp_path / "x.zarr", counting_texts(16), corrupt=7)
    done = run_command(command(config_of(store, tmp_path / "run"), "--nproc=2", f"--parallel={parallel}"))
    assert done.returncode == NonFinite.exit_code, done.stderr
    assert "held-out document 7 that are not finite: extract it again" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", [float("nan"), 1e31])
def test_weights_that_estimate_nothing_are_named(tmp_path: Path, value: float) -> None:
    parts = run_here(config_of(make_store(tmp_path / "x.zarr", counting_texts(16)), tmp_path / "run", steps=1))
    with torch.no_grad():
        parts.drafter.layers[1].mlp.up_proj.weight.mul_(value)
        parts.drafter.layers[1].mlp.gate_proj.weight.mul_(value)
    said = r"up to \d.*e\+29" if value > 0 else r"the weight layers\.1\.mlp\.gate_proj\.weight is not"
    with pytest.raises(NonFinite, match=rf"at step 3; all stored features are finite, .*{said}: lower --learning-rate"):
        estimate(parts.drafter, parts.heldout, parts.share, parts.engine, ALONE, step=3)
