"""`prism.rules.describe`: what it says is true, complete and printable, for rules of the package and for others."""

from __future__ import annotations

import inspect

import pytest
import torch

import prism
from prism import Mixer, rules
from prism.rules.gla import Gla


@pytest.mark.parametrize("name", rules.names())
def test_every_rule_is_described(name: str) -> None:
    found = rules.describe(name, width=64, heads=2)
    mixer = Mixer(name, 64, 2)
    assert found.name == name and found.summary and found.equation and found.paper is not None
    assert (found.state_size, found.write_rank) == (mixer.state_size, mixer.write_rank)
    assert set(found.forms) <= set(mixer.forms)
    assert [option.name for option in found] == list(rules.get(name).option_names())
    assert all(option.meaning for option in found), "an option without a meaning"
    text = str(found)
    assert text == repr(found) and found.paper.url in text and f"{found.state_size:,}" in text
    for option in found:
        assert f"  {option.name}: " in text
        if option.default is not inspect.Parameter.empty:
            assert f"{option.name}: {option.type} = {option.default!r}" in text


def test_the_equation_has_no_citation_and_no_code() -> None:
    assert rules.describe("linear").equation == "S_t = S_{t-1} + φ(k_t) v_tᵀ"
    assert "2024" not in rules.describe("gsa").equation and "softmax(K̃_t q_t)" in rules.describe("gsa").equation


def test_a_class_that_is_not_registered() -> None:
    class Mine(Gla):
        """Decays twice.

            S_t = Diag(α_t²) S_{t-1} + k_t v_tᵀ

        Args:
            twice: whether it does.
        """

        def __init__(self, width: int, heads: int, *, twice: bool) -> None:
            super().__init__(width, heads)

    found = rules.describe(Mine)
    assert found.summary == "Decays twice." and found.equation == "S_t = Diag(α_t²) S_{t-1} + k_t v_tᵀ"
    assert found.state_size is None and found.forms == () and found[0].meaning == "whether it does."
    assert "  twice: bool\n      whether it does." in str(found) and Mine.__name__ not in prism.rules.names()
    assert Mixer(Mine, 16, 2, twice=True)(torch.randn(1, 3, 16))[0].shape == (1, 3, 16)
