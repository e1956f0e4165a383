"""Every option of every rule is described, and the description is read from the right place."""

from __future__ import annotations

import inspect
import re

import pytest

from prism import rules
from prism.rules import Rule
from prism.rules.options import documented, options_of
from prism.rules.prism import PaperPrism


@pytest.mark.parametrize("kind", [*map(rules.get, rules.names()), PaperPrism], ids=lambda kind: kind.__name__)
def test_every_option_is_described(kind: type[Rule]) -> None:
    described = rules.describe(kind)
    assert tuple(option.name for option in described) == kind.option_names()
    for option in described:
        assert option.meaning.endswith("."), f"Args: of {kind.__name__} or a base does not describe {option.name}"
        assert option.default is not inspect.Parameter.empty and option.type
        assert "as in `" not in option.meaning, f"{option.name} sends the reader elsewhere"


@pytest.mark.parametrize("name", rules.names())
def test_no_docstring_describes_an_option_that_the_rule_does_not_have(name: str) -> None:
    kind = rules.get(name)
    assert set(documented(kind.__doc__)) <= set(kind.option_names())


@pytest.mark.parametrize("name", rules.names())
def test_every_rule_names_its_paper(name: str) -> None:
    paper = rules.get(name).paper
    assert paper is not None and paper.title and paper.authors
    if name != "prism":
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", paper.url)
        assert re.search(r" 20\d\d$", paper.authors)


class Described(Rule):
    """One line.

    Args:
        first: said here,
            in two lines.
        second, third: both at once.

    Not an argument: this.
    """

    def __init__(self, width: int, heads: int, *, first: int = 3, third: str, other=None, key_dim: int = 4) -> None:  # type: ignore[no-untyped-def]
        super().__init__(width, heads, key_dim, 1)


def test_meanings_come_from_the_class_then_from_its_bases() -> None:
    first, third, other, key_dim = options_of(Described)
    assert first == ("first", "int", 3, "said here, in two lines.")
    assert third == ("third", "str", inspect.Parameter.empty, "both at once.")
    assert other == ("other", "any", None, "")
    assert key_dim.meaning.startswith("size of a head's queries and keys")


def test_prism_has_a_preset_that_its_constructor_does_not_take() -> None:
    preset = rules.describe("prism")[0]
    assert (preset.name, preset.default) == ("preset", "lm") and "paper" in preset.meaning
