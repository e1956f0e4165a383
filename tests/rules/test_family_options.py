"""A wrong option of a rule raises one sentence with its name, the expectation and the value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prism import Mixer
from tests.rules.rule_cases import SMALL_HEADS, SMALL_WIDTH

COUNTS = [
    ("mlstm", "expand"),
    ("mlstm", "block_size"),
    ("gsa", "slots"),
    ("based", "key_dim"),
    ("based", "conv_size"),
    ("mesa", "iterations"),
    ("mamba1", "expand"),
    ("longhorn", "rank"),
    ("hgrn", "layer_count"),
    ("s4d", "key_dim"),
    ("ttt_linear", "mini_batch"),
    ("ttt_mlp", "key_dim"),
    ("titans", "depth"),
    ("titans", "expand"),
    ("titans", "mini_batch"),
    ("atlas", "key_dim"),
    ("atlas", "value_dim"),
    ("atlas", "window"),
    ("atlas", "degree"),
    ("mom", "memories"),
    ("mom", "layer_count"),
    ("delta_product", "householders"),
    ("sliding_window", "window"),
]
AMOUNTS = [
    ("mlstm", "eps"),
    ("based", "eps"),
    ("linear", "eps"),
    ("ttt_mlp", "base_lr"),
    ("titans", "base_lr"),
    ("atlas", "base_lr"),
    ("mom", "balance"),
    ("gated_delta", "norm_eps"),
    ("prism", "norm_eps"),
    ("softmax", "norm_eps"),
]


def refused(name: str, option: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=option) as error:
        Mixer(name, SMALL_WIDTH, SMALL_HEADS, **{option: value})
    message = str(error.value)
    assert message.startswith(f"{option} must be {expected}") and message.endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
@pytest.mark.parametrize(("name", "option"), COUNTS)
def test_what_counts_is_a_whole_number(name: str, option: str, value: Any) -> None:
    refused(name, option, value, "an integer ≥ 1")


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, "2"])
@pytest.mark.parametrize(("name", "option"), AMOUNTS)
def test_what_weighs_is_not_negative(name: str, option: str, value: Any) -> None:
    refused(name, option, value, "a number ≥ 0")


def test_no_newton_schulz_is_an_option() -> None:
    refused("atlas", "newton_schulz", -1, "an integer ≥ 0")
    assert Mixer("atlas", SMALL_WIDTH, SMALL_HEADS, newton_schulz=0).rule.newton_schulz == 0
