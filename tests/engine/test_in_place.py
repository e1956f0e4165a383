"""`memory_` equals `memory` token by token, and overwrites its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine import memory_
from prism.engine.memory import in_place_equivalent
from prism.nn.state import State
from tests.helpers import Problem, examples, problems

PROBLEM = Problem(tokens=3, heads=4, query_heads=2, key_heads=2, writes=2)


def update_and_state(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[prism.Update, Tensor]:
    """The update of a problem, and its state (zeros where it has none)."""
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in problem.inputs().items()}
    update = problem.update(inputs)
    shape = update.batch, update.heads, update.key_dim, update.value_dim
    return update, inputs.get("state", torch.zeros(shape, dtype=dtype))


@given(problem=problems())
@examples(40)
def test_it_is_memory(problem: Problem) -> None:
    update, state = update_and_state(problem)
    expected, end = prism.memory(update, state, "recurrent")
    kept = state.clone()
    assert torch.equal(memory_(update, kept), expected)
    assert torch.equal(kept, end)


def test_half_precision_tokens_have_a_single_precision_state() -> None:
    update, state = update_and_state(PROBLEM, torch.bfloat16)
    kept = state.float()
    expected, end = prism.memory(update, kept, "recurrent")
    assert torch.equal(memory_(update, kept), expected) and torch.equal(kept, end)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: None, "state must be a tensor to be overwritten, got NoneType"),
        (lambda state: state[:, :2], r"state has shape \[1, 2, 5, 3\], expected \[B, H, K, V\]"),
        (
            lambda state: state.float(),
            r"state must be contiguous torch\.float64 to be overwritten, got torch\.float32$",
        ),
        (lambda state: state.mT.contiguous().mT, r"with strides \[60, 15, 1, 5\]"),
        (lambda state: state.clone().requires_grad_(), "memory_ has no gradients"),
    ],
)
def test_states_that_cannot_be_overwritten_are_refused_unchanged(change: Any, sentence: str) -> None:
    update, state = update_and_state(PROBLEM)
    given = change(state)
    before = None if given is None else given.detach().clone()
    with pytest.raises(ValueError, match=sentence):
        memory_(update, given)
    assert before is None or torch.equal(given, before)


def test_tokens_with_gradients_are_refused() -> None:
    inputs = {name: x.requires_grad_() for name, x in PROBLEM.inputs().items()}
    state = torch.zeros(1, 4, 5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="call memory"):
        memory_(PROBLEM.update(inputs), state)
    with torch.no_grad():
        memory_(PROBLEM.update(inputs), state)
    assert state.any()


def test_only_linear_updates_are_accepted() -> None:
    with pytest.raises(ValueError, match="update must be an Update, whose state is one tensor, got dict"):
        memory_({}, torch.zeros(1))


def test_it_is_equivalent_to_the_recurrent_form_only() -> None:
    one, several = update_and_state(Problem(tokens=1))[0], update_and_state(PROBLEM)[0]
    substeps = update_and_state(Problem(tokens=1, substeps=2))[0]
    assert in_place_equivalent(one, "auto") and in_place_equivalent(several, "recurrent")
    for update, form in [(several, "auto"), (one, "chunkwise"), (substeps, "auto"), (object(), "auto")]:
        assert not in_place_equivalent(update, form)


def test_a_mixer_overwrites_a_state_only_if_allowed() -> None:
    mixer, x = prism.Mixer("prism", 32, 2), torch.randn(2, 4, 32)
    with torch.no_grad():
        _, state = mixer(x[:, :3])
        before = state.memory.clone()
        expected, after = mixer(x[:, 3:], state)
        assert torch.equal(state.memory, before) and not after.overwrite
        y, same = mixer(x[:, 3:], State(state.memory, state.carry, overwrite=True))
    assert same.memory is state.memory and not same.overwrite
    assert torch.equal(y, expected) and torch.equal(state.memory, after.memory)
