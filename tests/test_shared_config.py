"""One declaration per knob: options, TOML defaults and the JSON form all come from the dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from shared.config import from_dict, knob, options_of, to_dict
from shared.errors import ConfigRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    data: tuple[Path, ...] = knob((), help="Files.", argument=True)
    store: Path = knob(help="Store folder.")
    target_layer_ids: tuple[int, ...] = knob((), help="Layers.")
    steps: int | None = knob(None, help="Steps.")
    rate: float = knob(6e-4, help="Rate.")
    fused: bool = knob(True, help="Fused.")
    mode: Literal["refuse", "skip"] = knob("refuse", help="Mode.")


def invoke(*arguments: str) -> Any:
    seen: list[Example] = []

    @click.command()
    @options_of(Example)
    def command(config: Example) -> None:
        seen.append(config)

    result = CliRunner().invoke(command, arguments)
    return seen[0] if seen else result


def test_every_knob_is_an_option_and_arrives_typed() -> None:
    config = invoke(
        "a", "b", "--store", "x.zarr", "--target-layer-ids", "1,9, 17", "--steps", "5", "--no-fused", "--mode", "skip"
    )
    assert config == Example(
        data=(Path("a"), Path("b")),
        store=Path("x.zarr"),
        target_layer_ids=(1, 9, 17),
        steps=5,
        fused=False,
        mode="skip",
    )
    assert invoke("--store", "x").steps is None


def test_usage_errors_exit_2() -> None:
    for arguments in (
        (),
        ("--store", "x", "--mode", "maybe"),
        ("--store", "x", "--target-layer-ids", "1,b"),
        ("--store", "x", "--bogus", "1"),
    ):
        assert invoke(*arguments).exit_code == 2


def test_toml_gives_defaults_that_the_command_line_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('store = "from-toml"\nsteps = 7\ntarget-layer-ids = [2, 4]\nfused = false\n')
    config = invoke("--config", str(file), "--steps", "9")
    assert (config.store, config.steps, config.target_layer_ids, config.fused) == (Path("from-toml"), 9, (2, 4), False)


def test_unknown_toml_key_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("learning_rte = 1\n")
    result = invoke("--config", str(file))
    assert isinstance(result.exception, ConfigRefused)
    assert "learning_rte" in str(result.exception)


def test_json_round_trip_and_unknown_keys() -> None:
    config = Example(data=(Path("a"),), store=Path("s"), target_layer_ids=(1,), steps=None)
    assert from_dict(Example, to_dict(config)) == config
    with pytest.raises(ConfigRefused) as caught:
        from_dict(Example, {"store": "s", "stpes": 1})
    assert "stpes" in str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_refused_for_every_command(value: str) -> None:
    refused = invoke("--store", "x", f"--rate={value}").exception
    assert isinstance(refused, ConfigRefused)
    assert "--rate is" in str(refused)


def test_an_empty_path_is_not_the_working_folder() -> None:
    for arguments in (("--store", ""), ("", "--store", "x")):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "the path is empty" in refused.output


def test_a_bucket_is_not_a_folder_named_after_its_scheme() -> None:
    for address in ("s3://bucket/x.zarr", "gs://bucket/x.zarr"):
        refused = invoke("--store", address)
        assert refused.exit_code == 2
        assert "is in a bucket, a folder is needed" in refused.output


@pytest.mark.parametrize(
    ("text", "said"), [('rate = ["a"]', "rate is a list"), ("[rate]\na = 1", "rate is a dict"), (b"\xff", "not TOML")]
)
def test_toml_of_another_type_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    refused = invoke("--store", "x", "--config", str(path)).exception
    assert isinstance(refused, ConfigRefused)
    assert said in str(refused)


@pytest.mark.parametrize(("name", "value"), [("device", "warp"), ("device", "cuda:x"), ("seed", -1), ("seed", 2**63)])
def test_devices_and_seeds_mean_the_same_in_every_command(name: str, value: object) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        device: str = knob("auto", help="Where.")
        seed: int = knob(0, help="Which.")

    @click.command()
    @options_of(Odd)
    def command(config: Odd) -> None:
        raise AssertionError(config)

    with pytest.raises(ConfigRefused, match=f"--{name} is"):
        command.main([f"--{name}={value}"], standalone_mode=False)
