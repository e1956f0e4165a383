"""Help of commands with many settings, in groups that fit a screen: an overview, then one group at a time.

prism train lm --help           the groups and the names of their settings
prism train lm --help model     one group: every setting with its meaning and default
prism train lm --help all       everything
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry

from prism.messages import did_you_mean
from prism.train.settings import RunSettings

ALL, RUN, SPEED = "all", "run", "speed"
"""Topics: everything, and the settings that are in no section."""
OF_SPEED = ("device", "precision", "compile", "recompute", "graph")
"""Settings in no section that the help shows as a group, to keep the rest on one screen."""
LARGEST = 13
"""Settings of a group, at most: longer sections are shown in several, such as data, data-2."""
WIDTH = 80
Path = tuple[str, ...]
"""A setting: the names of its sections, then its own."""


def asked(arguments: Sequence[str]) -> str | None:
    """The topic after --help or -h, "" without one; None if no help is wanted."""
    place = next((i for i, word in enumerate(arguments) if word in ("-h", "--help")), None)
    if place is None:
        return None
    following = arguments[place + 1 : place + 2]
    return "" if not following or following[0].startswith("-") else following[0]


def groups_of(settings: RunSettings) -> dict[str, list[Path]]:
    """All settings by group; those of no section come first."""
    groups: dict[str, list[Path]] = {RUN: [], SPEED: []}
    for path in _paths(settings):
        outside = SPEED if path[0] in OF_SPEED else RUN
        groups.setdefault(_flag(".".join(path[:-1])) if len(path) > 1 else outside, []).append(path)
    pages: dict[str, list[Path]] = {}
    for group, paths in groups.items():
        count = -(-len(paths) // LARGEST)
        for page in range(count):
            part = paths[len(paths) * page // count : len(paths) * (page + 1) // count]
            pages[group + (f"-{page + 1}" if page else "")] = part
    return pages


def _paths(settings: Any, sections: Path = ()) -> Iterator[Path]:
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), (*sections, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, path)
        else:
            yield path


def flag_of(path: Path) -> str:
    """A setting as it is written on the command line, such as `--model.hidden-size`."""
    return "--" + _flag(".".join(path))


def overview(command: str, description: str, settings: RunSettings) -> str:
    """The groups of a command's settings, with the names in each."""
    groups = groups_of(settings)
    first = max(map(len, groups)) + 4
    lines = [f"usage: {command} [--SETTING VALUE ...] [-h [GROUP]]", "", description, "", "settings by group:"]
    for group, paths in groups.items():
        shown = ", ".join([flag_of(paths[0]), *(_flag(path[-1]) for path in paths[1:])])
        begin, indent = f"  {group:<{first - 2}}", " " * first
        width = min(WIDTH, shutil.get_terminal_size().columns)
        lines += textwrap.wrap(shown, width, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)
    lines += ["", f"`{command.partition(' [')[0]} --help GROUP` explains a group, `--help {ALL}` everything."]
    return "\n".join(lines)


class _Page(io.StringIO):
    """What is printed, in the characters and colours that the terminal can show."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "ascii"

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def show_group(topic: str, command: str, settings: RunSettings, registry: ConstructorRegistry) -> NoReturn:
    """Print the help of one group, and exit; ValueError for a topic that is no group."""
    groups = groups_of(settings)
    known = [*groups, ALL]
    if topic not in known:
        raise ValueError(f"no help on {topic!r}{did_you_mean(topic, known)}: choose from {', '.join(known)}")
    default = _showing(set(groups[topic]), settings)
    page = _Page()
    with redirect_stdout(page), suppress(SystemExit):
        tyro.cli(type(default), prog=command, args=["--help"], description="", default=default, registry=registry)
    _, _, rest = page.getvalue().partition("\n")  # tyro's usage may be wider than the screen
    print(f"usage: {command} [--SETTING VALUE ...]\n{rest}", end="")
    raise SystemExit(0)


_made: list[type] = []
"""Types made here, kept alive: tyro caches what it knows of a type by its id."""


def _showing(shown: set[Path], settings: Any, sections: Path = ()) -> Any:
    """The settings as an instance of a subclass whose help has these settings only."""
    kind = type(settings)
    hints, changed, values = get_type_hints(kind, include_extras=True), list[Any](), dict[str, Any]()
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), (*sections, field.name)
        inside = dataclasses.is_dataclass(value)
        if inside and any(one[: len(path)] == path for one in shown):
            value = _showing(shown, value, path)
            annotation: Any = type(value)
        elif path in shown:
            annotation = None
        else:
            annotation = Annotated[type(value) if inside else hints[field.name], tyro.conf.Suppress]
        values[field.name] = value
        if annotation is not None:
            default: Any = dataclasses.field(default_factory=partial(_same, value))
            changed.append((field.name, annotation, default))
    made = dataclasses.make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    _made.append(made)
    return made(**values)


def _same(value: Any) -> Any:
    return value


def _flag(name: str) -> str:
    return name.replace("_", "-")
