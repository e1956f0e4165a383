"""Every type of update checks its flags in the same way, and padding never matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine.inputs import check_integer, check_log_decay, check_shape, repeat_heads, zero_padding
from prism.engine.memories.attention import Attend
from prism.engine.memories.diagonal import Diagonal
from prism.engine.memories.scalar_cells import ScalarCells
from prism.engine.memories.slots import Slots
from prism.engine.networks import Averaged, InnerUpdate, Network
from tests.helpers import examples

B, T, H, K = 2, 5, 2, 4
X, CELLS = torch.zeros(B, T, H, K), torch.zeros(B, T, 4, H, K)
NETWORK = Network((torch.zeros(H, K, K),))

TAKES_FLAGS: dict[str, Callable[..., Any]] = {
    "Update": lambda **flags: prism.Update(X, X.unsqueeze(3), X.unsqueeze(3), **flags),
    "Attend": lambda **flags: Attend(X, X, X, **flags),
    "Diagonal": lambda **flags: Diagonal(X, forget=X, **flags),
    "ScalarCells": lambda **flags: ScalarCells(CELLS, torch.zeros(4, H, K, K), **flags),
    "Slots": lambda **flags: Slots(X, X, X, X, X, **flags),
    "InnerUpdate": lambda **flags: InnerUpdate(X, X, X, X[..., 0], NETWORK, Averaged(torch.ones(16)), **flags),
    "Mixer": lambda **flags: prism.Mixer("linear", 8, 2)(torch.zeros(B, T, 8), **flags),
}


@pytest.mark.parametrize("name", ["reset", "mask"])
@pytest.mark.parametrize("kind", TAKES_FLAGS)
@pytest.mark.parametrize(
    ("flag", "found"),
    [
        (torch.ones(B, T), r"torch.float32 \[2, 5\]"),
        (torch.ones(T, B, dtype=torch.bool), r"torch.bool \[5, 2\]"),
        (torch.ones(B, T, 1, dtype=torch.bool), r"torch.bool \[2, 5, 1\]"),
        ([[True] * T] * B, "list"),
    ],
)
def test_wrong_flags_are_refused_in_the_same_words(kind: str, name: str, flag: Any, found: str) -> None:
    sentence = rf"^{name} must be a bool tensor of shape \[B, T\] = \[2, 5\], got {found}$"
    with pytest.raises(ValueError, match=sentence):
        TAKES_FLAGS[kind](**{name: flag})
    TAKES_FLAGS[kind](**{name: torch.ones(B, T, dtype=torch.bool)})


@pytest.mark.parametrize("kind", ["Attend", "InnerUpdate"])
def test_padding_must_follow_the_real_tokens(kind: str) -> None:
    with pytest.raises(ValueError, match=f"mask has padding before real tokens: {kind} takes real tokens first"):
        TAKES_FLAGS[kind](mask=torch.tensor([[False] + [True] * (T - 1)] * B))


@pytest.mark.parametrize(("value", "optional"), [(0, False), (1.0, False), (None, False), ("2", True), (-1, True)])
def test_integers_are_checked(value: Any, optional: bool) -> None:
    with pytest.raises(ValueError, match=f"^n must be an integer ≥ 1{' or None' if optional else ''}, got {value!r}$"):
        check_integer("n", value, optional=optional)
    check_integer("n", 1, optional=optional)


@given(heads=st.integers(1, 8), groups=st.integers(0, 9))
@examples(40)
def test_the_head_dimension_may_be_any_divisor(heads: int, groups: int) -> None:
    x = torch.zeros(1, 3, groups, 2)
    if groups and heads % groups == 0:
        check_shape("x", x, (1, 3, None, 2), "[B, T, G, K]", heads=heads)
        assert repeat_heads(x, heads).shape == (1, 3, heads, 2)
    else:
        with pytest.raises(ValueError, match=f"^x has {groups} heads, which does not divide w's {heads}"):
            check_shape("x", x, (1, 3, None, 2), "[B, T, G, K]", heads=heads)


@given(
    mask=st.lists(st.booleans(), min_size=T, max_size=T),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1.0]),
)
@examples(20)
def test_values_on_padding_are_replaced_and_not_checked(mask: list[bool], value: float) -> None:
    real = torch.tensor([mask])
    x = torch.where(real.unsqueeze(-1), -1.0, value).expand(-1, -1, 3)
    check_log_decay(x, real)
    assert torch.equal(zero_padding(x, real), -real.float().unsqueeze(-1).expand(-1, -1, 3))
    if not all(mask):
        with pytest.raises(ValueError, match=r"^gate "):
            check_log_decay(x, None, "gate")


def test_heads_are_repeated_group_by_group() -> None:
    x: Tensor = torch.arange(2.0).reshape(1, 1, 2, 1)
    assert repeat_heads(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
