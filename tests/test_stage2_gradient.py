"""One flat gradient: summed over ranks in buckets while backward runs, the same sum as afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import together
from torch import Tensor, nn
from toy_run import ALONE, GEOMETRY

from stage2_train.compiled import graphs
from stage2_train.distributed import Ranks
from stage2_train.drafter import Drafter
from stage2_train.gradient import FlatGradient

CONFIG = dataclasses.replace(GEOMETRY, intermediate_size=24, num_hidden_layers=3, layer_types=())
CONTEXT, QUERIES = 12, 8


def toy_loss(drafter: Drafter, seed: int) -> Tensor:
    """A number that depends on every parameter, on inputs of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, CONTEXT, 32, generator=generator)
    embeds = torch.randn(1, QUERIES, 16, generator=generator).requires_grad_()
    mask = torch.ones(1, 1, QUERIES, CONTEXT + QUERIES, dtype=torch.bool)
    positions = torch.arange(CONTEXT)[None], torch.arange(QUERIES)[None]
    hidden: Tensor = drafter.on_features(features, embeds, *positions, dict.fromkeys(drafter.kinds, mask))
    return (hidden * torch.randn(hidden.shape, generator=generator)).sum()


def summed(
    ranks: Ranks, bucket_bytes: int, parts: int, skip: str = "", compile_layers: bool = False, beside: bool = False
) -> dict[str, Any]:
    """Gradients summed the fast way and the slow one, and how much was sent while backward ran."""
    drafter = Drafter(CONFIG).initialise(0)
    if compile_layers:
        for layer in drafter.layers:
            layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    gradient = FlatGradient(drafter, ranks, bucket_bytes)
    if beside:
        gradient.beside = dist.new_group()
    if skip and ranks.rank == 1:
        drafter.get_parameter(skip).requires_grad_(False)
    sent: list[bool] = []
    real = dist.all_reduce

    def all_reduce(*arguments: Any, group: Any = None, **options: Any) -> Any:
        sent.append(group is not None and group is gradient.beside)
        return real(*arguments, group=group, **options)

    dist.all_reduce = all_reduce
    for _ in range(2):  # a second step starts clean
        gradient.zero()
        sent.clear()
        for part in range(parts):
            with gradient.summing(last=part == parts - 1):
                toy_loss(drafter, 10 * ranks.rank + part).backward()
        early = len(sent)
        gradient.finish()
        torch.compiler.set_stance("fail_on_recompile" if compile_layers else "default")
    assert gradient.attached()
    dist.all_reduce = real
    torch.compiler.set_stance("default")
    alone = FlatGradient(other := Drafter(CONFIG).initialise(0), ALONE)
    if skip and ranks.rank == 1:
        other.get_parameter(skip).requires_grad_(False)
    for part in range(parts):
        toy_loss(other, 10 * ranks.rank + part).backward()
    slow = alone.buffer.clone()
    dist.all_reduce(slow)
    return {"fast": gradient.buffer, "slow": slow, "early": early, "all": len(sent), "beside": sent, "graphs": graphs()}


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 36), (3000, None), (10**9, 1)])
def test_the_sum_of_two_ranks_is_the_same_to_the_bit_however_it_is_cut(
    tmp_path: Path, bucket_bytes: int, buckets: int | None
) -> None:
    one, two = together(tmp_path / "ranks", 2, summed, bucket_bytes, 3)
    assert torch.equal(one["fast"], one["slow"])
    assert torch.equal(one["fast"], two["fast"])
    assert one["fast"].abs().sum() > 0
    assert one["all"] == (buckets or one["all"]) > 0
    assert one["early"] == one["all"]  # the last parameter of backward sends the last bucket
    if buckets is None:
        assert one["all"] > 4


def test_three_ranks_agree_to_rounding(tmp_path: Path) -> None:
    found = together(tmp_path / "ranks", 3, summed, 3000, 2)
    assert torch.equal(found[0]["fast"], found[1]["fast"])
    assert torch.equal(found[0]["fast"], found[2]["fast"])
    torch.testing.assert_close(found[0]["fast"], found[0]["slow"], rtol=1e-6, atol=1e-6)


def test_a_parameter_without_a_gradient_on_one_rank_makes_nobody_wait(tmp_path: Path) -> None:
    one, two = together(tmp_path / "ranks", 2, summed, 1, 1, "layers.1.mlp.up_proj.weight")
    assert torch.equal(one["fast"], one["slow"])
    assert torch.equal(two["fast"], one["fast"])
    assert two["early"] < two["all"] == one["all"]  # the rest waits for finish, in the same order


@pytest.mark.parametrize("skip", ["", "fc.weight"], ids=["", "nothing for fc on one rank"])
def test_all_but_the_last_bucket_go_by_the_group_that_is_beside_backward(tmp_path: Path, skip: str) -> None:
    one, two = together(tmp_path / "ranks", 2, summed, 3000, 2, skip, False, True)
    assert torch.equal(one["fast"], one["slow"])
    assert torch.equal(two["fast"], one["fast"])
    assert one["beside"] == two["beside"] == [True] * (one["all"] - 1) + [False]
    assert one["all"] > 4


def test_hooks_leave_compiled_layers_at_one_graph(tmp_path: Path) -> None:
    one, _ = together(tmp_path / "ranks", 2, summed, 3000, 2, "", True)
    assert one["graphs"] == 1
    torch.testing.assert_close(one["fast"], one["slow"], rtol=1e-5, atol=1e-6)


def blamed(ranks: Ranks) -> list[list[str]]:
    """Whose gradient was not finite before the sum: rank 1 spoils one parameter's."""
    drafter = Drafter(CONFIG).initialise(0)
    gradient = FlatGradient(drafter, ranks, 3000)
    if ranks.rank == 1:
        drafter.layers[1].mlp.up_proj.weight.register_hook(lambda g: g * float("nan"))  # type: ignore[union-attr]
    with gradient.summing(last=True):
        toy_loss(drafter, ranks.rank).backward()
    gradient.finish()
    assert not torch.isfinite(gradient.squares())
    return [name for name, bad in zip(gradient.names, gradient.bad(), strict=True) if bad]


def test_the_rank_of_a_bad_gradient_is_known_after_the_sum(tmp_path: Path) -> None:
    assert together(tmp_path / "ranks", 2, blamed) == [[], ["layers.1.mlp.up_proj.weight"]]


@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_norm_and_clipping_are_torchs(limit: float) -> None:
    drafter, other = Drafter(CONFIG).initialise(0), Drafter(CONFIG).initialise(0)
    gradient = FlatGradient(drafter, ALONE)
    with gradient.summing(last=True):
        toy_loss(drafter, 0).backward()
    gradient.finish()
    toy_loss(other, 0).backward()
    want = nn.utils.clip_grad_norm_(other.parameters(), limit)
    norm = float(gradient.squares().sqrt())
    gradient.clip(norm, limit)
    assert norm == pytest.approx(float(want), rel=1e-6)
    for mine, theirs in zip(drafter.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=0)


def test_a_replaced_gradient_is_noticed() -> None:
    drafter = Drafter(CONFIG).initialise(0)
    gradient = FlatGradient(drafter, ALONE)
    assert gradient.attached()
    drafter.norm.weight.grad = torch.zeros(16)
    assert not gradient.attached()
