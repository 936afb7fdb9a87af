"""The benchmarks of the step: arithmetic of the report, kinds of kernels, the made-up store, and a run at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from manifests.runs import recorded
from shared.atomic import write_json
from shared.config import to_dict
from shared.errors import ConfigRefused, StoreMismatch
from stage2_train import launch_train
from stage2_train.attention import Layout, build_masks, dense_mask
from stage2_train.benchmarks import attention_cost, parallel, plain_step, step, timed_run
from stage2_train.benchmarks.kernel_times import Kernel, busy, kernel_times, kind_of, summed
from stage2_train.benchmarks.made_store import SHAPES, fitting, make_store, train_options
from stage2_train.benchmarks.parallel import apart, planned, row_of, speed
from stage2_train.benchmarks.timed_run import Timing, means
from stage2_train.drafter import Drafter

TOY = SHAPES["toy"]
CONFIG = TOY.geometry()
NARROW = {"device": "cpu", "threads": 1, "log_every": 1}


def test_kernels_are_told_apart_by_name_operator_and_size() -> None:
    def kind(name: str, *operators: str, shapes: tuple[tuple[int, ...], ...] = (), in_loss: bool = False) -> str:
        return kind_of(Kernel(name, 0, 1, operators, shapes, in_loss), CONFIG)

    hidden = CONFIG.hidden_size
    for size, part in ((336, "head"), (144, "mlp"), (192, "fc"), (256, "q, o"), (64, "k, v"), (7, "other")):
        assert kind("nvjet_tst", "aten::mm", shapes=((52, hidden), (hidden, size))) == f"matmul {part}"
    assert kind("triton_tem_fused_flex_attention_3") == "attention forward"
    assert kind("triton_tem_fused_flex_attention_backward_5") == "attention backward"
    assert kind("fmha_cutlassF", "aten::_scaled_dot_product_efficient_attention") == "attention forward"
    assert kind("triton_poi_fused_mul", "Torch-Compiled Region: 0/0") == "fused elementwise"
    assert kind("triton_red_fused_logsumexp_2") == "loss, elementwise"
    assert kind("triton_poi_fused_2", in_loss=True) == "loss, elementwise"
    assert kind("void multi_tensor_apply_kernel<...>", "aten::_fused_adamw_") == "optimizer"
    assert kind("vectorized_elementwise_kernel", "aten::mul_", "Optimizer.step#AdamW.step") == "optimizer"
    assert kind("vectorized_elementwise_kernel", "aten::mul_") == "eager elementwise"
    assert kind("Memcpy HtoD (Pinned -> Device)", "aten::copy_") == "copy"
    assert kind("ncclDevKernel_AllReduce_Sum_f32_RING_LL") == "communication"


def test_time_in_which_nothing_ran_is_idle_however_streams_overlap() -> None:
    kernels = [Kernel("Memcpy HtoD", 0, 30), Kernel("a", 10, 20), Kernel("a", 25, 40), Kernel("b", 60, 100)]
    assert busy(kernels) == 80
    found = summed(kernels, CONFIG, steps=2)
    assert (found["wall_ms"], found["idle_ms"]) == pytest.approx((0.05, 0.01))
    assert found["kinds"] == pytest.approx({"eager elementwise": 0.0325, "copy": 0.015})
    assert found["top"][0] == {"kind": "eager elementwise", "kernel": "b", "calls": 0.5, "ms": pytest.approx(0.02)}


def test_the_loss_is_known_by_the_head_products_beside_it() -> None:
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    hidden = torch.randn(24, CONFIG.hidden_size)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        with torch.profiler.record_function("the loss"):
            torch.mm(hidden, head.t()).exp_()
        torch.ones(10).sinh_()
    found = kernel_times(profiler, CONFIG, 1, "cpu")
    kinds = {entry["kernel"]: entry["kind"] for entry in found["top"]}
    assert kinds["aten::mm"] == "matmul head"
    assert kinds["aten::exp_"] == "loss, elementwise"
    assert kinds["aten::sinh_"] == "eager elementwise"


def test_kernels_of_a_gpu_find_the_operators_that_launched_them() -> None:
    """The profiler's own classes cannot be made without a GPU, so these are objects with what is read of them."""

    def operator(number: int, name: str, shapes: Any, parent: Any = None) -> Any:
        kind = SimpleNamespace(name="CPU")
        return SimpleNamespace(id=number, name=name, input_shapes=shapes, cpu_parent=parent, device_type=kind)

    def raw(name: str, link: int, start: int, note: bool = False) -> Any:
        values = {
            "name": name, "linked_correlation_id": link, "start_ns": start, "duration_ns": 1000,
            "is_user_annotation": note, "device_type": SimpleNamespace(name="CUDA"),
        }  # fmt: skip
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})

    region = operator(1, "Torch-Compiled Region: 2/0", [])
    product = operator(2, "aten::mm", [[24, 96], [96, 336]], region)
    events = [region, product, operator(2, "cudaLaunchKernel", [])]
    raws = [raw("nvjet", 2, 0), raw("triton_poi_fused_3", 1, 1000), raw("lonely", 0, 3000), raw("a range", 1, 0, True)]
    results = SimpleNamespace(events=lambda: raws)
    profiler = SimpleNamespace(events=lambda: events, profiler=SimpleNamespace(kineto_results=results))
    found = kernel_times(profiler, CONFIG, 1, "cuda")
    assert found["kinds"] == {"matmul head": 0.001, "loss, elementwise": 0.001, "eager elementwise": 0.001}
    assert found["idle_ms"] == pytest.approx(0.001)


def test_small_arithmetic_of_the_reports() -> None:
    records = [{"split": "speed", "name": "data_wait", "value": value} for value in (0.0, 0.02)]
    assert means(records) == {"speed/data_wait": 0.01}
    assert train_options("a-b=3 c=full parallel=fsdp x=null") == {"a_b": 3, "c": "full", "parallel": "fsdp", "x": None}
    assert row_of("4096x512c") == {"max_length": 4096, "anchors": 512, "activation_checkpointing": True}
    assert row_of("64x8") == {"max_length": 64, "anchors": 8}
    assert (
        apart({1: 2.0, 2: 4.0, 3: 1.0}, {1: 2.0, 2: 4.4})
        == "apart by 0.0e+00 at step 1, by 1.0e-01 at most over 2 steps"
    )
    assert speed([{"tokens_per_second": 3.0}, {"tokens_per_second": 4.0}]) == 7
    config = parallel.ParallelConfig(store=Path("x"), runs=("many", "fits"), fits=("64x8c",))
    assert list(planned(config)) == ["many", "fsdp 64x8c"]
    for wrong in ({"fits": ("64",)}, {"runs": ("few",)}, {"nproc": 1}):
        with pytest.raises(ConfigRefused):
            parallel.ParallelConfig(**{"store": Path("x"), **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigRefused):
        fitting("1b", None, None)


def test_a_made_store_is_kept_and_another_shape_is_refused(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s.zarr", TOY, 2, 100)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    make_store(path, TOY, 2, 100)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before
    with pytest.raises(StoreMismatch):
        make_store(path, TOY, 3, 100)
    next((path / "manifest").glob("shards*")).unlink()
    with pytest.raises(ConfigRefused, match="half made"):
        make_store(path, TOY, 2, 100)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_real_loop_is_timed_and_left_before_it_saves(tmp_path: Path, precision: str) -> None:
    store = make_store(tmp_path / "s.zarr", TOY, 3, 112, precision)
    config = TOY.train_config(store, tmp_path / "run", steps=10, **NARROW)
    run = launch_train.check(config)
    with recorded(config.run_dir(), "train", run["config"]):
        launch_train.open_run(config.run_dir(), run, config)
        timing = Timing(steps=7, ceiling=True, profiled=1, cold_store=True)
        write_json(config.run_dir() / timed_run.TIMING_FILE, to_dict(timing))
        timed_run.main(config.run_dir(), 0, 1)
    found = json.loads((config.run_dir() / "timing-0.json").read_text())
    assert not list((config.run_dir() / "checkpoints").glob("*"))
    assert found["tflops"] * 1e12 * found["step_ms"] / 1e3 == pytest.approx(sum(found["flops"].values()))
    assert found["tokens_per_second"] * found["step_ms"] / 1e3 == pytest.approx(TOY.max_length)
    assert len(found["ceilings"]) == 3
    assert {"matmul head", "matmul mlp", "matmul fc"} <= found["kernels"]["kinds"].keys()
    assert found["memory_last"] >= found["memory_settled"] > 0


def test_the_plain_version_computes_what_ours_does() -> None:
    """Same weights, same row: otherwise a ratio of times means nothing."""
    torch.manual_seed(0)
    ours, device = Drafter(CONFIG).initialise(3), torch.device("cpu")
    plain = plain_step.PlainDrafter(CONFIG, device).float()
    copy_weights(ours, plain)
    trainer = plain_step.PlainTrainer(CONFIG, TOY.max_length, 5, device)
    anchors = torch.tensor([3, 50, 90, 120, 200])
    layout = Layout(torch.zeros(1, 5, dtype=torch.int32), anchors.int()[None], TOY.max_length, CONFIG.block_size)
    kind = CONFIG.layer_kind(0)
    assert torch.equal(trainer.mask(anchors), dense_mask(layout, kind)[0, 0])
    at = (anchors[:, None] + torch.arange(CONFIG.block_size)).flatten()
    context_at = torch.arange(TOY.max_length)
    features, embeds = torch.randn(TOY.max_length, 192), torch.randn(20, CONFIG.hidden_size)
    masks = build_masks(layout, ours.kinds, "sdpa", torch.float32)
    expected = ours(ours.project_context(features[None]), embeds[None], context_at[None], at[None], masks)[0]
    found = plain(features, embeds, context_at, at, trainer.mask(anchors))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def copy_weights(ours: Drafter, plain: plain_step.PlainDrafter) -> None:
    layers: Any = ours.layers
    with torch.no_grad():
        plain.fc.weight.copy_(ours.fc.weight)
        for layer, theirs in zip(layers, plain.layers, strict=True):
            for name in "qkvo":
                theirs[name].weight.copy_(getattr(layer.self_attn, f"{name}_proj").weight)
            for name in ("gate", "up", "down"):
                theirs[name].weight.copy_(getattr(layer.mlp, f"{name}_proj").weight)


def test_the_plain_loss_has_the_gradient_of_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 12, requires_grad=True)
    head, labels, weights = torch.randn(30, 12), torch.randint(0, 30, (9,)), torch.rand(9)
    loss: Any = plain_step.ChunkedLoss.apply(hidden, head, labels, weights, plain_step.chunk)
    loss.backward()
    assert hidden.grad is not None
    other = hidden.detach().clone().requires_grad_()
    dense = (torch.nn.functional.cross_entropy(other @ head.t(), labels, reduction="none") * weights).sum()
    (expected,) = torch.autograd.grad(dense, other)
    torch.testing.assert_close(loss, dense)
    torch.testing.assert_close(hidden.grad, expected)


def test_commands_beside_the_run_print_one_line_of_json() -> None:
    torch.set_num_threads(1)
    for command, more, names in (
        (plain_step.main, ["--steps", "2"], {"step_ms", "tflops", "ceilings", "first_step_s", "memory"}),
        (attention_cost.main, ["--rounds", "1"], {"ours_ms", "dense_ms", "ratio", "apart"}),
    ):
        result = CliRunner().invoke(command, ["--shape", "toy", *more])
        assert result.exit_code == 0, (result.output, result.exception)
        found = json.loads(result.output)
        assert names <= found.keys()
        assert all(value < 1e-5 for value in found.get("apart", {}).values())


@pytest.mark.slow
def test_the_whole_step_benchmark_at_toy_size(tmp_path: Path) -> None:
    arguments = ["--shape", "toy", "--steps", "7", "--plain-steps", "2", "--store", str(tmp_path / "s.zarr")]
    more = ["--train", "device=cpu threads=1 log_every=1", "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(step.main, arguments + more)
    assert result.exit_code == 0, (result.output, result.exception)
    for part in ("share of the ceiling", "speed/data_wait", "plain / ours", "where a step goes", "SDPA, dense mask"):
        assert part in result.output
    assert set(json.loads((tmp_path / "found.json").read_text())) >= set(step.PARTS)


@pytest.mark.slow
def test_the_whole_parallel_benchmark_at_toy_size(tmp_path: Path) -> None:
    arguments = ["--shape", "toy", "--steps", "4", "--store", str(tmp_path / "s.zarr"), "--fits", "96x6c"]
    result = CliRunner().invoke(parallel.main, [*arguments, "--train", "device=cpu threads=1"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "2 processes / one" in result.output
    assert "losses of many and fsdp" in result.output


@pytest.mark.gpu
def test_a_profile_on_a_gpu_names_all_products(tmp_path: Path) -> None:
    arguments = ["--shape", "toy", "--steps", "7", "--parts", "ours", "--store", str(tmp_path / "s.zarr")]
    result = CliRunner().invoke(step.main, [*arguments, "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 0, (result.output, result.exception)
    kinds = json.loads((tmp_path / "found.json").read_text())["ours"]["kernels"]["kinds"]
    products = {f"matmul {part}" for part in ("head", "mlp", "fc", "q, o", "k, v")}
    assert products | {"attention forward", "attention backward", "loss, elementwise", "optimizer"} <= kinds.keys()


@pytest.mark.gpu
def test_sending_beside_backward_is_measured_with_kernels_in_nccls_place(tmp_path: Path) -> None:
    module = "stage2_train.benchmarks.beside"
    sizes = ["--shape=toy", "--steps=2", "--rounds=2", "--blocks=4,24", f"--store={tmp_path / 's.zarr'}"]
    done = subprocess.run([sys.executable, "-m", module, *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["none"], ["4"], ["24"])]
    alone = {name: float(cells[-2]) for name, *cells in rows}
    assert alone["none"] == 0.0
    assert min(alone["4"], alone["24"]) > 0.0


@pytest.mark.slow
def test_sharded_state_is_measured_with_ranks_that_are_not_there(tmp_path: Path) -> None:
    module = "stage2_train.benchmarks.shard_memory"
    command = [sys.executable, "-m", module, "--shape", "toy", "--nproc", "3", "--fits", "224x13", "--store"]
    done = subprocess.run([*command, str(tmp_path / "s.zarr")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, *_, values = (line.split("  ") for line in done.stdout.splitlines() if "  " in line)
    found = dict(zip(filter(None, map(str.strip, names)), filter(None, map(str.strip, values)), strict=True))
    assert found["row"] == "224x13"
    assert found["peak"] == ("no GPU" if not torch.cuda.is_available() else found["peak"])
