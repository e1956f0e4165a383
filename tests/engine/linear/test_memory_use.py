"""The chunk form's memory grows with T, not with T²."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import prism
from tests.helpers import Problem


class PeakBytes(TorchDispatchMode):
    """Peak bytes alive at once among the tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and (key := id(x.untyped_storage())) not in self.alive:
                self.alive[key] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def peak_of_forward_and_backward(form: str, decay: str, tokens: int) -> int:
    problem = Problem(tokens, heads=1, query_heads=1, key_heads=1, erase_heads=1, key_dim=4, writes=2, decay=decay)
    inputs = {name: x.float() for name, x in problem.inputs().items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if not name.startswith("d_")}
    with PeakBytes() as memory:
        o, state = prism.memory(problem.update(leaves), leaves["state"], form)
        torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()))
    return memory.peak


def growth(form: str, decay: str, tokens: int) -> float:
    """How much more memory tokens 2T … 4T add than tokens T … 2T: 2 if it is linear, 4 if it is quadratic."""
    one, two, four = (peak_of_forward_and_backward(form, decay, n * tokens) for n in (1, 2, 4))
    assert two > one
    return (four - two) / (two - one)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_chunkwise_is_linear(decay: str) -> None:
    assert growth("chunkwise", decay, 2048) < 2.2


def test_the_measure_sees_a_quadratic_form() -> None:
    assert growth("parallel", "head", 128) > 3.5
