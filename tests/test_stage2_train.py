"""The training loop on a small store: what it learns, records, and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_run import ALONE, SMALL, command, config_of, curve, run_command, run_here
from toy_store import HIDDEN, MASK, VOCAB, Text, counting_text, counting_texts, make_store

from manifests.commit import read
from shared.errors import (
    ConfigRefused,
    DflashError,
    MaskTokenInUse,
    MaskTokenOutOfRange,
    NonFinite,
    NothingLeft,
    PathNotWritable,
    StoreIncomplete,
    StoreMissing,
)
from shared.json_file import sealed
from shared.kernel import Kernel
from shared.store import TeacherStore
from stage2_train import launch_train
from stage2_train.checkpoint_folder import newest_complete
from stage2_train.config import TrainConfig
from stage2_train.estimate import estimate
from stage2_train.selection import MASKS_READ, has_an_anchor, open_store, select
from stage2_train.training_summary import finish


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "toy.zarr", counting_texts(32), blocks=2)


def test_one_document_is_learnt_until_every_slot_is_right(tmp_path: Path) -> None:
    text = counting_text(3, 2, 4, 30)
    store = make_store(tmp_path / "x.zarr", [text])
    parts = run_here(
        config_of(
            store,
            tmp_path / "run",
            steps=150,
            batch_rows=1,
            anchors=29,
            eval_every=1000,
            save_every=1000,
            log_every=50,
            learning_rate=1e-2,
        )
    )
    found = estimate(parts.drafter, parts.builder, parts.share, parts.engine, ALONE)
    assert all(found[f"accuracy_slot_{slot:02d}"] == 1.0 for slot in (1, 2, 3))
    # 29 anchors, of which the last two reach only 2 and 1 more tokens: 1 + 3 drafted tokens otherwise.
    assert found["tokens_per_block"] == pytest.approx((27 * 4 + 3 + 2) / 29)
    # Decoding the 29 tokens after the first one: 7 full cycles and one that the end cuts to 1.
    assert found["acceptance_length_estimate"] == pytest.approx(29 / 8)


def test_the_targets_tables_are_not_trained_and_not_saved(store: Path, tmp_path: Path) -> None:
    parts = run_here(config_of(store, tmp_path / "run", steps=3))
    tables = open_store(store).load_head()
    assert torch.equal(parts.engine.embed_tokens, tables["embed_tokens"].float())
    assert torch.equal(parts.engine.head.weight, tables["lm_head"].float())
    folder, _ = newest_complete(tmp_path / "run")
    assert folder is not None
    assert not any("embed" in name or "head" in name for name in load_file(folder / "drafter.safetensors"))


def test_records_hold_the_curve_the_estimates_and_the_engine(store: Path, tmp_path: Path) -> None:
    run_here(config_of(store, tmp_path / "run"))
    assert sorted(curve(tmp_path / "run")) == list(range(1, 11))
    assert sorted(curve(tmp_path / "run", "acceptance_length_estimate", "heldout")) == [0, 4, 8, 10]
    assert sorted(r["global_step"] for r in read(tmp_path / "run", "checkpoints")) == [4, 8, 10]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [f"step-{n:08d}" for n in (4, 8, 10)]
    events = {r["event"]: r["detail"] for r in read(tmp_path / "run", "events")}
    assert events["engine"]["attention"] == "sdpa"
    assert events["data"]["documents"] == 24
    for name in (
        "accuracy_slot_01",
        "acceptance_slot_03",
        "learning_rate",
        "grad_norm",
        "anchor_coverage",
    ):
        assert len(curve(tmp_path / "run", name)) == 10


def test_a_store_without_held_out_documents_is_said(tmp_path: Path) -> None:
    run_here(config_of(make_store(tmp_path / "x.zarr", [counting_text(0, 1, 3, 20)]), tmp_path / "run", steps=2))
    assert "no held-out documents" in {r["event"] for r in read(tmp_path / "run", "events")}
    assert curve(tmp_path / "run", "acceptance_length_estimate", "heldout") == {}


def test_a_bad_feature_stops_the_run_before_the_update(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(12), corrupt=5)
    run = config_of(store, tmp_path / "run", max_length=41, batch_rows=1, steps=40, save_every=1, keep=50)
    with pytest.raises(
        NonFinite, match=r"rank 0 at step \d+, before the update; first bad gradient fc.weight; .* document \d+ are not"
    ):
        run_here(run)
    folder, _ = newest_complete(tmp_path / "run")
    if folder is not None:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(folder / "drafter.safetensors").values())


def test_all_processes_stop_at_a_bad_feature_and_name_its_rank(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(16), corrupt=5)
    done = run_command(command(config_of(store, tmp_path / "run"), "--nproc=2"))
    assert done.returncode == NonFinite.exit_code, done.stderr
    assert "first bad gradient fc.weight" in done.stderr
    assert "on rank" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_without_labels_updates_nothing_and_is_counted(tmp_path: Path) -> None:
    lonely = Text([1, 2, 3, 4] * 12, [1, 0] * 24)
    store = make_store(tmp_path / "x.zarr", [lonely, lonely, counting_text(0, 1, 3, 40)])
    parts = run_here(config_of(store, tmp_path / "run", batch_rows=1, steps=9, save_every=9))
    folder, _ = newest_complete(tmp_path / "run")
    assert folder is not None
    state = json.loads((folder / "checkpoint.json").read_text())["loop_state"]
    assert state["steps_without_labels"] == 6
    assert state["documents_without_anchors"] == 6
    assert len(curve(tmp_path / "run")) == 3  # nothing measured, nothing recorded: not a loss of 0
    assert {float(p["step"]) for p in parts.optimizer.parts["adamw"].state.values()} == {3.0}


REFUSED: list[tuple[str, dict[str, Any], type[DflashError]]] = [
    ("no store", {"store": Path("nowhere.zarr")}, StoreMissing),
    ("mask token without a row", {"mask_token_id": VOCAB}, MaskTokenOutOfRange),
    ("run below a file", {"run": Path("/dev/null/run")}, PathNotWritable),
    ("another width than the target's", {"hidden_size": HIDDEN * 2}, ConfigRefused),
    ("heads that do not divide", {"num_heads": 3, "num_kv_heads": 2}, ConfigRefused),
    ("flex on a CPU", {"attention": "flex"}, ConfigRefused),
]


@pytest.mark.parametrize(("changes", "error"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_work_is_refused_and_leaves_nothing(
    store: Path, tmp_path: Path, changes: dict[str, Any], error: type[DflashError]
) -> None:
    with pytest.raises(error):
        run_here(TrainConfig(**{"store": store, "run": tmp_path / "run", **SMALL, **changes}))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_command_says_one_line_and_its_exit_code(tmp_path: Path) -> None:
    config = config_of(tmp_path / "nowhere.zarr", tmp_path / "run")
    done = run_command(command(config))
    assert done.returncode == StoreMissing.exit_code
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "nowhere.zarr") in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_store_with_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", [counting_text(0, 1, 3, 20, "heldout"), Text([1, 2, 3], [0, 0, 1])])
    with pytest.raises(NothingLeft):
        run_here(config_of(store, tmp_path / "run"))
    (store / "plan.json").write_text(json.dumps(sealed({"blocks": [[0, 2], [2, 3]]})))
    with pytest.raises(StoreIncomplete):
        run_here(config_of(store, tmp_path / "run"))


LONELY = Text([1, 2, 3, 4], [1, 0, 1, 0])  # two supervised tokens, never two in a row


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([counting_text(number, 1, 30, 10) for number in range(3)], id="prompts fill the row"),
        pytest.param([LONELY] * 3, id="never two in a row"),
    ],
)
def test_documents_without_an_anchor_are_refused_before_the_start(texts: list[Text], tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", texts)
    with pytest.raises(NothingLeft, match=r"two supervised tokens in a row among its first 16 \(--max-length\)"):
        run_here(config_of(store, tmp_path / "run", max_length=16))
    assert not (tmp_path / "run").exists()


def test_masks_are_read_only_until_the_first_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gap = Text([1] * 9, [1, 1, 0, 0, 0, 0, 0, 0, 1])  # so few that only the mask tells
    read_masks: list[int] = []
    real = TeacherStore.read_document
    monkeypatch.setattr(
        TeacherStore,
        "read_document",
        lambda self, ref, *rest: (read_masks.append(ref.index), real(self, ref, *rest))[1],
    )
    for number, (texts, max_length, want, looked_at) in enumerate(
        [
            ([LONELY, counting_text(0, 1, 3, 20)], 48, True, []),  # by the numbers of tokens alone
            ([LONELY, gap, gap, LONELY], 48, True, [0, 1]),
            ([counting_text(0, 1, 7, 2)], 8, False, [0]),  # one of its two supervised tokens is cut off
            ([LONELY] * (MASKS_READ + 1), 48, None, list(range(MASKS_READ))),
        ]
    ):
        store = open_store(make_store(tmp_path / f"{number}.zarr", texts))
        read_masks.clear()
        assert has_an_anchor(store, select(store, "train")[0], max_length) is want
        assert read_masks == looked_at


def test_an_epoch_without_a_label_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    """Too many documents to look at beforehand: 257 of 4 tokens are 22 rows, 6 steps."""
    store = make_store(tmp_path / "x.zarr", [LONELY] * (MASKS_READ + 1))
    done = run_command(command(config_of(store, tmp_path / "run"), "--nproc=2"))
    assert done.returncode == NothingLeft.exit_code, done.stderr
    assert "none of the first 7 steps had a label: " in done.stderr
    with pytest.raises(NothingLeft, match="none of the first 3 steps had a label"):  # no epoch, but all of the run
        run_here(config_of(store, tmp_path / "short", steps=3))
    assert newest_complete(tmp_path / "short")[0] is None


def test_the_summary_says_what_was_not_trained_and_not_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [LONELY, counting_text(0, 1, 3, 20), counting_text(0, 1, 30, 10, "heldout")]
    store = make_store(tmp_path / "x.zarr", texts)
    run_here(config_of(store, tmp_path / "run", max_length=23, batch_rows=1, steps=4))
    capsys.readouterr()
    finish(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "none: no held-out document has two supervised tokens in a row among its first 23 (--max-length)" in said
    assert "2 of 4: they trained nothing" in said
    run_here(config_of(make_store(tmp_path / "y.zarr", texts[1:2]), tmp_path / "other", steps=1))
    capsys.readouterr()
    finish(tmp_path / "other")
    said = " ".join(capsys.readouterr().out.split())
    assert "none: the store has no held-out document with two supervised tokens" in said
    assert "without a label" not in said


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"batch_rows": 3, "nproc": 2},
        {"micro_rows": 3},
        {"block_size": 1},
        {"max_length": 4},
        {"clip": 0.0},
        {"warmup_ratio": 1.5},
        {"gamma": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 1e38},
        {"weight_decay": -1.0},
        {"weight_decay": float("nan")},
        {"weight_decay": 1e4, "learning_rate": 1e-3},
        {"keep": 0},
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigRefused):
        config_of(Path("x.zarr"), Path("run"), **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"soft_weight": 0.3, "loss": "kl"}, "--soft-weight 0.3 belongs to --loss mixed, this is --loss kl"),
        ({"gamma": 4.0, "weighting": "dpace"}, "--gamma 4.0 belongs to --weighting decay, this is --weighting dpace"),
        ({"alpha": 0.1, "weighting": "decay"}, "--alpha 0.1 belongs to --weighting dpace"),
        ({"decay_ratio": 0.5}, "--decay-ratio 0.5 belongs to --schedule wsd, this is --schedule cosine: leave it out"),
        ({"decay_shape": "linear"}, "--decay-shape linear belongs to --schedule wsd"),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigRefused, match=said):
        config_of(Path("x.zarr"), Path("run"), **changes)
    masters = {"soft_weight": "loss", "gamma": "weighting", "alpha": "weighting"}
    choices = {"soft_weight": "mixed", "gamma": "decay", "alpha": "dpace"}
    name = next(iter(changes))
    config_of(Path("x.zarr"), Path("run"), **changes | {masters.get(name, "schedule"): choices.get(name, "wsd")})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_length": 10**9}, "--max-length 1,000,000,000 takes 128 GB for one row, this machine has 16 GB; lower"),
        ({"anchors": 10**9}, "--anchors 1,000,000,000 takes 36 GB for one row, this machine has 16 GB; lower it"),
    ],
)
def test_a_row_that_no_memory_holds_is_refused(
    changes: dict[str, Any], said: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"current": 0, "max": 16 * 10**9, "available": 1, "total": 64 * 10**9}
    monkeypatch.setattr(Kernel, "memory", lambda self: memory)
    with pytest.raises(ConfigRefused, match=said):
        launch_train.check(config_of(store, tmp_path / "run", **changes))
    memory.update(max=None, total=None)  # unknown: nothing is said
    launch_train.check(config_of(store, tmp_path / "run", **changes))


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (31, 14.0)])
def test_gamma_follows_the_block_size(block_size: int, gamma: float) -> None:
    assert config_of(Path("x"), Path("y"), block_size=block_size).decay_gamma() == pytest.approx(gamma)


def test_defaults_are_the_papers() -> None:
    config = TrainConfig(store=Path("runs/x.zarr"))
    assert (config.learning_rate, config.warmup_ratio, config.clip, config.weight_decay) == (6e-4, 0.04, 1.0, 0.0)
    assert (config.block_size, config.num_layers, config.anchors, config.max_length, config.epochs) == (
        16,
        5,
        512,
        3072,
        6,
    )
    assert config.run_dir() == Path("runs/x-train")


def test_toy_store_is_what_the_tests_think(store: Path) -> None:
    opened = open_store(store)
    assert opened.identity["mask_token_id"] == MASK
    assert (len(select(opened, "train")[0]), len(select(opened, "heldout")[0])) == (24, 8)


def test_a_mask_token_in_use_is_refused(store: Path, tmp_path: Path) -> None:
    used = int(
        open_store(store).read_document(select(open_store(store), "train")[0][0], ("input_ids",))["input_ids"][0]
    )
    with pytest.raises(MaskTokenInUse, match=f"mask token {used} "):
        run_here(config_of(store, tmp_path / "run", mask_token_id=used))
    assert not (tmp_path / "run").exists()


DAMAGE = [
    ("store.json", b"[]", 32),
    ("store.json", b"{}", 30),
    ("target/config.json", b"{", 32),
    ("target/head.safetensors", b"\xff" * 64, 32),
    ("plan.json", b"{", 32),
]


@pytest.mark.parametrize(("name", "content", "code"), DAMAGE, ids=[f"{case[0]}-{case[1][:2]!r}" for case in DAMAGE])
def test_a_damaged_store_is_one_line(tmp_path: Path, name: str, content: bytes, code: int) -> None:
    store = make_store(tmp_path / "x.zarr", counting_texts(4))
    (store / name).write_bytes(content)
    with pytest.raises(DflashError, match=name if code == 32 else "format") as caught:
        run_here(config_of(store, tmp_path / "run"))
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("changes", "device", "rows"),
    [
        ({}, "cuda", 8),
        ({}, "cpu", 1),  # a row of 3,072 tokens and 512 x 16 slots; eight took 21 GB
        ({"max_length": 1024, "anchors": 64}, "cpu", 8),
        ({"max_length": 1024, "anchors": 256}, "cpu", 2),
        ({"micro_rows": 4}, "cpu", 4),
        ({"micro_rows": 2}, "cuda", 2),
        ({"max_length": 100_000}, "cpu", 1),
        ({"batch_rows": 7, "max_length": 2000, "anchors": 50}, "cpu", 1),
    ],
    ids=str,
)
def test_a_pass_on_a_cpu_has_as_many_rows_as_its_memory_holds(
    tmp_path: Path, changes: dict[str, Any], device: str, rows: int
) -> None:
    assert TrainConfig(store=tmp_path / "x.zarr", **changes).rows_per_pass(1, device) == rows
