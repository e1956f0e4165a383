"""Apply values from a TOML or JSON file to settings, and turn settings back into a command line.

Unknown names and wrong types raise a ValueError of one sentence.
"""

from __future__ import annotations

import shlex
import tomllib
import types
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prism.messages import did_you_mean

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no settings file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path} is not a TOML file: {error}") from error


def read_toml_value(text: str) -> Any:
    """Parse one TOML value; text that is not valid TOML, such as a bare word, is returned as a string.

    True and False, as Python writes them, are no strings: a switch that is one would count as set.
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(settings: T, values: dict[str, Any], where: str, prefix: str = "") -> T:
    """A copy of `settings` with the nested `values` applied.

    Args:
        where: the source of the values, for error messages.
        prefix: the section that these settings are, such as `model.`.
    """
    assert is_dataclass(settings) and not isinstance(settings, type)
    hints = get_type_hints(type(settings))
    known = [field.name for field in fields(settings)]
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if key not in known:
            hint = did_you_mean(key, known, lambda meant: prefix + meant)
            choices = "" if hint else f": choose from {', '.join(known)}"
            raise ValueError(f"{where} has a setting {name} that does not exist{hint}{choices}")
        current = getattr(settings, key)
        if is_dataclass(current):
            short = short_field(current)
            if not isinstance(value, dict):
                if short is None:
                    raise ValueError(f"{where}: {name} is a section of settings, got {value!r}")
                value = {short: value}
            changes[key] = override(current, value, where, f"{name}.")
        else:
            try:
                changes[key] = _convert(hints[key], value)
            except TypeError as error:
                raise ValueError(f"{where}: {name} must be {error}, got {value!r}") from None
    changed: T = replace(settings, **changes)
    return changed


def short_field(section: Any) -> str | None:
    """The field that the bare name of a section sets (`metadata={"short": True}`); None if it has none."""
    return next((field.name for field in fields(section) if "short" in field.metadata), None)


def to_plain(settings: Any) -> Any:
    """Settings as nested dicts of JSON and TOML types; `override` reads them back."""
    if is_dataclass(settings):
        return {field.name: to_plain(getattr(settings, field.name)) for field in fields(settings)}
    if isinstance(settings, tuple):
        return list(settings)
    return str(settings) if isinstance(settings, Path) else settings


def _convert(hint: Any, value: Any) -> Any:
    """The value converted to a field's type; the TypeError says what was expected."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _convert(hint, value)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"one of {', '.join(arguments)}")
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError({int: "an integer", float: "a number", bool: "true or false"}.get(hint, "a string"))
    return value


def _convert_tuple(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError("a list")
    if arguments[-1] is not Ellipsis and len(value) != len(arguments):
        raise TypeError(f"a list of {len(arguments)}")
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
    return tuple(_convert(kind, item) for kind, item in zip(kinds, value, strict=True))


def command_of(task: str) -> str:
    """The command that trains for a task, such as `prism train lm`."""
    return "prism adapt" if task == "adapt" else f"prism train {task}"


def train_command(task: str, settings: Any, start: Any) -> str:
    """The command that gives `settings`: the flags that differ from `start`, their preset."""
    words = [*command_of(task).split(), *(["--preset", settings.preset] if settings.preset else [])]
    return shlex.join([*words, *_differences(to_plain(start), to_plain(settings), "--")])


def _differences(start: dict[str, Any], now: dict[str, Any], prefix: str) -> list[str]:
    """Flags for the values in which two nested dicts differ."""
    words: list[str] = []
    for key, value in now.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            words += _differences(start[key], value, f"{prefix}{name}.")
        elif value == start[key] or key == "preset":
            continue
        elif isinstance(value, bool):
            words += [f"{prefix}{name if value else f'no-{name}'}"]
        else:
            words += [f"{prefix}{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
