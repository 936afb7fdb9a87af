"""flex_attention with our tiles, eager and compiled, against SDPA with the dense mask; eager use is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_stage2_attention import KINDS, a_layout
from torch.nn.attention.flex_attention import flex_attention

from shared.errors import CompileContract
from stage2_train.attention import Layout, Tiles, additive, block_mask, dense_mask
from stage2_train.compiled import EAGER_FLEX, Contract
from stage2_train.drafter import attention
from stage2_train.drafter_config import LayerKind


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("blocks", "size", "kind", "heads"),
    [
        (1, 2, KINDS[0], (4, 2)),
        (127, 1, KINDS[0], (3, 1)),
        (16, 8, KINDS[0], (6, 2)),
        (43, 3, KINDS[3], (6, 2)),
        (18, 7, KINDS[2], (2, 2)),
    ],
)
def test_flex_forward_equals_sdpa(blocks: int, size: int, kind: LayerKind, heads: tuple[int, int]) -> None:
    layout, _ = a_layout([50, 90], blocks, size, seed=blocks)
    generator = torch.Generator().manual_seed(0)
    queries = blocks * size
    q = torch.randn(1, heads[0], queries, 16, generator=generator)
    k, v = (torch.randn(1, heads[1], layout.context_length + queries, 16, generator=generator) for _ in "kv")
    got = attention(q, k, v, block_mask(layout, kind))
    torch.testing.assert_close(
        got, attention(q, k, v, additive(dense_mask(layout, kind), q.dtype)), rtol=1e-5, atol=1e-5
    )


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_tiles_and_kernel_on_a_cpu_equal_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tiles, compiled = Tiles(), torch.compile(attention, fullgraph=True, dynamic=False)
    tiles.compile()
    kind, queries = LayerKind(True, 60), 19 * 7
    for seed in range(2):
        layout, _ = a_layout([50, 90], 19, 7, seed)
        assert all(map(torch.equal, tiles(layout, kind), Tiles()(layout, kind)))
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(1, 4, queries, 16, generator=generator)
        k, v = (torch.randn(1, 2, layout.context_length + queries, 16, generator=generator) for _ in "kv")
        got = compiled(q, k, v, block_mask(layout, kind, tiles))
        want = attention(q, k, v, additive(dense_mask(layout, kind), q.dtype))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [LayerKind(False, None), LayerKind(True, 2048)])
def test_the_compiled_mask_builder_lists_the_tiles_of_the_eager_one(kind: LayerKind) -> None:
    layout, _ = a_layout([5000, 7000, 4000], 2048, 16, seed=0, padding=384)
    placed = Layout(layout.start.cuda(), layout.end.cuda(), layout.context_length, layout.block_size)
    tiles = Tiles()
    tiles.compile()
    for found, want in zip(tiles(placed, kind), Tiles()(layout, kind), strict=True):
        assert torch.equal(found.cpu(), want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [KINDS[0], LayerKind(True, 100)])
@pytest.mark.parametrize(
    ("lengths", "blocks", "heads"),
    [([127], 8, (4, 2)), ([128], 8, (6, 2)), ([129, 400], 67, (4, 1)), ([1025, 300], 64, (8, 8))],
)
def test_compiled_flex_equals_sdpa_forward_and_backward(
    kind: LayerKind, lengths: list[int], blocks: int, heads: tuple[int, int]
) -> None:
    layout, _ = a_layout(lengths, blocks, 16, seed=0, padding=0)
    layout = Layout(layout.start.cuda(), layout.end.cuda(), layout.context_length, layout.block_size)
    generator, queries = torch.Generator("cuda").manual_seed(0), blocks * 16
    shapes = ((1, heads[0], queries, 64), *((1, heads[1], layout.context_length + queries, 64),) * 2)
    wide = [torch.randn(shape, generator=generator, device="cuda").requires_grad_() for shape in shapes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in wide]
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    scale = torch.randn(shapes[0], generator=generator, device="cuda")
    exact = attention(*wide, additive(dense_mask(layout, kind), torch.float32))
    (exact * scale).sum().backward()
    found = compiled(*half, block_mask(layout, kind))
    (found.float() * scale).sum().backward()
    assert (found.float() - exact).norm() <= 1e-2 * exact.norm()
    for want, got in zip(wide, half, strict=True):
        assert want.grad is not None
        assert got.grad is not None
        assert torch.isfinite(got.grad).all()
        assert (got.grad.float() - want.grad).norm() <= 2e-2 * want.grad.norm()


def test_an_eager_flex_call_is_an_error_by_the_text_we_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._WARNINGS_SHOWN", set())  # it warns once a process
    q = torch.randn(1, 1, 16, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=EAGER_FLEX)
        with pytest.raises(CompileContract, match="without its kernel at step 3"), Contract([]).watch("step 3"):
            flex_attention(q, q, q)
