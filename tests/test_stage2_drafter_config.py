"""The drafter's config.json: what is written, what is read, what is refused, what is the default for a target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_drafter import CASES, FULL, SLIDING, config_of

from shared.errors import ConfigRefused
from stage2_train.config import TrainConfig
from stage2_train.drafter import Drafter
from stage2_train.drafter_config import DrafterConfig, drafter_geometry
from stage2_train.layer_types import expand_layer_types


@pytest.mark.parametrize("name", CASES)
def test_config_json_reads_back(name: str) -> None:
    assert DrafterConfig.from_hf_config(CASES[name].to_hf_config()) == CASES[name]


def test_old_and_new_config_schemas_mean_the_same() -> None:
    new = config_of(rope_theta=1e7).to_hf_config()
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dflash_config", "target_hidden_size")}
    old["dflash_config"] = {"mask_token_id": 49, "target_layer_ids": [1, 2]}
    only_new = {k: v for k, v in new.items() if k not in ("rope_theta", "rope_scaling", "block_size")}
    assert DrafterConfig.from_hf_config(old) == DrafterConfig.from_hf_config(only_new) == config_of(rope_theta=1e7)


def test_label_switches_are_written_only_when_on_and_read_back() -> None:
    plain, shifted, trained = config_of(), config_of(shift_labels=True), config_of(slot_0=True)
    assert (plain.slot_0, plain.first_draft) == (False, 1)
    assert (shifted.slot_0, shifted.first_draft) == (True, 0)
    assert (trained.shift_labels, trained.first_draft) == (False, 1)
    for config in (plain, shifted, trained):
        assert DrafterConfig.from_hf_config(config.to_hf_config()) == config
    switches = ("shift_labels", "slot_0", "sample_from_anchor")
    assert not {*switches} & {*plain.to_hf_config(), *plain.to_hf_config()["dflash_config"]}
    assert [shifted.to_hf_config()["dflash_config"][name] for name in switches] == [True] * 3
    foreign = plain.to_hf_config() | {"sample_from_anchor": True}
    assert DrafterConfig.from_hf_config(foreign).shift_labels


@pytest.mark.parametrize(
    ("short", "full"),
    [
        (("4xsliding", "full"), (SLIDING,) * 4 + (FULL,)),
        (("full", SLIDING, "2xfull_attention"), (FULL, SLIDING, FULL, FULL)),
        ((), ()),
        (("0xfull", "windowed"), ("windowed",)),
    ],
)
def test_layer_types_may_be_short(short: tuple[str, ...], full: tuple[str, ...]) -> None:
    assert expand_layer_types(short) == full
    assert TrainConfig(store="x", layer_types=short).layer_types == full


def test_layer_ids_are_never_guessed() -> None:
    config = config_of().to_hf_config()
    del config["dflash_config"]["target_layer_ids"]
    with pytest.raises(ConfigRefused, match="target_layer_ids"):
        DrafterConfig.from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 5}, "evenly"),
        ({"head_dim": 7}, "odd"),
        ({"block_size": 1}, "block_size 1"),
        ({"mask_token_id": 50}, "mask_token_id 50"),
        ({"layer_types": (FULL,)}, "one for each layer"),
        ({"layer_types": (SLIDING, FULL)}, "window"),
        ({"layer_types": ("linear", FULL)}, "unknown layer types"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"shift_labels": True, "slot_0": False}, "shifted labels without slot 0"),
    ],
)
def test_geometries_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigRefused, match=said):
        config_of(**changes)


def test_default_geometry_is_the_published_one_at_size_and_small_below() -> None:
    given_values = {"block_size": 16, "mask_token_id": 3, "target_layer_ids": (1, 2), "layer_types": None}
    large = drafter_geometry(
        {
            "text_config": {
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "vocab_size": 248320,
                "num_hidden_layers": 64,
                "head_dim": 256,
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            },
            "eos_token_id": 9,
        },
        given_values,
    )
    assert (large.num_attention_heads, large.num_key_value_heads, large.head_dim) == (32, 8, 128)
    assert (large.rope_theta, large.intermediate_size, large.num_hidden_layers, large.eos_token_id) == (
        1e7,
        17408,
        5,
        9,
    )
    assert sum(p.numel() for p in _meta(large).parameters()) == 1_730_213_120 + 5120 * 5120 * (2 - 5)
    small = drafter_geometry({"hidden_size": 576, "vocab_size": 100, "num_hidden_layers": 30}, given_values)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (8, 2, 64)
    assert small.intermediate_size == 3 * 576
    assert small.rope_theta == 10000.0


def _meta(config: DrafterConfig) -> Drafter:
    with torch.device("meta"):
        return Drafter(config)
