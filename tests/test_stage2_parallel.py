"""Several processes train what one does: sharded or not, restarted with others, with nothing to learn on some ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_store
from rank_processes import train_together
from safetensors.torch import load_file
from toy_run import command, config_of, curve, environment, run_command, run_here
from toy_store import Text, counting_text, counting_texts, make_store

from manifests.commit import read
from shared.errors import ConfigRefused, Interrupted, NonFinite
from shared.ports import free_port
from stage2_train.checkpoint_folder import folder_of, newest_complete
from stage2_train.packing import epoch_rows, rank_rows

COMPARED = (
    ("loss", "train"),
    ("grad_norm", "train"),
    ("tokens_per_block", "train"),
    ("nll", "heldout"),
    ("acceptance_length_estimate", "heldout"),
)
STEPS = {"steps": 6, "eval_every": 3, "save_every": 3}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of many lengths, the last batch of an epoch ragged."""
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


def same_curves(one: Path, two: Path, tolerance: float = 1e-4) -> None:
    for name, split in COMPARED:
        alone, together = curve(one, name, split), curve(two, name, split)
        assert alone.keys() == together.keys(), name
        assert together == pytest.approx(alone, rel=tolerance), name


@pytest.mark.parametrize(
    ("parallel", "world_size", "changes"),
    [
        ("fsdp", 2, {"micro_rows": 1, "activation_checkpointing": True, **SLIDING}),
        ("fsdp", 4, {}),
        pytest.param("ddp", 4, {"micro_rows": 1}, marks=pytest.mark.slow),
        ("ddp", 2, {"optimizer": "muon", "learning_rate": 1e-2}),
        ("fsdp", 2, {"optimizer": "muon", "learning_rate": 1e-2}),
    ],
    ids=["fsdp, sliding, recomputed", "fsdp, 4 ranks", "ddp, 4 ranks", "ddp, muon", "fsdp, muon"],
)
def test_several_processes_train_what_one_does(
    store: Path, tmp_path: Path, parallel: str, world_size: int, changes: dict[str, Any]
) -> None:
    changes = {**STEPS, **changes}
    run_here(config_of(store, tmp_path / "one", **changes))
    ended = train_together(config_of(store, tmp_path / "all", parallel=parallel, **changes), world_size)
    assert ended == [{}] * world_size
    same_curves(tmp_path / "one", tmp_path / "all", 1e-3 if "optimizer" in changes else 1e-4)
    folders = [folder_of(tmp_path / name, 6) for name in ("one", "all")]
    one, two = (load_file(folder / "drafter.safetensors") for folder in folders)
    assert {name: (t.shape, t.dtype) for name, t in one.items()} == {
        name: (t.shape, t.dtype) for name, t in two.items()
    }
    assert (folders[0] / "config.json").read_bytes() == (folders[1] / "config.json").read_bytes()
    assert nest(torch.load(folders[0] / "optimizer.pt")) == nest(torch.load(folders[1] / "optimizer.pt"))


def nest(state: Any) -> Any:
    """A saved state with shapes in place of tensors."""
    if isinstance(state, dict):
        return {key: nest(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [nest(value) for value in state]
    return (state.shape, state.dtype) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_a_run_goes_on_with_other_processes_and_another_kind_of_parallel(
    store: Path, tmp_path: Path, optimizer: str
) -> None:
    changes = {"steps": 8, "optimizer": optimizer}
    run_here(config_of(store, tmp_path / "one", **changes))
    for step, parallel, world_size in ((2, "fsdp", 2), (4, "ddp", 1), (6, "fsdp", 4), (8, "ddp", 2)):
        config = config_of(store, tmp_path / "all", parallel=parallel, **changes)
        ended = train_together(config, world_size, 2)
        assert newest_complete(tmp_path / "all")[0] == folder_of(tmp_path / "all", step)
        assert [type(end) for end in ended] == [dict if step == 8 else Interrupted] * world_size
    one, two = curve(tmp_path / "one"), curve(tmp_path / "all")
    assert one.keys() == two.keys()
    assert two == pytest.approx(one, rel=1e-4 if optimizer == "adamw" else 2e-2)


def test_one_process_has_nobody_to_share_with(store: Path, tmp_path: Path) -> None:
    done = run_command(command(config_of(store, tmp_path / "run"), "--parallel=fsdp"))
    assert done.returncode == ConfigRefused.exit_code
    assert "--parallel fsdp with 1 process" in done.stderr
    assert not (tmp_path / "run").exists()


# No two supervised tokens in a row: no anchor, however many of them there are.
LONELY = Text([1, 2, 3, 4] * 11, [1, 0] * 22)
LENGTH = 44


def lonely_seed(texts: list[Text], wanted: Callable[[list[list[bool]]], bool]) -> int:
    """A seed whose batches of two rows, a rank each, are empty of anchors as wanted: [batch][rank]."""
    lengths = [len(text.input_ids) for text in texts if text.split == "train"]
    trained = [text for text in texts if text.split == "train"]
    for seed in range(200):
        found = []
        rows = epoch_rows(lengths, 48, seed, 0)
        for batch in range(len(rows) // 2):
            ranks = [rank_rows(rows, batch, 2, rank, 2) for rank in range(2)]
            found.append([all(trained[p.document] is LONELY for row in mine for p in row) for mine in ranks])
        if wanted(found):
            return seed
    raise AssertionError("no such seed")


WITHOUT: dict[str, Callable[[list[list[bool]]], bool]] = {
    "one rank at step 1": lambda found: found[0] == [False, True],
    "the first rank at step 1": lambda found: found[0] == [True, False],
    "all ranks at step 1": lambda found: found[0] == [True, True],
    "one rank after resume": lambda found: found[0] == [False, False] and found[2] == [False, True],
    "all ranks after resume": lambda found: found[0] == [False, False] and found[2] == [True, True],
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", WITHOUT, ids=WITHOUT.keys())
def test_ranks_without_an_anchor_stay_in_step(tmp_path: Path, case: str, parallel: str) -> None:
    texts = [LONELY] * 5 + [counting_text(i, 1 + i % 3, 3, LENGTH - 3) for i in range(7)]
    texts.append(counting_text(2, 1, 3, LENGTH - 3, "heldout"))  # one row: the second rank has nothing to validate
    texts.append(Text(LONELY.input_ids, LONELY.loss_mask, "heldout"))
    store = make_store(tmp_path / "x.zarr", texts)
    changes = {"batch_rows": 2, "steps": 4, "eval_every": 2, "seed": lonely_seed(texts, WITHOUT[case])}
    run_here(config_of(store, tmp_path / "one", **changes))
    config = config_of(store, tmp_path / "all", parallel=parallel, **changes)
    if "resume" in case:
        assert [type(end) for end in train_together(config, 2, 2)] == [Interrupted] * 2
    assert train_together(config, 2) == [{}, {}]
    same_curves(tmp_path / "one", tmp_path / "all")
    states = [read_state(tmp_path / name) for name in ("one", "all")]
    assert states[0] == states[1]
    assert (states[1]["steps_without_labels"] > 0) >= case.startswith("all")
    assert states[1]["documents_without_anchors"] > 0


def read_state(run: Path) -> dict[str, Any]:
    """What the newest checkpoint counts."""
    from stage2_train.checkpoint_folder import read_info

    folder, _ = newest_complete(run)
    assert folder is not None
    state = read_info(folder)["loop_state"]
    return {
        key: state[key] for key in ("tokens", "steps_without_labels", "documents_without_anchors", "epoch", "batch")
    }


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_stored_number_that_is_not_finite_names_rank_row_and_document(tmp_path: Path, parallel: str) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(16), corrupt=5)
    before = read(tmp_path / "run", "checkpoints")
    ended = train_together(config_of(store, tmp_path / "run", parallel=parallel, save_every=1, keep=50), 2)
    assert before == []
    assert [type(end) for end in ended] == [NonFinite] * 2
    said = str(ended[0])
    assert said == str(ended[1])
    assert "non-finite loss on rank" in said
    assert "first bad gradient" in said
    assert "the stored features of row" in said
    assert "document 5 are not finite: extract it again" in said
    folder, _ = newest_complete(tmp_path / "run")
    if folder is not None:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(folder / "drafter.safetensors").values())


def break_teacher(patch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Stores made from now on have this number in the middle of the second document."""
    whole = toy_store.teacher_arrays

    def broken(ids: Any, topk: int, seed: int) -> dict[str, Any]:
        arrays = whole(ids, topk, seed)
        arrays[name][LENGTH + LENGTH // 2] = value
        return arrays

    patch.setattr(toy_store, "teacher_arrays", broken)


@pytest.mark.parametrize(
    ("name", "value"),
    [("topk_logits", 0x7FC0), ("topk_logits", 0x7F80), *(("logsumexp", float(bad)) for bad in ("nan", "inf", "-inf"))],
)
def test_a_teacher_that_is_not_finite_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    """+inf in logsumexp makes every loss finite and every probability of the teacher 0: it must be looked for."""
    break_teacher(monkeypatch, name, value)
    store = make_store(tmp_path / "x.zarr", [counting_text(i, 1, 3, LENGTH - 3) for i in range(4)], topk=4)
    with pytest.raises(NonFinite, match=r"before the update.*logits or logsumexp of row \d, document 1 are not finite"):
        run_here(config_of(store, tmp_path / "run", anchors=LENGTH - 4))


def test_all_ranks_name_the_one_that_read_a_broken_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_teacher(monkeypatch, "logsumexp", float("inf"))
    store = make_store(tmp_path / "x.zarr", [counting_text(i, 1, 3, LENGTH - 3) for i in range(4)], topk=4)
    ended = train_together(config_of(store, tmp_path / "run", anchors=LENGTH - 4), 2)
    assert [type(end) for end in ended] == [NonFinite] * 2
    assert str(ended[0]) == str(ended[1])
    assert "non-finite teacher on rank" in str(ended[0])
    assert "document 1 are not finite: extract it again" in str(ended[0])


def test_a_logit_of_minus_infinity_is_a_probability_of_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may forbid words; its store trains."""
    break_teacher(monkeypatch, "topk_logits", 0xFF80)
    store = make_store(tmp_path / "x.zarr", [counting_text(i, 1, 3, LENGTH - 3) for i in range(4)], topk=4)
    parts = run_here(config_of(store, tmp_path / "run", steps=2, anchors=LENGTH - 4))
    batch = parts.builder.build(epoch_rows(parts.builder.lengths(), 48, 0, 0)[:4], 0)
    assert not any(batch.broken_blocks(row).any() for row in range(4))


def spoil(parts: Any, rank: int, value: float) -> None:
    """Backward of one layer's MLP goes wrong on one rank, at its second step."""
    if parts.ranks.rank != rank:
        return
    calls = iter(range(100))

    def on_output(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad and next(calls) == 1:
            output.register_hook(lambda gradient: gradient * value)

    parts.drafter.layers[1].mlp.register_forward_hook(on_output)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_gradient_that_breaks_in_backward_names_the_parameter(
    store: Path, tmp_path: Path, parallel: str, value: float
) -> None:
    config = config_of(store, tmp_path / "run", parallel=parallel, save_every=1)
    ended = train_together(config, 2, before=partial(spoil, rank=1, value=value))
    assert [type(end) for end in ended] == [NonFinite] * 2
    said = str(ended[1])
    assert said == str(ended[0])
    where = "rank 1" if parallel == "ddp" else "a rank (fsdp keeps only sums over ranks)"
    assert said.startswith(f"non-finite gradient on {where} at step 1, before the update")
    assert "first bad gradient layers.1.mlp.down_proj.weight" in said
    assert "all stored features are finite" in said
    assert newest_complete(tmp_path / "run")[0] == folder_of(tmp_path / "run", 1)


def test_two_nodes_under_torchrun_train_what_one_process_does(store: Path, tmp_path: Path) -> None:
    """Two torchrun agents that meet at a port, as on two machines that share the run folder."""
    run_here(config_of(store, tmp_path / "one", **STEPS))
    port = free_port()
    config = config_of(store, tmp_path / "two")
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={node}",
                "--nproc-per-node=1",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                "-m",
                "--",
                *command(config, *(f"--{key.replace('_', '-')}={value}" for key, value in STEPS.items()))[2:],
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    same_curves(tmp_path / "one", tmp_path / "two")
    assert {record["state"] for record in read(tmp_path / "two", "runs")} == {"started", "finished"}


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])
PARALLEL = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@OPTIMIZERS
@PARALLEL
def test_two_gpus_train_what_one_does(store: Path, tmp_path: Path, parallel: str, optimizer: str) -> None:
    """In bf16 with flex_attention, so that every sum over ranks has its own rounding."""
    options = (f"--optimizer={optimizer}", f"--parallel={parallel}", "--nproc=2")
    same_on_gpus(store, tmp_path, command(config_of(store, tmp_path / "two"), *GPU_SHAPE, *options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@OPTIMIZERS
@PARALLEL
def test_two_ranks_on_one_gpu_train_what_one_does(
    store: Path, tmp_path: Path, parallel: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, summed over gloo: all but NCCL."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{os.environ.get('PYTHONPATH', '')}")
    options = (f"--optimizer={optimizer}", f"--parallel={parallel}", "--nproc=2")
    train = command(config_of(store, tmp_path / "two"), *GPU_SHAPE, *options)
    same_on_gpus(store, tmp_path, [sys.executable, str(here / "changed_worker.py"), "one_gpu:work", *train[3:]])


GPU_SHAPE = ("--device=cuda", "--max-length=200", "--anchors=24", "--block-size=8", "--head-dim=64")


def same_on_gpus(store: Path, folder: Path, two: list[str]) -> None:
    """Run one process, then the command `two` for FOLDER/two, with its optimizer: the same losses."""
    optimizer = next(option for option in two if option.startswith("--optimizer"))
    for line in (command(config_of(store, folder / "one"), *GPU_SHAPE, optimizer, "--nproc=1"), two):
        done = run_command(line)
        assert done.returncode == 0, done.stderr
    for name, split in (("loss", "train"), ("nll", "heldout")):
        alone, together = curve(folder / "one", name, split), curve(folder / "two", name, split)
        assert alone
        assert together == pytest.approx(alone, rel=2e-2)
    for name, ranks in (("one", 1), ("two", 2)):
        details = {event["event"]: event["detail"] for event in read(folder / name, "events")}
        assert (details["engine"]["attention"], details["engine"]["world_size"]) == ("flex", ranks)
        assert details["compiled"]["regions"]
