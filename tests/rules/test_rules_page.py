"""docs/rules.md is what the generator writes, and the generator writes all of the registry in narrow lines."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from prism import rules
from prism.cli.rules import COMMAND, PAGE_WIDTH, _wrap, page

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/rules.md is out of date: run `{COMMAND}`"


def test_every_rule_has_a_row_in_both_tables() -> None:
    first = [line for line in page().splitlines() if line.startswith("| [`")]
    second = [line for line in page().splitlines() if line.startswith("| `")]
    for table, columns in ((first, 3), (second, 6)):
        assert [line.split("`")[1] for line in table] == list(rules.names())
        assert all(line.count(" | ") == columns - 1 for line in table)


def test_every_reference_style_link_is_defined_and_leads_to_the_paper() -> None:
    text = page()
    defined = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    used = re.findall(r"\]\[(\w+)\]", text)
    assert set(used) == set(defined)
    for name in rules.names():
        paper = rules.get(name).paper
        assert paper is not None
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` ")]
        authors, label = re.findall(r"\[([^]]+)\]\[(\d+)\]", row)[0]
        assert (authors, defined[label]) == (paper.authors, paper.url)
        assert defined[name] == f"#{name}"


def test_every_option_of_every_rule_is_listed() -> None:
    _, *sections = page().split("\n### ")
    assert [section.splitlines()[0] for section in sections] == list(rules.names())
    for name, section in zip(rules.names(), sections, strict=True):
        entries = [line for line in section.splitlines() if line.startswith("- `")]
        assert [line.split("`")[1] for line in entries] == list(rules.get(name).option_names())


@given(st.lists(st.sampled_from(["word", "-", "+", "1.", "#", "x" * 30, "`a`", ">", "é"]), min_size=2, max_size=120))
def test_wrapping_keeps_every_word_and_opens_no_markup(words: list[str]) -> None:
    lines = _wrap(" ".join(["-", "first", *words]), indent="  ")
    assert " ".join(lines).split() == ["-", "first", *words]
    assert not any(re.match(r"\s*([-+*>]|#+|\d+[.)])(\s|$)", line) for line in lines[1:])
    runs = "".join("m" if re.fullmatch(r"[-+*>]|#+|\d+[.)]", word) else "w" for word in words)
    if "mm" not in runs:  # two such words in a row cannot both be kept off the start of a line
        assert all(len(line) <= PAGE_WIDTH for line in lines)
