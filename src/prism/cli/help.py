"""Help of commands with many settings, in groups that fit a screen: an overview, then one group at a time.

    prism train lm --help           the groups and the names of their settings
    prism train lm --help model     one group: every setting with its meaning and default
    prism train lm --help all       everything
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from prism.messages import did_you_mean
from prism.train.settings import RunSettings

ALL, RUN = "all", "run"
"""Topics: everything, and the settings that are in no section."""
WIDTH = 80


def asked(arguments: Sequence[str]) -> str | None:
    """The topic after --help or -h, "" without one; None if no help is wanted."""
    place = next((i for i, word in enumerate(arguments) if word in ("-h", "--help")), None)
    if place is None:
        return None
    following = arguments[place + 1 : place + 2]
    return "" if not following or following[0].startswith("-") else following[0]


def sections(settings: RunSettings) -> dict[str, list[str]]:
    """The names of all settings by group, as they are written in flags; those of no section come first."""
    groups: dict[str, list[str]] = {RUN: []}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            groups[_flag(field.name)] = [_flag(part.name) for part in dataclasses.fields(value)]
        else:
            groups[RUN].append(_flag(field.name))
    return groups


def check_topic(topic: str, settings: RunSettings) -> None:
    """Raise ValueError for a topic that is no group."""
    known = [*sections(settings), ALL]
    if topic not in known:
        raise ValueError(f"no help on {topic!r}{did_you_mean(topic, known)}: choose from {', '.join(known)}")


def overview(command: str, usage: str, description: str, settings: RunSettings) -> str:
    """The groups of a command's settings, with the names in each."""
    groups = sections(settings)
    first = max(map(len, groups)) + 4
    lines = [f"usage: {command}{usage} [--SETTING VALUE ...] [-h [GROUP]]", "", description, "", "settings by group:"]
    for group, names in groups.items():
        prefix = "--" if group == RUN else f"--{group}."
        shown = ", ".join([prefix + names[0], *names[1:]]) if names else ""
        indent = " " * first
        wrapped = textwrap.wrap(
            shown, _width(), initial_indent=f"  {group:<{first - 2}}", subsequent_indent=indent, break_on_hyphens=False
        )
        lines += wrapped
    lines += ["", f"`{command} --help GROUP` explains a group, `--help {ALL}` everything."]
    return "\n".join(lines)


def only(topic: str, settings: RunSettings) -> Any:
    """The type of the settings with everything outside a group hidden from the help, and the settings as its default."""
    kind = type(settings)
    hidden = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        group = _flag(field.name) if dataclasses.is_dataclass(value) else RUN
        if group != topic:
            annotation = Annotated[type(value) if dataclasses.is_dataclass(value) else Any, tyro.conf.Suppress]
            hidden.append((field.name, annotation, dataclasses.field(default_factory=lambda value=value: value)))
    made = dataclasses.make_dataclass(kind.__name__, hidden, bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made, made(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns)


def _flag(name: str) -> str:
    return name.replace("_", "-")
