"""How many thread blocks NCCL gets beside backward, and on GPUs that it takes no more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_run import GEOMETRY

from shared.ports import free_port
from stage2_train.distributed import Ranks, process_group
from stage2_train.drafter import Drafter
from stage2_train.gradient import FlatGradient
from stage2_train.sending import BLOCK_BYTES_S, BLOCKS, SHARE, fits_beside, narrow_group

DRAFTER_27B = 4 * 1_730_150_400


def test_a_long_backward_hides_what_few_blocks_send() -> None:
    """The 27B drafter's gradient beside 32,768 slots a GPU (0.31 s of products), and beside an eighth of them."""
    assert fits_beside(DRAFTER_27B, 2, 0.31)
    assert fits_beside(DRAFTER_27B, 64, 0.31)
    assert not fits_beside(DRAFTER_27B, 2, 0.04)
    assert not fits_beside(DRAFTER_27B, 2, 0.0)  # not measured


@given(size=st.integers(1, 10**11), world_size=st.integers(2, 512), seconds=st.floats(0.0, 100.0))
def test_what_fits_is_sent_within_its_share_of_backward(size: int, world_size: int, seconds: float) -> None:
    """A ring passes every byte on W - 1 times to be added and W - 1 times to be known, a W-th of them at a time."""
    lasts = sum(size / world_size / (BLOCKS * BLOCK_BYTES_S) for _ in range(2 * (world_size - 1)))
    assume(abs(lasts - SHARE * seconds) > 1e-9 * lasts)
    assert fits_beside(size, world_size, seconds) == (lasts < SHARE * seconds)


def loss_of(drafter: Drafter, device: torch.device) -> torch.Tensor:
    """A number that depends on every parameter."""
    total = torch.zeros((), device=device)
    for parameter in drafter.parameters():
        total = total + (parameter * torch.arange(parameter.numel(), device=device).view_as(parameter)).sum()
    return total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nccl_takes_the_narrow_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One real rank that believes in two: all but the sum itself is what two do."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    try:
        drafter = Drafter(GEOMETRY).initialise(0).to(device)
        gradient = FlatGradient(drafter, Ranks(0, 2, device), bucket_bytes=3000)
        gradient.beside = narrow_group(device)
        with gradient.summing(last=True):
            loss_of(drafter, device).backward()
        gradient.finish()
        for parameter in drafter.parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.flatten(), torch.arange(parameter.numel(), device=device).float())
    finally:
        dist.destroy_process_group()


def widths(rank: int, folder: str, port: int) -> None:
    """Sum one big tensor over two GPUs by both groups, and write down how many blocks each kernel of NCCL had."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    device = torch.device("cuda", rank)
    with process_group(rank, 2, device):
        narrow, tensor = narrow_group(device), torch.ones(2**24, device=device)
        dist.all_reduce(tensor)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            dist.all_reduce(tensor, group=narrow)
            dist.all_reduce(tensor)
            torch.cuda.synchronize(device)
        assert float(tensor.min()) == float(tensor.max()) == 8.0
        profile.export_chrome_trace(f"{folder}/{rank}.json")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_send_on_no_more_blocks_than_they_were_given(tmp_path: Path) -> None:
    multiprocessing.spawn(widths, (str(tmp_path), free_port()), nprocs=2)
    for rank in range(2):
        events: list[dict[str, Any]] = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        kernels = [event for event in events if "nccl" in event["name"].lower() and "grid" in event.get("args", {})]
        narrow, wide = (event["args"]["grid"][0] for event in sorted(kernels, key=lambda event: event["ts"]))
        assert narrow <= BLOCKS < wide
