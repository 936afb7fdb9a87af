"""What a device is asked about stage 1: a real target folder loaded and run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_target import save_target

from manifests import doctor_devices as judge
from manifests.doctor_ask import Answer, Question
from shared.errors import TargetNotFound
from stage1_extract import device_check


def test_a_target_is_loaded_and_run(tmp_path: Path) -> None:
    found = device_check.load(str(save_target(tmp_path / "target")), "cpu")
    assert (found["finite"], found["tokens"], found["dtype"]) == (True, 1024, "float32")
    assert found["bytes"] == 4 * found["parameters"]
    assert judge.judge_load("T", "cpu", Answer(1.0, value=found), Question(""), ()).verdict == "ok"


def test_no_target_is_its_own_fault(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound):
        device_check.load(str(tmp_path / "nothing"), "cpu")


def test_extra_kernels_are_imported_one_by_one() -> None:
    found = device_check.fast_paths()
    assert list(found) == ["flash-linear-attention", "causal-conv1d", "einops"]
    assert all(isinstance(why, str) for why in found.values())
