"""One declaration per knob: a dataclass field is the default, the help text and the command-line option.

Commands decorate their function with `options_of(Config)` and receive one frozen instance. A TOML file given
with --config sets defaults; an unknown key in it is refused. No torch here: `--help` must answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from shared.errors import ConfigRefused

ConfigT = TypeVar("ConfigT")
MISSING = dataclasses.MISSING


def knob(default: Any = MISSING, *, help: str, argument: bool = False, short: str = "") -> Any:
    """A config field.

    `help` states the unit. `argument` makes it positional; `short` adds e.g. "-n". No default means required.
    """
    metadata = {"help": help, "argument": argument, "short": short}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def same_knob(config_class: type, name: str) -> Any:
    """A field with the default and help text of another config's knob, for a command that takes the same option."""
    field = next(field for field in dataclasses.fields(config_class) if field.name == name)
    return knob(field.default, help=field.metadata["help"])


class _CommaSeparated(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """`1,9,17` to a tuple of the item type."""

    def __init__(self, item: type) -> None:
        self.item = item
        self.name = f"{item.__name__},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parts = value if isinstance(value, (tuple, list)) else [part for part in str(value).split(",") if part.strip()]
        try:
            return tuple(self.item(part) for part in parts)
        except (ValueError, TypeError):
            self.fail(f"{value!r} is not a comma-separated list of {self.item.__name__}", param, ctx)


class FilePath(click.Path):
    """A path on a disk.

    An empty one (an unset shell variable) would silently mean the working folder, and a bucket's address a folder "s3:"
    in it.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        if re.match(r"(s3|gs):/", str(value)):
            self.fail(f"{value} is in a bucket, a folder is needed; `dflash store push` and `pull` copy", param, ctx)
        return super().convert(value, param, ctx)


def _strip_optional(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def _click_type(hint: Any) -> Any:
    hint = _strip_optional(hint)
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in get_args(hint)])
    if get_origin(hint) is tuple:
        return _CommaSeparated(get_args(hint)[0])
    if hint is Path:
        return FilePath(path_type=Path, readable=False)  # what cannot be read is said by who reads it, with its code
    return hint


def _parameter(field: dataclasses.Field[Any], hint: Any) -> click.Parameter:
    required = field.default is MISSING and field.default_factory is MISSING
    if field.metadata.get("argument"):
        item = get_args(hint)[0] if get_origin(hint) is tuple else hint
        nargs = -1 if get_origin(hint) is tuple else 1
        return click.Argument([field.name], type=_click_type(item), nargs=nargs, required=required)
    dashed = "--" + field.name.replace("_", "-")
    names = [f"{dashed}/--no-{dashed[2:]}" if hint is bool else dashed, field.name]
    if field.metadata.get("short"):
        names.insert(0, field.metadata["short"])
    kind = None if hint is bool else _click_type(hint)
    text = field.metadata["help"]
    if required:  # click takes an explicit default=None for a value, so it must not be passed at all
        return click.Option(names, type=kind, required=True, help=text)
    factory: Any = field.default_factory
    default = field.default if field.default is not MISSING else factory()
    return click.Option(
        names, type=kind, default=default, help=text, show_default=default is not None and default != ()
    )


def knob_fields(config_class: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a config class with their resolved type hints."""
    hints = typing.get_type_hints(config_class)
    return [(field, hints[field.name]) for field in dataclasses.fields(config_class)]


def options_of(config_class: type[ConfigT]) -> Callable[[Callable[[ConfigT], Any]], Callable[..., Any]]:
    """Give a click command one option per knob of `config_class`; the function receives the instance.

    Also adds `--config FILE.toml`, whose values become defaults that the command line overrides.
    """

    def decorate(function: Callable[[ConfigT], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            for name, value in values.items():
                _refuse_impossible(name, value)
            return function(config_class(**values))

        parameters = [_parameter(field, hint) for field, hint in knob_fields(config_class)]
        parameters.append(
            click.Option(
                ["--config"],
                type=click.Path(path_type=Path, dir_okay=False),
                is_eager=True,
                expose_value=False,
                callback=_toml_defaults(config_class),
                help="TOML file with defaults for the options above.",
            )
        )
        wrapper.__click_params__ = list(reversed(parameters))  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _refuse_impossible(name: str, value: Any) -> None:
    """What no option can mean, whichever command it belongs to. Raises ConfigRefused."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigRefused(f"{option} is {value}; it must be a finite number")
    if name == "seed" and not 0 <= value < 2**63:
        raise ConfigRefused(f"--seed is {value}; it must lie in 0..2^63-1")
    if name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ConfigRefused(f"--device is {value!r}; it must be auto, cpu, cuda or cuda:N")
    if isinstance(value, str) and not value.strip():
        raise ConfigRefused(f"{option} is empty; give it a value or leave it out")


def _toml_defaults(config_class: type) -> Callable[[click.Context, click.Parameter, Path | None], None]:
    def callback(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        if not path.is_file():
            raise ConfigRefused(f"config file {path} does not exist")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigRefused(f"config file {path} is not TOML: {error}") from error
        known = {field.name for field in dataclasses.fields(config_class)}
        unknown = sorted(key for key in values if key.replace("-", "_") not in known)
        if unknown:
            raise ConfigRefused(f"config file {path} has unknown keys {unknown}; known: {sorted(known)}")
        values = {key.replace("-", "_"): value for key, value in values.items()}
        for field, hint in knob_fields(config_class):
            _refuse_wrong_type(field.name, values.get(field.name), hint, path)
        ctx.default_map = {**(ctx.default_map or {}), **values}

    return callback


def _refuse_wrong_type(name: str, value: Any, hint: Any, path: Path) -> None:
    """TOML has types, and click converts text: a list for a single value, or a table, is refused here."""
    several = get_origin(_strip_optional(hint)) is tuple
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        raise ConfigRefused(f"config file {path}: {name} is a {type(value).__name__}, one value is expected")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values (paths as text, tuples as lists)."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    return value


def from_dict(config_class: type[ConfigT], values: dict[str, Any]) -> ConfigT:
    """The inverse of `to_dict`; unknown keys are refused with ConfigRefused."""
    hints = dict((field.name, hint) for field, hint in knob_fields(config_class))
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigRefused(f"unknown keys {unknown} for {config_class.__name__}; known: {sorted(hints)}")
    return config_class(**{name: _typed(value, hints[name]) for name, value in values.items()})


def _typed(value: Any, hint: Any) -> Any:
    hint = _strip_optional(hint)
    if value is None:
        return None
    if hint is Path:
        return Path(value)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(item(part) for part in value)
    return value
