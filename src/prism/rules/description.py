"""Describe a rule in one object that prints well: equation, paper, sizes, forms, and every option with its meaning."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from prism.engine.memory import FORMS
from prism.rules.options import Option, options_of

if TYPE_CHECKING:
    from prism.rules.rule import Paper, Rule

WIDTH, HEADS = 1024, 4
_LINE = 80
_CITATION = re.compile(r"\s+\([^()]*\b\d{4}\)$")
"""Author and year at the end of an equation; the description names the paper."""


class Description(tuple[Option, ...]):
    """A rule's options as a tuple, with what else there is to know about the rule. It prints as a page of text."""

    name: str
    summary: str
    """The first line of the class's docstring."""
    equation: str
    """Lines of equations from the docstring of the class or of its file; empty if there are none."""
    paper: Paper | None
    objective: str
    """What a write minimises."""
    forgetting: str
    transition: str
    forms: tuple[str, ...]
    """Forms in which the engine computes it; empty, like the next two, if the rule cannot be built without options."""
    write_rank: int | None
    state_size: int | None
    """Numbers in the memory of one sequence, at `width` and `heads` with default options."""
    constant_state: bool
    width: int
    heads: int

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        grows = "" if self.constant_state else " a token"
        size = "–" if self.state_size is None else f"{self.state_size:,}{grows}"
        facts = {
            "paper": "" if self.paper is None else f"{self.paper.title}, {self.paper.authors}, {self.paper.url}",
            "objective": self.objective,
            "forgetting": self.forgetting,
            "write rank": "–" if self.write_rank is None else str(self.write_rank),
            "transition": self.transition,
            "forms": ", ".join(self.forms) or "–",
            "state size": f"{size} numbers at width {self.width} with {self.heads} heads",
        }
        lines = [f"{self.name}: {self.summary}", *textwrap.indent(self.equation, "    ").splitlines()]
        lines += [f"  {name + ':':<12} {value}" for name, value in facts.items() if value]
        lines.append("options:" if self else "options: none")
        for option in self:
            default = "" if option.default is inspect.Parameter.empty else f" = {option.default!r}"
            lines.append(f"  {option.name}: {option.type}{default}")
            indented = {"initial_indent": "      ", "subsequent_indent": "      "}
            lines.append(textwrap.fill(option.meaning or "not documented", _LINE, **indented))  # type: ignore[arg-type]
        return "\n".join(lines)

    __str__ = __repr__


def description_of(rule: type[Rule], width: int = WIDTH, heads: int = HEADS) -> Description:
    """What is to know about a rule class; sizes are those of a layer of this width with this number of heads."""
    found = Description(options_of(rule))
    required = any(option.default is inspect.Parameter.empty for option in found)
    built: Any = None
    if not required:
        with torch.device("meta"):  # sizes need no weights
            built = rule.build(width, heads)
    found.name, found.width, found.heads = rule.name, width, heads
    found.summary = next(iter((inspect.getdoc(rule) or "").splitlines()), "")
    found.equation = equation_of(rule)
    found.paper, found.objective = rule.paper, rule.objective.text
    found.forgetting, found.transition, found.constant_state = rule.forgetting, rule.transition, rule.constant_state
    found.forms = () if built is None else tuple(form for form in FORMS if form in built.forms)
    found.write_rank = None if built is None else built.write_rank
    found.state_size = None if built is None else built.state_size
    return found


def equation_of(rule: type[Rule]) -> str:
    """The equations in the docstring of a rule's class or, if it has none, of its file: indented blocks with a sign."""
    for docstring in (rule.__dict__.get("__doc__"), getattr(sys.modules.get(rule.__module__), "__doc__", None)):
        text = inspect.cleandoc(docstring or "").partition("Args:\n")[0]
        lines = [
            line for block in _indented(text.splitlines()) if any(c in "".join(block) for c in "=←") for line in block
        ]
        lines = [line for line in (_CITATION.sub("", line) for line in lines) if line.strip()]
        if lines:
            return textwrap.dedent("\n".join(lines))
    return ""


def _indented(lines: Iterable[str]) -> list[list[str]]:
    """Blocks of lines that are indented by four spaces or more."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("    "):
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]
