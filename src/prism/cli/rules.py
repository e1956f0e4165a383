"""`prism rules`: print all rules, or one rule with its options, or write them as a page of the documentation."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from prism import rules as registry
from prism.engine import FORMS, engine_of
from prism.engine.memories.folded import Folded
from prism.engine.memory import chosen
from prism.files import check_target
from prism.rules.description import HEADS, WIDTH
from prism.rules.options import options_of
from prism.rules.rule import Rule, Span

_SHOWN = ("rule", "objective", "forgetting", "forms", "state_size")
"""The columns that fit a terminal of 80 characters."""
_WRAPPED = ("objective", "forgetting")
COMMAND = "prism rules --output docs/rules.md"
PAGE_WIDTH = 100
_MARKUP = re.compile(r"[-+*>]|#+|\d+[.)]")
"""A word that would have a meaning in Markdown at the start of a line."""


class Row(NamedTuple):
    """One row of the table, in the order of its columns."""

    rule: str
    objective: str
    forgetting: str
    write_rank: str
    transition: str
    forms: str
    state_size: str


def rules(
    name: Positional[str | None] = None, width: int = WIDTH, heads: int = HEADS, output: Path | None = None
) -> None:
    """Print all rules, or one rule with its options.

    Args:
        name: show this rule and its options.
        width: width of the layer for which state sizes and backends are shown.
        heads: number of heads.
        output: write the page of all rules to this file, as Markdown.
    """
    if output is not None:
        if name is not None:
            raise ValueError(f"--output writes the page of all rules: leave out the name {name!r}")
        check_target(output, folder=False).parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(width, heads), encoding="utf-8")
        return
    if name is not None:
        _build(name, width, heads)
        print(registry.describe(name, width, heads))
        return
    table = Table(title=f"Rules at width {width} with {heads} heads (defaults)", header_style="bold", box=None)
    for column in _SHOWN:
        # Names are not wrapped, so that they can be copied.
        table.add_column(_title(column), no_wrap=column not in _WRAPPED, justify=_justify(column))
    for row in rows(width, heads):
        table.add_row(*(getattr(row, column) for column in _SHOWN))
    Console().print(table)
    print(f"forms: {', '.join(form.capitalize() for form in FORMS)}")
    print("state size: numbers in the memory of one sequence, in one layer, at any length")
    print("one rule with its options: prism rules NAME")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"form and backend of a training sequence on {where}:")
    for path, names in paths_taken(width, heads).items():
        print(textwrap.fill(f"{path}: {', '.join(names)}", 80, initial_indent="  ", subsequent_indent="    "))


def paths_taken(width: int, heads: int) -> dict[str, list[str]]:
    """{"form, backend": rules that use it here for a short training sequence, with default options}."""
    device = "cuda" if torch.cuda.is_available() else "meta"  # on a CPU the choice depends on no values
    taken: dict[str, list[str]] = {}
    for name in registry.names():
        with torch.device(device):
            rule = _build(name, width, heads)
            x = torch.zeros(1, 128, width)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            update, *_ = rule.update(x, {}, Span(None, None))
        while isinstance(update, Folded):
            update = update.update
        form, implementation = chosen(engine_of(type(update)), update)
        taken.setdefault(f"{form}, {implementation.backend}", []).append(name)
    return dict(sorted(taken.items()))


def _build(name: str, width: int, heads: int) -> Any:
    kind = registry.get(name)  # an unknown name is no matter of sizes
    try:
        return kind.build(width, heads)
    except ValueError as error:
        raise ValueError(f"width {width} with {heads} heads does not fit every rule: {name}: {error}") from error


def rows(width: int, heads: int) -> list[Row]:
    """One row per rule, at this width and number of heads."""
    return [_row(registry.get(name), width, heads) for name in registry.names()]


def _row(kind: type[Rule], width: int, heads: int) -> Row:
    with torch.device("meta"):  # sizes need no weights
        rule = _build(kind.name, width, heads)
    size = f"{rule.state_size:,}" if kind.constant_state else f"{rule.state_size:,}/token"
    forms = " ".join(form[0].upper() for form in FORMS if form in rule.forms)
    return Row(kind.name, kind.objective.text, kind.forgetting, str(rule.write_rank), kind.transition, forms, size)


def page(width: int = WIDTH, heads: int = HEADS) -> str:
    """The page of all rules as Markdown, with lines of at most `PAGE_WIDTH` characters."""
    table = rows(width, heads)
    lines = [
        "# Rules",
        "",
        f"<!-- Do not edit: `{COMMAND}` writes this page; a test compares them. -->",
        "",
        "All rules of the library. [One family](concepts/family.md) derives their objectives. A memory S has",
        "the shape `[K, V]`; reading it with k gives Sᵀk.",
        "",
        "## What a rule minimises and forgets",
        "",
        *_table(["rule", "objective", "forgetting"], [[_to_section(r.rule), r.objective, r.forgetting] for r in table]),
        "",
        "## Size, forms and papers",
        "",
        f"State sizes are for one layer of width {width} with {heads} heads and default options: the numbers",
        "in the memory of one sequence, at any length. Forms:",
        ", ".join(f"**{form[0].upper()}** {form}" for form in FORMS) + ".",
        "",
        *_about_networks(width, heads),
        "",
        *_table(
            ["rule", "transition", "write rank", "forms", "state size", "paper"],
            [[f"`{r.rule}`", r.transition, r.write_rank, r.forms, r.state_size, _paper(r.rule)] for r in table],
        ),
        "",
        "## Options",
        "",
        "Every rule is built as `Mixer(rule, width, heads, **options)`.",
    ]
    for name in registry.names():
        lines += ["", f"### {name}", "", *_section(registry.get(name))]
    lines += ["", *(f"[{name}]: #{name}" for name in registry.names())]
    papers = [registry.get(name).paper for name in registry.names()]
    lines += [f"[{i}]: {paper.url}" for i, paper in enumerate(papers, 1) if paper is not None]
    return "\n".join(lines) + "\n"


def _table(columns: list[str], cells: list[list[str]]) -> list[str]:
    """A Markdown table."""
    rulers = ["--:" if _justify(column.replace(" ", "_")) == "right" else "---" for column in columns]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    return [f"| {' | '.join(columns)} |", f"|{'|'.join(rulers)}|", *(f"| {' | '.join(row)} |" for row in escaped)]


def _to_section(name: str) -> str:
    return f"[`{name}`][{name}]"


def _paper(name: str) -> str:
    """A reference-style link to a rule's paper; its address is at the end of the page."""
    paper = registry.get(name).paper
    return "–" if paper is None else f"[{paper.authors}][{registry.names().index(name) + 1}]"


def _section(kind: type[Rule]) -> list[str]:
    """One rule: what it is, its paper, and a list of its options."""
    lines = _wrap((inspect.getdoc(kind) or "").splitlines()[0])
    if kind.paper is not None:
        lines += [*_wrap(f"*{kind.paper.title}*,"), f"{_paper(kind.name)}."]
    lines.append("")
    for option in options_of(kind):
        default = "" if option.default is inspect.Parameter.empty else f", default `{option.default!r}`"
        lines += _wrap(f"- `{option.name}` (`{option.type}`{default}): {option.meaning}", indent="  ")
    return lines


def _wrap(text: str, indent: str = "") -> list[str]:
    """Lines of at most `PAGE_WIDTH` characters. None starts with a word that would open a list, heading or quotation."""
    first, *others = text.split(" ")
    lines = [first]
    for i, word in enumerate(others):
        unit = word if i + 1 >= len(others) or not _MARKUP.fullmatch(others[i + 1]) else f"{word} {others[i + 1]}"
        fits = len(lines[-1]) + 1 + len(unit) <= PAGE_WIDTH
        if fits or _MARKUP.fullmatch(word):
            lines[-1] += f" {word}"
        else:
            lines.append(indent + word)
    return lines


def _about_networks(width: int, heads: int) -> list[str]:
    """Sentences about memories that are networks, which the table cannot express."""
    networks = {
        name: registry.get(name) for name in registry.names() if "mini_batch" in registry.get(name).option_names()
    }
    with torch.device("meta"):
        online = [n for n, kind in networks.items() if "serial" in kind.build(width, heads, mini_batch=1).forms]
    return [
        f"{_named(list(networks))} also store their partial mini-batch:",
        "its gradients so far, or the weights at which they are taken.",
        f"With `mini_batch=1`, {_named(online)} also have the form `serial`,",
        "which takes every gradient at the weights that the previous token left.",
    ]


def _named(names: list[str]) -> str:
    *others, last = [f"`{name}`" for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def _title(column: str) -> str:
    return column.replace("_", " ")


def _justify(column: str) -> Literal["left", "right"]:
    return "right" if column in ("write_rank", "state_size") else "left"
