"""FSDP2: shares of the drafter give the same numbers as the whole of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import together
from test_stage2_gradient import CONFIG, toy_loss

from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.sharding import ShardedGradient, fill_weights, shard, whole_weights

# Widths that 2 and 3 ranks cut unevenly (norms of 8 and 16, matrices of 16, 24 and 32 rows), and rows for some only.
WORLDS = [2, 3]


def steps(ranks: Ranks, parts: int, estimate: bool, compile_layers: bool) -> dict[str, Any]:
    """Two updates by hand on shares; what they leave, whole, with the norms and graphs."""
    drafter = Drafter(CONFIG).initialise(0).recompute_layers(compile_layers)
    if compile_layers:
        for layer in drafter.layers:
            layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    shard(drafter, ranks, torch.float32)
    gradient = ShardedGradient(drafter, ranks)
    norms = []
    for step in range(2):
        gradient.zero()
        if estimate:  # a forward whose backward never comes, as the estimate on a GPU makes
            toy_loss(drafter, 99)
        for part in range(parts):
            with gradient.summing(last=part == parts - 1):
                toy_loss(drafter, 100 * step + 10 * ranks.rank + part).backward()
        assert gradient.attached()
        gradient.finish()
        norm = float(ranks.sum(gradient.squares()[None]).sqrt())
        norms.append(norm)
        gradient.clip(norm, 0.5)
        with torch.no_grad():
            for parameter in gradient.parameters:
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        torch.compiler.set_stance("fail_on_recompile" if compile_layers else "default")
    again = [gradient.whole(index, parameter) for index, parameter in enumerate(gradient.parameters)]
    own = [gradient.part(index, torch.zeros(shape)).shape for index, shape in enumerate(gradient.shapes)]
    return {
        "norms": norms,
        "weights": whole_weights(drafter),
        "again": again,
        "own": own == [parameter.shape for parameter in gradient.parameters],
        "held": sum(parameter.numel() for parameter in gradient.parameters),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def by_hand(world_size: int, parts: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same two updates on a whole drafter in one process."""
    drafter = Drafter(CONFIG).initialise(0)
    norms = []
    for step in range(2):
        drafter.zero_grad()
        for rank in range(world_size):
            for part in range(parts):
                toy_loss(drafter, 100 * step + 10 * rank + part).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)))
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]
    return norms, drafter.state_dict()


@pytest.mark.parametrize(
    ("world_size", "parts", "estimate", "compile_layers"),
    [(2, 1, False, False), (3, 2, True, False), (2, 2, True, True)],
    ids=["two ranks", "three ranks, estimates between", "compiled, recomputed, estimates between"],
)
def test_updates_on_shares_are_updates_of_the_whole(
    tmp_path: Path, world_size: int, parts: int, estimate: bool, compile_layers: bool
) -> None:
    found = together(tmp_path / "ranks", world_size, steps, parts, estimate, compile_layers)
    norms, weights = by_hand(world_size, parts)
    first = found[0]
    assert first["norms"] == pytest.approx(norms, rel=1e-5)
    assert first["weights"].keys() == weights.keys()
    for (name, tensor), again in zip(weights.items(), first["again"], strict=True):
        torch.testing.assert_close(first["weights"][name], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(first["weights"][name], again)
    total = sum(tensor.numel() for tensor in weights.values())
    assert sum(rank["held"] for rank in found) == total
    assert max(rank["held"] for rank in found) < 0.6 * total
    assert all(rank["own"] and rank["norms"] == first["norms"] for rank in found)
    assert all(tensor.numel() == 0 for rank in found[1:] for tensor in rank["weights"].values())
    if compile_layers:
        assert {rank["graphs"] for rank in found} == {1}


def filled(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole weights put into shares and taken out again."""
    drafter = Drafter(CONFIG).initialise(0)
    shard(drafter, ranks, torch.float32)
    gradient = ShardedGradient(drafter, ranks)
    fill_weights(drafter, Drafter(CONFIG).initialise(5).state_dict())
    assert gradient.zero() is None
    toy_loss(drafter, 0).backward()
    assert gradient.attached()  # the optimizer still sees the parameters
    return whole_weights(drafter)


@pytest.mark.parametrize("world_size", WORLDS)
def test_weights_are_put_into_shares_and_taken_out_to_the_bit(tmp_path: Path, world_size: int) -> None:
    found = together(tmp_path / "ranks", world_size, filled)[0]
    for name, tensor in Drafter(CONFIG).initialise(5).state_dict().items():
        assert torch.equal(found[name], tensor)
