"""Pieces of a web page that needs nothing but itself: no scripts, no fonts, no files; light or dark as the reader's system."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prism.evaluate.plots import pyplot

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2026; --quiet: #5c6370; --line: #d9dce1; --back: #ffffff; --soft: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --quiet: #9aa1ac; --line: #3a3f47; --back: #16181c; --soft: #1f2228; }
}
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.5rem 5rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 3rem 0 .6rem; }
p { max-width: 46rem; }
figure { margin: 1.2rem 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption, .quiet { color: var(--quiet); font-size: .88rem; }
code, pre { font: .85rem/1.5 ui-monospace, monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: .4rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre.command { background: none; border: 0; border-left: 3px solid var(--line); border-radius: 0; padding: .1rem 0 .1rem .8rem;
  color: var(--quiet); }
pre b { color: var(--quiet); font-weight: normal; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { font-weight: 600; font-size: .88rem; }
.number { text-align: right; }
.best { font-weight: 700; }
"""
_INK = "#010203"
"""Stands for the text colour while matplotlib draws."""
_SVG_STYLE = "<style>svg{color:#1d2026}@media(prefers-color-scheme:dark){svg{color:#e6e8eb}}</style>"


def page(title: str, body: Sequence[str]) -> str:
    """A whole document; `body` is HTML."""
    content = "\n".join(body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{content}
</body>
</html>
"""


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, quiet: bool = False) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if quiet else f"<p>{escape(text)}</p>"


def commands(*lines: str) -> str:
    """Commands to repeat what is shown."""
    return f'<pre class="command">{escape(chr(10).join(f"$ {line}" for line in lines))}</pre>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], best: Callable[[int, int], bool] | None = None) -> str:
    """Texts to the left, everything else to the right; `best(row, column)` says which cells stand out."""
    cells = []
    for i, row in enumerate(rows):
        line = []
        for j, value in enumerate(row):
            kinds = [] if isinstance(value, str) and j == 0 else ["number"]
            kinds += ["best"] if best is not None and best(i, j) else []
            line.append(f'<td class="{" ".join(kinds)}">{escape(str(value))}</td>')
        cells.append(f"<tr>{''.join(line)}</tr>")
    head = "".join(f'<th class="{"number" if j else ""}">{escape(name)}</th>' for j, name in enumerate(columns))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(cells)}</tbody></table></div>'


def figure(draw: Callable[[Path], None], caption: str) -> str:
    """What `draw(path)` saves with matplotlib, inside the page, its lines and letters in the reader's colour."""
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    plt = pyplot()
    with (
        tempfile.TemporaryDirectory() as folder,
        plt.rc_context({**dict.fromkeys(ink, _INK), "savefig.transparent": True}),
    ):
        path = Path(folder) / "figure.svg"
        draw(path)
        drawing = path.read_text(encoding="utf-8")
    start = drawing.index("<svg")  # what stands before it names a document on the web
    inside = drawing.index(">", start) + 1
    drawing = drawing[start:inside] + _SVG_STYLE + drawing[inside:].replace(_INK, "currentColor")
    data = base64.b64encode(drawing.encode()).decode()
    text = escape(caption)
    return f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"><figcaption>{text}</figcaption></figure>'
