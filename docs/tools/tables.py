"""Tables of earlier measurements, kept as JSON (docs/tables.json) and written into pages as blocks.

    python docs/tools/tables.py docs/performance.md       # moves the page's tables into the JSON, and marks them as blocks

For figures whose raw results were not kept. The block of a table is `<!-- claims:table-NAME -->`; its name is the page, the
heading above it and a number. `claims.py` writes and checks the blocks: change a figure in the JSON, not on the page. Give a
new table the `command` and the `machine` that made it, in the JSON: a test refuses a table that cannot be measured again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORE = ROOT / "docs" / "tables.json"
_PARTS = re.compile(
    r"(?P<block><!-- claims:.*?<!-- end -->)|(?P<code>^ *```.*?^ *```$)|^## (?P<heading>[^\n]+)$|(?P<table>(?:^\|[^\n]*\|\n)+)",
    re.DOTALL | re.MULTILINE,
)
_PREFIX = "table-"
ABOUT = ("command", "machine")
"""What a stored table says of its measurement."""


def read(store: Path = STORE) -> dict[str, Any]:
    """All tables by name: header, alignment and rows."""
    found: dict[str, Any] = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    return found


def markdown(table: dict[str, Any]) -> str:
    """A stored table as Markdown."""
    return grid(table["header"], table["align"], table["rows"])


def grid(header: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; an empty cell is one space wide."""
    first, *rest = ("|".join(["", *[f" {cell} " if cell else " " for cell in line], ""]) for line in (header, *rows))
    return "\n".join([first, align, *rest])


def adopt(text: str, stem: str, tables: dict[str, Any]) -> str:
    """A page whose tables are blocks; the tables themselves are added to `tables`, in place of older ones of the page."""
    for name in [name for name in tables if name.startswith(f"{stem}-") and f"claims:{_PREFIX}{name} " not in text]:
        del tables[name]
    heading, counts = "", dict.fromkeys(tables, 1)

    def part(match: re.Match[str]) -> str:
        nonlocal heading
        if match["heading"]:
            heading = re.sub(r"\W+", "-", match["heading"].lower()).strip("-")
        if not match["table"]:
            return match[0]
        header, align, *rows = match["table"].splitlines()
        number = 1
        while f"{stem}-{heading}-{number}" in counts:
            number += 1
        name = f"{stem}-{heading}-{number}"
        counts[name] = 1
        tables[name] = {"header": _cells(header), "align": align, "rows": [_cells(row) for row in rows]}
        return f"<!-- claims:{_PREFIX}{name} -->\n\n{markdown(tables[name])}\n\n<!-- end -->\n"

    return _PARTS.sub(part, text)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def blocks(store: Path = STORE) -> dict[str, str]:
    """The text of each block, by its name."""
    return {f"{_PREFIX}{name}": markdown(table) for name, table in read(store).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    arguments = parser.parse_args()
    tables = read()
    for page in arguments.pages:
        page.write_text(adopt(page.read_text(encoding="utf-8"), page.stem, tables), encoding="utf-8")
    rows = ",\n".join(f"{json.dumps(name)}: {_compact(table)}" for name, table in tables.items())
    STORE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    print(len(tables), "tables in", STORE.name)


def _compact(table: dict[str, Any]) -> str:
    """JSON with one line a row, after how the table was measured."""
    about = "".join(
        f"{json.dumps(key)}: {json.dumps(table[key], ensure_ascii=False)}, " for key in ABOUT if key in table
    )
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in table["rows"])
    head = json.dumps(table["header"], ensure_ascii=False)
    return f'{{{about}"header": {head}, "align": {json.dumps(table["align"])}, "rows": [\n  {rows}]}}'


if __name__ == "__main__":
    main()
