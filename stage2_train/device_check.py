"""What `dflash doctor` asks of a device about training: its matrix product, the real attention, one real step.

Each function is called in a process of its own (manifests/doctor_child.py) and returns JSON values; what they mean is
said by manifests/doctor_devices.py. Nothing here reads a store. Next: training_parts.py, which builds the real thing.

Shapes: S context tokens, N blocks, B slots, H hidden.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from shared.ports import free_port
from stage2_train import drafter as drafter_module
from stage2_train.attention import Layout, Tiles, additive, build_masks, dense_mask
from stage2_train.batch import Batch
from stage2_train.block_layout import BlockLayout
from stage2_train.compiled import EAGER_FLEX, declare
from stage2_train.config import TrainConfig
from stage2_train.data import StepRows
from stage2_train.distributed import Ranks, process_group
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig, LayerKind
from stage2_train.gradient import BUCKET_BYTES, FlatGradient
from stage2_train.metrics import ceiling, synchronize
from stage2_train.optimizers import make_optimizer
from stage2_train.packing import Piece
from stage2_train.step import Stepper, Window
from stage2_train.training_parts import make_engine

# Large enough for several tiles of flex_attention each way, small enough for a float64 reference on two cores.
CONTEXT, BLOCKS, SLOTS = 512, 32, 16
HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 8, 2, 64
STEPS, ROUNDS = 4, 5
# A toy drafter whose step takes milliseconds; head size, block size and layers of one kind are a real drafter's.
GEOMETRY = DrafterConfig(
    hidden_size=256,
    target_hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    block_size=SLOTS,
    mask_token_id=511,
    target_layer_ids=(1, 3),
    num_target_layers=6,
)


def devices() -> dict[str, Any]:
    """Versions, and the devices that this torch can use; `no_cuda` says in torch's words why there is no GPU."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
        count = torch.cuda.device_count() if there else 0
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "no_cuda": "" if there else " ".join(str(warning.message) for warning in said),
        "gpus": [],
    }
    for index in range(count):
        has = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {
                "device": f"cuda:{index}",
                "name": has.name,
                "capability": [has.major, has.minor],
                "total": has.total_memory,
            }
        )
    if there:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def matmul(device: str) -> dict[str, Any]:
    """TFLOP/s of one large product (bfloat16 on CUDA, float32 on a CPU), and the memory of a GPU before it."""
    place = torch.device(device)
    found: dict[str, Any] = {}
    if place.type == "cuda":
        torch.cuda.set_device(place)
        found["free"], found["total"] = torch.cuda.mem_get_info(place)
    return found | {"tflops": ceiling(place), "dtype": "bfloat16" if place.type == "cuda" else "float32"}


def attention(device: str) -> dict[str, Any]:
    """The attention of training, forward and backward, against float64 on the CPU.

    On CUDA flex_attention with its BlockMask, compiled; on a CPU SDPA with the grouped mask. `apart` is the relative L2
    distance of the result and of the gradients of q, k and v, for both given the same rounded inputs.
    """
    place = torch.device(device)
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.set_device(place)
    backend, dtype = ("flex", torch.bfloat16) if cuda else ("sdpa", torch.float32)
    kind, layout, inputs = LayerKind(causal=False, window=None), _layout(), _inputs(dtype)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    upstream = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = _with_gradients(
        lambda q, k, v: drafter_module.attention(q, k, v, additive(dense_mask(layout, kind), torch.float64)),
        exact,
        upstream.double(),
    )
    placed = [tensor.to(place).requires_grad_() for tensor in inputs]
    there = Layout(layout.start.to(place), layout.end.to(place), layout.context_length, layout.block_size)
    run: Any = drafter_module.attention
    if cuda:
        warnings.filterwarnings("error", message=EAGER_FLEX)
        run = torch.compile(run, fullgraph=True, dynamic=False)
    mask = build_masks(there, [kind], backend, dtype, Tiles())[kind]

    def once() -> list[Tensor]:
        return _with_gradients(lambda q, k, v: run(q, k, v, mask), placed, upstream.to(place))

    found, first_s = _timed(once, place)
    _, again_s = _timed(once, place)
    return {
        "backend": backend,
        "dtype": _name(dtype),
        "first_s": first_s,
        "ms": 1e3 * again_s,
        "apart": {
            name: _apart(got, exactly)
            for name, got, exactly in zip(("out", "dq", "dk", "dv"), found, want, strict=True)
        },
    }


def step(device: str) -> dict[str, Any]:
    """A few training steps of a toy drafter on one made-up batch, through the real engine, compile contract and step.

    `losses` before each update; `reference` is the first of them by SDPA in float32 on the CPU (None there).
    """
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    found = _train(place, STEPS)
    reference = _train(torch.device("cpu"), 1)["losses"][0] if place.type == "cuda" else None
    return found | {"reference": reference}


def together(devices: str) -> dict[str, Any]:
    """A sum over the devices (separated by commas), a process each, as training adds gradients: NCCL, on CPUs gloo."""
    names = devices.split(",")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (names, free_port(), folder), nprocs=len(names))
        told: dict[str, Any] = json.loads((Path(folder) / "told").read_text())
    return told


def _rank(rank: int, names: list[str], port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    device, world = torch.device(names[rank]), len(names)
    with process_group(rank, world, device) as ranks:
        values = torch.full((BUCKET_BYTES // 4,), float(rank + 1), device=device)
        right = bool((ranks.sum(values.clone()) == world * (world + 1) / 2).all())
        _, seconds = _timed(lambda: [ranks.sum(values) for _ in range(ROUNDS)], device)
        wrong = ranks.any(not right)
    if rank == 0:
        sent = ROUNDS * BUCKET_BYTES * 2 * (world - 1) / world
        told = {
            "ranks": world,
            "backend": "NCCL" if device.type == "cuda" else "gloo",
            "bytes": BUCKET_BYTES,
            "right": not wrong,
            "gb_per_s": sent / seconds / 1e9,
        }
        (Path(folder) / "told").write_text(json.dumps(told))


def _train(device: torch.device, steps: int) -> dict[str, Any]:
    # The peak rate from the first step on: what falls must be seen to fall.
    config = TrainConfig(
        store="none", device="cuda" if device.type == "cuda" else "cpu", steps=steps, batch_rows=2, max_length=256,
        anchors=16, block_size=SLOTS, learning_rate=2e-3, warmup_ratio=0.0, schedule="wsd",
        loss="ce", weighting="decay",
    )  # fmt: skip
    ranks = Ranks(0, 1, device)
    engine = make_engine(config, GEOMETRY, _tables(), device)
    drafter = Drafter(GEOMETRY).initialise(0).to(device)
    gradient = FlatGradient(drafter, ranks)
    optimizer = make_optimizer(config.optimizer, gradient, ranks, config.learning_rate, config.weight_decay)
    stepper = Stepper(drafter, optimizer, gradient, engine, ranks, config)
    batch = _batch(config, engine.objective)
    contract = declare(drafter, engine)
    compiled = contract.warm_up(lambda: stepper.rehearse(batch)) if contract.regions else {"graphs": 0, "seconds": 0.0}
    state: dict[str, Any] = {
        "global_step": 0,
        "tokens": 0,
        "documents_without_anchors": 0,
        "steps_without_labels": 0,
    }
    losses, times = [], []
    for number in range(steps):
        state["window"] = Window.empty(engine.objective.drafts)
        with contract.watch(f"step {number}"):
            _, seconds = _timed(lambda n=number: stepper.step(state, StepRows(0, n, (batch,)), steps), device)  # type: ignore[misc]
        losses.append(float(state["window"]["sums"]["loss"]))
        times.append(seconds)
    contract.check("the last step")
    contract.release()
    return {
        "attention": engine.attention,
        "dtype": _name(engine.dtype),
        "graphs": compiled["graphs"],
        "compile_s": compiled["seconds"],
        "losses": losses,
        "ms": 1e3 * min(times),
    }


def _batch(config: TrainConfig, objective: Any) -> Batch:
    """One document a row, counting upwards, its first eighth a prompt: a text that can be learned."""
    rows, length = config.batch_rows, config.max_length
    generator = np.random.default_rng(0)
    blocks = BlockLayout(anchors=config.anchors, objective=objective, topk=0, pinned=False)
    width = len(GEOMETRY.target_layer_ids) * GEOMETRY.target_hidden_size
    features = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(2)).bfloat16()
    tensors = {
        "features": features.view(torch.int16).view(torch.uint16),
        "context_positions": torch.arange(length, dtype=torch.int32).repeat(rows, 1),
        **blocks.allocate(rows),
    }
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    mask = np.ones(length, np.uint8)
    mask[: length // 8] = 0
    for row in range(rows):
        ids = (np.arange(length) * (row + 1)) % (GEOMETRY.vocab_size - 1)
        anchors = np.sort(generator.permutation(np.arange(length // 8, length - 1))[: config.anchors])
        place = {name: array[row] for name, array in arrays.items()}
        blocks.fill(place, (Piece(row, 0, length),), [{"input_ids": ids, "loss_mask": mask}], [anchors])
    return Batch(
        tensors=tensors, documents=tuple((row,) for row in range(rows)), tokens=rows * length, without_anchors=0,
        covered=0, coverable=0, **arrays,
    )  # fmt: skip


def _tables() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = (GEOMETRY.vocab_size, GEOMETRY.hidden_size)
    return {name: 0.05 * torch.randn(size, generator=generator) for name in ("embed_tokens", "lm_head")}


def _layout() -> Layout:
    """One row of two documents, with blocks all over it."""
    middle = CONTEXT // 3
    ends = np.sort(np.random.default_rng(0).permutation(np.arange(1, CONTEXT))[:BLOCKS]).astype(np.int32)
    starts = np.where(ends > middle, middle, 0).astype(np.int32)
    return Layout(torch.from_numpy(starts[None]), torch.from_numpy(ends[None]), CONTEXT, SLOTS)


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k and v on the CPU, already rounded to `dtype`."""
    generator, queries = torch.Generator().manual_seed(0), BLOCKS * SLOTS
    shapes = ((HEADS, queries), (KEY_VALUE_HEADS, CONTEXT + queries), (KEY_VALUE_HEADS, CONTEXT + queries))
    return [torch.randn(1, *shape, HEAD_SIZE, generator=generator).to(dtype) for shape in shapes]


def _with_gradients(run: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    synchronize(device)
    started = time.perf_counter()
    found = run()
    synchronize(device)
    return found, time.perf_counter() - started


def _apart(found: Tensor, want: Tensor) -> float:
    """Relative L2 distance; NaN when anything is not finite."""
    return float((found.double().cpu() - want).norm() / want.norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
