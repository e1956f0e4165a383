"""Parts of an HTML report: one file without scripts, fonts or network access, with a light and a dark theme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prism.lab.charts import legend

FINE_PRINT = " ± "
"""Separates a value from its error in a table cell; the error is shown below it in small type."""


def page(title: str, body: Sequence[str]) -> str:
    """Return a complete document; `body` is HTML."""
    content = "\n".join(body)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def header(kind: str, title: str, finding: str, circumstances: str = "") -> str:
    """Return the top of a page: its kind and title, and the finding in one sentence."""
    parts = [f'<p class="kind">{escape(kind)}</p>', heading(title, 1), f'<p class="finding">{escape(finding)}</p>']
    parts += [paragraph(circumstances, quiet=True)] if circumstances else []
    return f"<header>{''.join(parts)}</header>"


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, quiet: bool = False) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if quiet else f"<p>{escape(text)}</p>"


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return key figures side by side: (label, figure, note) each."""
    cells = [
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(figure)}<small>{escape(note)}</small></dd></div>'
        for label, figure, note in facts
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def commands(*lines: str) -> str:
    """Return the commands that reproduce the results, folded."""
    shown = escape("\n".join(f"$ {line}" for line in lines))
    label = "Command" if len(lines) == 1 else "Commands"
    return f'<details class="command"><summary>{label}</summary><pre>{shown}</pre></details>'


def excerpt(name: str, prompt: str, text: str) -> str:
    """Return a generated text below its model's name, with the prompt in bold."""
    return (
        f'<div class="panel"><p class="title">{escape(name)}</p><pre><b>{escape(prompt)}</b>{escape(text)}</pre></div>'
    )


def columns(parts: Sequence[str], narrow: bool = False) -> str:
    """Return parts side by side (`narrow`: three in a row), or one below the other on a small screen."""
    return f'<div class="columns{" narrow" if narrow else ""}">{"".join(parts)}</div>'


def table(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    best: Callable[[int, int], bool] | None = None,
    faint: Callable[[int], bool] | None = None,
) -> str:
    """Return a table that scrolls inside its box; the first column holds names, all others numbers.

    Args:
        best: `best(row, column)` is True for cells to highlight.
        faint: `faint(row)` is True for rows with too little data.
    """
    lines = []
    for i, row in enumerate(rows):
        name = f'<th scope="row">{escape(str(row[0]))}</th>'
        cells = [_cell(str(value), best is not None and best(i, j)) for j, value in enumerate(row[1:], 1)]
        kind = ' class="faint"' if faint is not None and faint(i) else ""
        lines.append(f"<tr{kind}>{name}{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0"><table>{body}</table></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return pairs of a name and a text; long texts wrap."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f'<dl class="facts">{rows}</dl>'


def figure(panels: Sequence[str], caption: str, names: Sequence[str] = ()) -> str:
    """Return charts side by side, with one legend for the `names` of their series and a caption."""
    key = legend(names) if names else ""
    return f"<figure>{key}{columns(panels)}<figcaption>{escape(caption)}</figcaption></figure>"


def _cell(text: str, highlight: bool) -> str:
    value, _, error = text.partition(FINE_PRINT)
    small = f"<small> ± {escape(error)}</small>" if error else ""
    return f"<td{' class=best' if highlight else ''}>{escape(value)}{small}</td>"
