"""Read a rule's options (type, default, meaning) from its signature and its docstrings.

The meaning of an option is under `Args:` in the docstring of the rule's class or of one of its bases. Options that many
rules share (`key_dim`, `conv_size` …) are described once, in `Rule`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prism.rules.rule import Rule

_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")


class Option(NamedTuple):
    """One option of a rule."""

    name: str
    type: str
    default: Any
    """`inspect.Parameter.empty` if the option must be given."""
    meaning: str
    """Empty if no docstring describes it."""


def options_of(rule: type[Rule]) -> tuple[Option, ...]:
    """The options of a rule class, in the order of its signature."""
    meanings: dict[str, str] = {}
    for base in reversed(rule.__mro__):
        meanings |= documented(base.__dict__.get("__doc__"))
    return tuple(
        Option(name, _type_name(parameter.annotation), parameter.default, meanings.get(name, ""))
        for name, parameter in rule.option_parameters().items()
    )


def documented(docstring: str | None) -> dict[str, str]:
    """The `Args:` section of a docstring as {argument: description}. `a, b: text` describes both."""
    _, found, section = inspect.cleandoc(docstring or "").partition("Args:\n")
    if not found:
        return {}
    lines = section.splitlines()
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent("\n".join(lines[:end])).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry:
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}".strip() for name in names}
    return meanings


def _type_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "any"
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
