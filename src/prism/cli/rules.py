"""`prism rules`: one table of all rules, read off the registry, for the terminal or as a page of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from prism import rules as registry
from prism.data.files import check_target
from prism.engine import FORMS, engine_of
from prism.engine.dispatch import path_taken
from prism.engine.folded import Folded
from prism.rules.span import Span

WIDTH, HEADS = 1024, 4
COMMAND = "prism rules --output docs/rules.md"


class Row(NamedTuple):
    """The table's columns, in this order."""

    rule: str
    objective: str
    forgetting: str
    write_rank: str
    transition: str
    forms: str
    state_size: str


def rules(width: int = WIDTH, heads: int = HEADS, output: Path | None = None) -> None:
    """Print every rule: objective, forgetting, write rank, transition, forms, state size, and what computes it here.

    Args:
        width: width of the layer for which state sizes and backends are given.
        heads: number of heads.
        output: write the table to this file, as Markdown, instead of printing it.
    """
    if output is not None:
        check_target(output, folder=False).parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(width, heads), encoding="utf-8")
        return
    table = Table(title=f"Rules at width {width} with {heads} heads (defaults)", header_style="bold")
    for column in Row._fields:
        # Names are there to be copied.
        table.add_column(_title(column), overflow="fold", no_wrap=column == "rule", justify=_justify(column))
    for row in rows(width, heads):
        table.add_row(*row)
    Console().print(table)
    print(f"forms: {', '.join(form.capitalize() for form in FORMS)}")
    print("state size: numbers a sequence keeps in memory in one layer, whatever its length")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"a sequence is computed here, on {where}, in the form and by the backend:")
    for path, names in paths_taken(width, heads).items():
        print(f"  {path}: {', '.join(names)}")


def paths_taken(width: int, heads: int) -> dict[str, list[str]]:
    """ "form, backend" -> the rules that take it on this machine for a short training sequence, with default options."""
    device = "cuda" if torch.cuda.is_available() else "meta"  # a CPU's choice depends on no value
    taken: dict[str, list[str]] = {}
    for name in registry.names():
        with torch.device(device):
            rule = _build(name, width, heads)
            x = torch.zeros(1, 128, width)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            update, *_ = rule.update(x, {}, Span(None, None))
        while isinstance(update, Folded):
            update = update.update
        taken.setdefault(", ".join(path_taken(engine_of(type(update)), update)), []).append(name)
    return dict(sorted(taken.items()))


def _build(name: str, width: int, heads: int) -> Any:
    try:
        return registry.get(name).build(width, heads)
    except ValueError as error:
        raise ValueError(f"width {width} with {heads} heads is not for every rule: {name}: {error}") from error


def rows(width: int, heads: int) -> list[Row]:
    table = []
    for name in registry.names():
        kind = registry.get(name)
        with torch.device("meta"):  # sizes need no weights
            rule = _build(name, width, heads)
        size = f"{rule.state_size:,}" if kind.constant_state else f"{rule.state_size:,} a token"
        forms = " ".join(form[0].upper() for form in FORMS if form in rule.forms)
        table.append(
            Row(name, kind.objective.text, kind.forgetting, str(rule.write_rank), kind.transition, forms, size)
        )
    return table


def page(width: int = WIDTH, heads: int = HEADS) -> str:
    """The table as a page of Markdown."""
    lines = [
        "# Rules",
        "",
        "Every rule of the library, as the registry describes it. Do not edit this page: it is written by",
        "",
        f"    {COMMAND}",
        "",
        f"and a test compares it with the registry. State sizes are those of one layer of width {width} with {heads} heads",
        "and default options: the numbers a sequence keeps in memory, whatever its length. Forms are "
        + ", ".join(f"**{form[0].upper()}** {form}" for form in FORMS)
        + ".",
        "",
        *_about_networks(width, heads),
        "",
        "| " + " | ".join(map(_title, Row._fields)) + " |",
        "|" + "|".join("--:" if _justify(column) == "right" else "---" for column in Row._fields) + "|",
    ]
    for row in rows(width, heads):
        cells = [f"`{row.rule}`", *row[1:]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _about_networks(width: int, heads: int) -> list[str]:
    """What the table cannot say of memories that are networks."""
    networks = {
        name: registry.get(name) for name in registry.names() if "mini_batch" in registry.get(name).option_names()
    }
    with torch.device("meta"):
        online = [n for n, kind in networks.items() if "serial" in kind.build(width, heads, mini_batch=1).forms]
    return [
        f"{_named(list(networks))} keep an open mini-batch beside that: its gradients so far, or the",
        f"weights at which they are taken. With `mini_batch=1` {_named(online)} also have the form `serial`, which",
        "takes every gradient at the weights that the token before it left.",
    ]


def _named(names: list[str]) -> str:
    *others, last = [f"`{name}`" for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def _title(column: str) -> str:
    return column.replace("_", " ")


def _justify(column: str) -> Literal["left", "right"]:
    return "right" if column in ("write_rank", "state_size") else "left"
