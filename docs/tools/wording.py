"""Numbers, paragraphs and tables as the pages have them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from prism.lab.statistics import Estimate
from tables import grid

WIDTH = 100
FIGURE_WIDTH = 46
"""Characters of a figure in the table of claims, so that its lines fit."""


def number(value: float, digits: int, sign: bool = False) -> str:
    """`.2039`, `+.0063`, `−.0017`: without a leading zero."""
    value = round(value, digits) + 0.0  # no negative zero
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return re.sub(r"^([+-]?)0(?=\.)", r"\1", text).replace("-", "−")


def shown(value: Estimate, digits: int = 4, sign: bool = False) -> str:
    """A mean with its standard error, if there are several seeds; empty without any."""
    if value.count == 0:
        return ""
    text = number(value.mean, digits, sign)
    return text if value.count < 2 else f"{text} ± {number(value.error, digits)}"


def paragraph(*sentences: str, indent: str = "") -> str:
    """Sentences as lines that fit; lines after the first are indented."""
    text = " ".join(filter(None, sentences))
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned to the left."""
    align = "|".join(["", *["---" if i < left else "--:" for i in range(len(header))], ""])
    return grid(header, align, rows)


def joined(*parts: str) -> str:
    """Parts of a text, each its own paragraph; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def brief(*parts: str) -> str:
    """As many parts as fit into the column of figures."""
    said = ""
    for part in filter(None, parts):
        longer = f"{said}; {part}" if said else part
        if len(longer) > FIGURE_WIDTH and said:
            break
        said = longer
    return said
