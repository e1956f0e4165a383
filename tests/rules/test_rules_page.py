"""The page of rules is what the registry says, word for word, so that it cannot go stale."""

from __future__ import annotations

from pathlib import Path

from prism import rules
from prism.cli.rules import COMMAND, Row, page

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/rules.md is out of date: run `{COMMAND}`"


def test_every_rule_has_one_row_with_every_column_and_its_paper() -> None:
    table = [line for line in page().splitlines() if line.startswith("| [`")]
    assert [line.split("`")[1] for line in table] == list(rules.names())
    assert all(line.count(" | ") == len(Row._fields) for line in table)
    assert all(f"]({rules.get(name).paper.url})" in line for name, line in zip(rules.names(), table, strict=True))  # type: ignore[union-attr]  # each has one


def test_every_option_of_every_rule_has_a_row() -> None:
    _, *sections = page().split("\n### ")
    assert [section.splitlines()[0] for section in sections] == list(rules.names())
    for name, section in zip(rules.names(), sections, strict=True):
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert [line.split("`")[1] for line in rows] == list(rules.get(name).option_names())
