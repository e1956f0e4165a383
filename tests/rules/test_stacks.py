"""Stacks of every rule with tokens that are split, padded on the left or packed. Layers pass values on in `shared`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prism import State, rules
from prism.nn.block import place_options
from tests.helpers import assert_close
from tests.rules.rule_cases import perturbed_mixer, tokens


class Stack(torch.nn.Module):
    """Three mixers with residual connections, their positions in the stack, and one shared dict per pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            perturbed_mixer(name, torch.float64, **place_options(name, index, 3)) for index in range(3)
        )

    def forward(self, x: Tensor, states: list[State] | None = None, **flags: Tensor) -> tuple[Tensor, list[State]]:
        shared: dict[str, Tensor] = {}
        new = []
        for layer, state in zip(self.layers, states or [None] * 3, strict=True):
            y, state = layer(x, state, shared=shared, **flags)
            x = x + y
            new.append(state)
        return x, new


@pytest.fixture(scope="module", params=rules.names())
def stack(request: pytest.FixtureRequest) -> Stack:
    torch.manual_seed(0)
    return Stack(request.param).requires_grad_(False)


def test_a_stack_continues_where_it_stopped(stack: Stack) -> None:
    x = tokens(2, 20)
    whole, end = stack(x)
    states, outputs = None, []
    for piece in x.split([1, 7, 3, 9], 1):
        y, states = stack(piece, states)
        outputs.append(y)
    assert_close("outputs", torch.cat(outputs, 1), whole, 1e-10)
    following = tokens(2, 2)
    assert_close("what follows", stack(following, states)[0], stack(following, end)[0], 1e-10)


def test_a_stack_does_not_see_left_padding(stack: Stack) -> None:
    x = tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :8] = False
    y, states = stack(x, mask=mask)
    for row, start in ((0, 0), (1, 8)):
        alone, _ = stack(x[row : row + 1, start:])
        assert_close(f"row {row}", y[row : row + 1, start:], alone, 1e-10)
    following = tokens(2, 2)
    after, _ = stack(following, states)
    assert_close("what follows", after[1:], stack(torch.cat([x[1:, 8:], following[1:]], 1))[0][:, -2:], 1e-10)


def test_a_stack_keeps_documents_apart(stack: Stack) -> None:
    x = tokens(1, 20)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, [6, 7, 15]] = True
    y, states = stack(x, reset=reset)
    alone = [stack(piece)[0] for piece in x.split([6, 1, 8, 5], 1)]
    assert_close("outputs", y, torch.cat(alone, 1), 1e-10)
    following = tokens(1, 2)
    assert_close("what follows", stack(following, states)[0], stack(following, stack(x[:, 15:])[1])[0], 1e-10)
