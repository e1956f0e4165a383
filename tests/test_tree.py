"""The size of the tree: files that hold one idea, few enough to find the right one, each saying what it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import prism

SOURCE = Path(prism.__file__).parent
TEXTS = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
STUMBLES = re.compile(r"\b(told|beside|go(es)? on|going on|whoever|nobody)\b", re.IGNORECASE)
"""Words that native readers stumble over; the glossary has the standard ones."""


def too_long(text: str) -> bool:
    return len(text.splitlines()) > 400


def silent(text: str) -> bool:
    """No docstring whose first line says what the module does."""
    doc = ast.get_docstring(ast.parse(text))
    return doc is None or len(doc.splitlines()[0]) < 20


def foreign(text: str) -> bool:
    return STUMBLES.search(text) is not None


def test_the_tree_stays_small() -> None:
    assert len(TEXTS) < 380, "merge what belongs together before adding files"


@pytest.mark.parametrize("fault", [too_long, silent, foreign])
def test_no_file_has_a_fault(fault: Callable[[str], bool]) -> None:
    assert [name for name, text in TEXTS.items() if fault(text)] == []


@pytest.mark.parametrize(
    ("fault", "text"),
    [(too_long, '"""Say something sensible."""\n' + "x = 1\n" * 400), (silent, "x = 1\n"), (foreign, "# goes on\n")],
)
def test_a_fault_is_seen(fault: Callable[[str], bool], text: str) -> None:
    assert fault(text)
