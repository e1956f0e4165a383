"""`Mixer.decode` follows its weights, keeps states as they are, and takes no copies along."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism import Mixer
from prism.engine import token
from prism.nn.state import State


def started(rule: str = "prism") -> tuple[Mixer, Tensor, State]:
    """A mixer in float64, a token, and the state before it."""
    torch.manual_seed(0)
    mixer = Mixer(rule, 16, 2).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        return mixer, x[:, 5], mixer(x[:, :5])[1]


def assert_as_forward(mixer: Mixer, x: Tensor, state: State) -> Tensor:
    with torch.no_grad():
        found, after = mixer.decode(x, state)
        expected, end = mixer(x.unsqueeze(1), state)
    torch.testing.assert_close(found, expected[:, 0], atol=1e-12, rtol=1e-12)
    for name, value in end.tensors().items():
        torch.testing.assert_close(after.tensors()[name], value, atol=1e-12, rtol=1e-12)
    return found


def merged(mixer: Mixer) -> Any:
    return None if mixer._merged._kept is None else mixer._merged._kept[1]


def scaled(mixer: Mixer) -> None:
    with torch.no_grad():
        mixer.rule.qkv.weight.mul_(2.0)


def replaced(mixer: Mixer) -> None:
    mixer.rule.out = nn.Linear(mixer.rule.out.in_features, 16, bias=False).double()


def hooked(mixer: Mixer) -> None:
    mixer.rule.gate.register_forward_hook(lambda m, a, y: y + 1)


def loaded(mixer: Mixer) -> None:
    mixer.load_state_dict({name: 1.1 * z for name, z in mixer.state_dict().items()})


@pytest.mark.parametrize("change", [scaled, replaced, hooked, loaded])
def test_changes_are_seen(change: Any) -> None:
    mixer, x, state = started()
    before = assert_as_forward(mixer, x, state)
    assert isinstance(merged(mixer), token.Merged)
    change(mixer)
    assert not torch.allclose(assert_as_forward(mixer, x, state), before, atol=1e-3)


def test_gradients_ask_for_the_forward_pass() -> None:
    mixer, x, state = started()
    y, _ = mixer.decode(x, state)
    y.sum().backward()
    assert mixer.rule.qkv.weight.grad is not None and merged(mixer) is None


def test_merged_weights_go_with_training_and_stay_at_home() -> None:
    mixer, x, state = started()
    assert_as_forward(mixer, x, state)
    for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert merged(twin) is None
        assert_as_forward(twin, x, state)
    mixer.eval()
    assert merged(mixer) is not None
    mixer.train()
    assert merged(mixer) is None


@pytest.mark.parametrize("rule", ["prism", "gla"])
def test_a_state_of_other_sizes_is_refused(rule: str) -> None:
    mixer, x, state = started(rule)
    other = Mixer(rule, 16, 1).double()
    with torch.no_grad():
        foreign = other(x.unsqueeze(1))[1]
        for wrong in (foreign, State(state.memory[:1], {n: z[:1] for n, z in state.carry.items()})):
            with pytest.raises(ValueError, match="state"):
                mixer.decode(x, wrong)
