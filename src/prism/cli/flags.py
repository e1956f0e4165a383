"""Parse flags with tyro: the arguments of a command, or the settings of a training run."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from prism.cli import help
from prism.messages import did_you_mean
from prism.overrides import command_of, override, read_toml, short_field
from prism.train.settings import RunSettings

S = TypeVar("S", bound=RunSettings)
REGISTRY = ConstructorRegistry()
ASSIGNMENTS = ("--set", "--model.options", "--optimizer.groups", "--where")
"""Flags with a list of name=value."""


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> Any:
    """`X | None` is shown as X in the help (tyro: `{None}|X`); the word None is accepted as before."""
    options = get_args(info.type)
    if get_origin(info.type) not in (Union, types.UnionType) or len(options) != 2 or type(None) not in options:
        return None
    (option,) = (option for option in options if option is not type(None))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(option, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec) or spec.nargs != 1:
        return None
    return replace(
        spec,
        instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        choices=None if spec.choices is None else (*spec.choices, "None"),
    )


def run_command(function: Callable[..., int | None], name: str, arguments: Sequence[str]) -> int:
    """Call a function with its arguments from the command line; returns the exit code."""
    _check_assignments(arguments)
    result: int | None = tyro.cli(
        function, prog=f"prism {name}", args=list(arguments), description=_description(function), registry=REGISTRY
    )
    return result or 0


def parse_settings(
    arguments: Sequence[str], task: str, blank: S, preset: Callable[[str | None], S], usage: str = ""
) -> S:
    """Settings of a run: the preset (or the run folder's stored settings), then the TOML file, then the flags.

    Args:
        task: as in `prism train lm`.
        blank: the settings' defaults.
        preset: settings by name; None is the default preset.
        usage: what the help shows before the flags, such as ` [MODEL]`.
    """
    from prism.train.run import resumed_settings  # other commands start without the trainer

    _check_assignments(arguments)
    given = _early(arguments)
    toml = {} if given.config is None else read_toml(Path(given.config))
    override(blank, toml, str(given.config))  # reports errors in the file before any of it is used
    name: str | None = given.preset or toml.get("preset")
    stored = None if name else resumed_settings(Path(given.out or toml.get("out") or blank.out), task, blank)
    settings = override(stored or preset(name), toml, str(given.config))
    command, topic = command_of(task) + usage, help.asked(arguments)
    if topic == "":
        print(help.overview(command, _description(type(blank)), settings))
        raise SystemExit(0)
    if topic is not None and topic != help.ALL:
        help.show_group(topic, command, settings, REGISTRY)
    parsed, unknown = tyro.cli(
        type(blank),
        prog=command,
        args=["--help"] if topic == help.ALL else [_in_full(word, blank) for word in arguments],
        description=_description(type(blank)),
        default=settings,
        return_unknown_args=True,
        registry=REGISTRY,
    )
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0].replace("_", "-"), _flags(blank), str)
        raise ValueError(f"unknown setting {unknown[0]}{hint}; --help lists them all")
    parsed.check()
    return replace(parsed, config=None)  # the file is applied: a resumed run must not apply it again


def given_settings(arguments: Sequence[str], section: str) -> set[str]:
    """Names of a section's settings that the words of the command line or its TOML file give."""
    config, flag = _early(arguments).config, f"--{section}."
    found: Any = {} if config is None else read_toml(Path(config)).get(section, {})
    words = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith(flag)]
    return {*found, *(word.removeprefix(flag).removeprefix("no-").replace("-", "_") for word in words)}


def _early(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags that decide where the other settings start."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--out"):
        early.add_argument(flag)
    return early.parse_known_args(arguments)[0]


def _check_assignments(arguments: Sequence[str]) -> None:
    """Refuse a list of name=value that is given twice: tyro would drop the first one without a word."""
    given = [word.partition("=")[0] for word in arguments]
    double = next((flag for flag in ASSIGNMENTS if given.count(flag) > 1), None)
    if double is not None:
        raise ValueError(f"{double} is given twice: put all its values after one {double}")


def _in_full(word: str, settings: Any) -> str:
    """A word of the command line; the bare flag of a section becomes that of its short field: `--parallel.mode`."""
    flag, equals, value = word.partition("=")
    section = getattr(settings, flag.removeprefix("--").replace("-", "_"), None) if flag.startswith("--") else None
    short = short_field(section) if is_dataclass(section) else None
    return word if short is None else f"{flag}.{short.replace('_', '-')}{equals}{value}"


def _description(described: Any) -> str:
    """The docstring up to `Args:`, wrapped to the terminal and indented.

    tyro wraps no descriptions, joins lines that start with a letter, and doubles an empty line before one that does not.
    """
    text = inspect.cleandoc(described.__doc__ or "").partition("Args:")[0]
    width = shutil.get_terminal_size().columns
    parts = [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", text.strip())]
    return "\n".join(
        textwrap.fill(part, width, initial_indent="  ", subsequent_indent="    " if part.startswith("- ") else "  ")
        for part in parts
    )


def _flags(settings: Any, prefix: str = "--") -> list[str]:
    """All flags of nested settings, such as `--batch.micro`."""
    flags = []
    for field in fields(settings):
        value, flag = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if is_dataclass(value) else [flag]
    return flags
