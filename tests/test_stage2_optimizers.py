"""AdamW and Muon: the same updates and the same saved state however many ranks hold the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import together
from test_stage2_gradient import CONFIG, toy_loss
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from toy_run import ALONE

from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.gradient import FlatGradient, Gradient
from stage2_train.optimizers import Optimizer, _Matrix, _turns, make_optimizer, orthogonalised
from stage2_train.sharding import ShardedGradient, shard, whole_weights


def made(name: str, ranks: Ranks, parallel: str, decay: float = 0.1) -> tuple[Drafter, Gradient, Optimizer]:
    """A drafter whose parameters one optimizer updates."""
    drafter = Drafter(CONFIG).initialise(0)
    gradient: Gradient
    if parallel == "fsdp":
        shard(drafter, ranks, torch.float32)
        gradient = ShardedGradient(drafter, ranks)
    else:
        gradient = FlatGradient(drafter, ranks)
    return drafter, gradient, make_optimizer(name, gradient, ranks, 1e-3, decay)


def update(drafter: Drafter, gradient: Gradient, optimizer: Optimizer, seed: int) -> None:
    """One update; every rank adds the same, so that the sum is a multiple of one rank's."""
    gradient.zero()
    with gradient.summing(last=True):
        (toy_loss(drafter, seed) / gradient.ranks.world_size).backward()  # type: ignore[attr-defined]
    gradient.finish()
    optimizer.step(1e-2)


def trained(ranks: Ranks, name: str, parallel: str, saved: Path | None = None) -> tuple[dict[str, Tensor], Any]:
    """Three updates from the start, or with a saved optimizer; weights and optimizer state, whole."""
    drafter, gradient, optimizer = made(name, ranks, parallel)
    if saved is not None:
        optimizer.load_state_dict(torch.load(saved))
    for seed in range(3):
        update(drafter, gradient, optimizer, seed)
    return whole_weights(drafter), optimizer.state_dict()


def close(one: Any, two: Any, tolerance: float) -> None:
    """Equal nests of dicts and lists, tensors within a tolerance of their largest value."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            close(one[key], two[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            close(left, right, tolerance)
    elif isinstance(one, Tensor):
        assert one.shape == two.shape
        assert (one - two).abs().max() <= tolerance * max(float(one.abs().max()), 1e-3)
    else:
        assert one == two


# What two more products of a share may add to the rounding of one process; the iterations enlarge it.
TOLERANCE = {"adamw": 1e-4, "muon": 1e-3}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("parallel", "world_size"), [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow), ("fsdp", 3)]
)
def test_ranks_update_and_save_what_one_process_does(tmp_path: Path, name: str, parallel: str, world_size: int) -> None:
    weights, state = trained(ALONE, name, "ddp")
    found = together(tmp_path / "one", world_size, trained, name, parallel)
    close(found[0][0], weights, TOLERANCE[name])
    close(found[0][1], state, TOLERANCE[name])
    if parallel == "ddp":
        for other in found[1:]:
            close(other[0], found[0][0], 0.0)
    torch.save(state, tmp_path / "alone.pt")
    torch.save(found[0][1], tmp_path / "together.pt")
    weights, state = trained(ALONE, name, "ddp", tmp_path / "together.pt")
    again = together(tmp_path / "two", world_size, trained, name, parallel, tmp_path / "alone.pt")[0]
    close(again[0], weights, TOLERANCE[name])
    close(again[1], state, TOLERANCE[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_arithmetic_of_a_step_is_counted(name: str) -> None:
    _drafter, _gradient, optimizer = made(name, ALONE, "ddp")
    with FlopCounterMode(display=False) as counted:
        optimizer.step(1e-3)
    assert optimizer.flops() == counted.get_total_flops()
    assert (optimizer.flops() > 0) == (name == "muon")


def test_one_ranks_muon_is_torchs_to_the_bit_in_torchs_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage2_train.optimizers.iteration_dtype", lambda device: torch.bfloat16)
    drafter, gradient, optimizer = made("muon", ALONE, "ddp")
    other = Drafter(CONFIG).initialise(0)
    matrices = [p for p in other.parameters() if p.ndim == 2]
    rest = [p for p in other.parameters() if p.ndim != 2]
    theirs = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for seed in range(3):
        update(drafter, gradient, optimizer, seed)
        other.zero_grad()
        toy_loss(other, seed).backward()
        for part in theirs:
            part.step()
    for mine, parameter in zip(drafter.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, parameter)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_an_update_is_made_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(
        orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(1))).float()
    )
    assert 0.5 < values.min() <= values.max() < 1.5


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=12), st.integers(1, 5))
def test_every_matrix_has_one_turn_and_turns_are_even(shapes: list[tuple[int, int]], world_size: int) -> None:
    matrices = [_Matrix(nn.Parameter(torch.empty(0)), torch.Size(shape)) for shape in shapes]
    turns = _turns(matrices, world_size)
    assert sorted(id(matrix) for turn in turns for matrix in turn) == sorted(map(id, matrices))
    assert all(len(turn) == world_size for turn in turns[:-1])
    costs = [matrix.cost() for turn in turns for matrix in turn]
    assert costs == sorted(costs, reverse=True)
