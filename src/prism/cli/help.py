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
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
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
Places = list[tuple[str | None, str]]
"""Section (None: in no section) and name of settings."""


def asked(arguments: Sequence[str]) -> str | None:
    """The topic after --help or -h, "" without one; None if no help is wanted."""
    place = next((i for i, word in enumerate(arguments) if word in ("-h", "--help")), None)
    if place is None:
        return None
    following = arguments[place + 1 : place + 2]
    return "" if not following or following[0].startswith("-") else following[0]


def groups_of(settings: RunSettings) -> dict[str, Places]:
    """All settings by group; those of no section come first."""
    groups: dict[str, Places] = {RUN: [], SPEED: []}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not dataclasses.is_dataclass(value):
            groups[SPEED if field.name in OF_SPEED else RUN].append((None, field.name))
            continue
        places: Places = [(field.name, part.name) for part in dataclasses.fields(value)]
        pages = -(-len(places) // LARGEST)
        for page in range(pages):
            name = _flag(field.name) + (f"-{page + 1}" if page else "")
            groups[name] = places[len(places) * page // pages : len(places) * (page + 1) // pages]
    return groups


def flag_of(section: str | None, name: str) -> str:
    """A setting as it is written on the command line, such as `--model.hidden-size`."""
    return f"--{_flag(name)}" if section is None else f"--{_flag(section)}.{_flag(name)}"


def overview(command: str, description: str, settings: RunSettings) -> str:
    """The groups of a command's settings, with the names in each."""
    groups = groups_of(settings)
    first = max(map(len, groups)) + 4
    lines = [f"usage: {command} [--SETTING VALUE ...] [-h [GROUP]]", "", description, "", "settings by group:"]
    for group, places in groups.items():
        shown = ", ".join([flag_of(*places[0]), *(_flag(name) for _, name in places[1:])])
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
    kind, default = only(groups[topic], settings)
    page = _Page()
    with redirect_stdout(page), suppress(SystemExit):
        tyro.cli(kind, prog=command, args=["--help"], description="", default=default, registry=registry)
    _, _, rest = page.getvalue().partition("\n")  # tyro's usage may be wider than the screen
    print(f"usage: {command} [--SETTING VALUE ...]\n{rest}", end="")
    raise SystemExit(0)


def only(places: Places, settings: RunSettings) -> tuple[Any, Any]:
    """The type of the settings with all but some hidden from the help, and the settings as its default."""
    parts = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and any(section == field.name for section, _ in places):
            parts[field.name] = _showing({name for section, name in places if section == field.name}, value, {})
    shown = {name for section, name in places if section is None}
    made = _showing(shown, settings, parts)
    return type(made), made


_made: list[type] = []
"""Types made here, kept alive: tyro caches what it knows of a type by its id."""


def _showing(names: set[str], settings: Any, parts: dict[str, Any]) -> Any:
    """The settings as an instance of a subclass that hides all fields but `names` and `parts`, which replace its own."""
    kind = type(settings)
    hints, changed = get_type_hints(kind, include_extras=True), list[Any]()
    for field in dataclasses.fields(settings):
        value = parts.get(field.name, getattr(settings, field.name))
        default = dataclasses.field(default_factory=lambda value=value: value)
        if field.name in parts:
            changed.append((field.name, type(value), default))
        elif field.name not in names:
            hidden = Annotated[
                type(value) if dataclasses.is_dataclass(value) else hints[field.name], tyro.conf.Suppress
            ]
            changed.append((field.name, hidden, default))
    made = dataclasses.make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    _made.append(made)
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return made(**{**given, **parts})


def _flag(name: str) -> str:
    return name.replace("_", "-")
