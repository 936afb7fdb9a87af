"""Activation checkpointing: the same numbers from less memory, and no further graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_drafter import CASES, a_batch, a_drafter
from torch import Tensor
from toy_run import config_of, run_here
from toy_store import counting_texts, make_store

from stage2_train.attention import build_masks
from stage2_train.drafter import Drafter


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh compiler, and flex_attention's refusal to run backward on a CPU lifted (aot_eager has a dense one)."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda q, k, v: None)
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def gradients(drafter: Drafter, batch: dict[str, Any], backend: str = "sdpa") -> tuple[Tensor, int]:
    """All gradients of one forward and backward, and the bytes that forward kept for backward beside the weights."""
    kept: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in drafter.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    masks = build_masks(batch["layout"], drafter.kinds, backend, torch.float32)
    embeds = batch["embeds"].clone().requires_grad_()
    positions = batch["context_positions"], batch["block_positions"]
    context = drafter.project_context(batch["features"])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = drafter(context, embeds, *positions, masks)
    drafter.zero_grad()
    (hidden * torch.linspace(0, 1, hidden.shape[1])[:, None]).sum().backward()
    return torch.cat([embeds.grad.flatten(), *(p.grad.flatten() for p in drafter.parameters())]), sum(kept.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["full", "mixed", "sliding, not causal"])
def test_gradients_are_bit_equal_and_the_activations_are_not_kept(name: str) -> None:
    drafter, batch = a_drafter(CASES[name]), a_batch(CASES[name])
    plain, plain_bytes = gradients(drafter, batch)
    again, bytes_kept = gradients(drafter.recompute_layers(True), batch)
    assert torch.equal(plain, again)
    assert bytes_kept < plain_bytes / 2
    assert torch.equal(gradients(drafter.recompute_layers(False), batch)[0], plain)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("default")
def test_a_compiled_layer_stays_one_graph_for_each_kind() -> None:
    from torch._dynamo.utils import counters, get_compilation_metrics

    name = "mixed"
    drafter, batch = a_drafter(CASES[name]).recompute_layers(True), a_batch(CASES[name])
    eager, _ = gradients(drafter, batch)
    expected = 2
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    graphs, records = counters["stats"]["unique_graphs"], len(get_compilation_metrics())
    found, _ = gradients(drafter, batch, "flex")
    assert counters["stats"]["unique_graphs"] - graphs == expected
    new = get_compilation_metrics()[records:]
    assert [record.is_forward for record in new].count(True) == expected
    assert [record.is_forward for record in new].count(False) == expected, "one backward for each forward"
    assert torch.linalg.vector_norm(found - eager) < 1e-6 * torch.linalg.vector_norm(eager)
    torch.compiler.set_stance("fail_on_recompile")
    again, kept = gradients(drafter, batch, "flex")
    other, _ = gradients(drafter, a_batch(CASES[name], seed=1), "flex")
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    plain, plain_kept = gradients_of_plain_compiled(name, batch)
    assert torch.equal(found, plain)
    assert kept < plain_kept / 2


def gradients_of_plain_compiled(name: str, batch: dict[str, Any]) -> tuple[Tensor, int]:
    torch.compiler.set_stance("default")
    drafter = a_drafter(CASES[name])
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    return gradients(drafter, batch, "flex")


def test_a_run_gives_the_same_weights(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(16))
    layers: dict[str, Any] = {"layer_types": ("sliding", "full"), "sliding_window": 5, "steps": 4}
    one, two = (
        run_here(config_of(store, tmp_path / str(on), activation_checkpointing=on, **layers)) for on in (False, True)
    )
    assert two.drafter.layers[0].recompute
    assert all(torch.equal(a, b) for a, b in zip(one.drafter.parameters(), two.drafter.parameters(), strict=True))
