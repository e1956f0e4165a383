"""Mixtures of experts on a CPU: as transformers computes them, also behind LoRA, hooks and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import prism
from prism.hf import experts, linear_maps
from tests.hf.comparing import assert_near, called, doubles
from tests.hf.models import tiny


@pytest.fixture(autouse=True)
def _originals_afterwards() -> Any:
    yield
    prism.restore()


def experts_of(name: str) -> Any:
    model = tiny(name)
    model.config._experts_implementation = "grouped_mm"  # transformers' default
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "minimax"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 2), (5, 3), (700, 1), (700, 2)])
def test_experts_agree_with_the_originals(name: str, tokens: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens one by one, many sorted by expert; the last expert is chosen by none."""
    torch.manual_seed(0)
    layer = experts_of(name)
    count = len(layer.down_proj)
    monkeypatch.setattr(experts, "FEW", 64)
    calls = [called(monkeypatch, experts, path) for path in ("_one_by_one", "_sorted")]
    x, weights = torch.randn(tokens, 32, requires_grad=True), torch.rand(tokens, k, requires_grad=True)
    index = torch.randint(0, count - 1, (tokens, k))

    def found() -> list[Tensor]:
        with torch.no_grad():
            quiet = layer(x, index, weights)
        y = layer(x, index, weights)
        return [quiet, y.detach(), *torch.autograd.grad(y.square().sum(), [x, weights, *layer.parameters()])]

    wanted = found()
    layer.forward = experts.experts(type(layer).forward).__get__(layer)
    monkeypatch.setattr(experts, "is_plain", lambda module: True)  # `forward` of this instance is changed
    assert_near(found(), wanted)
    assert [len(each) for each in calls] == ([1, 0] if tokens * k < 16 else [0, 2])


def test_experts_of_another_kind_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [called(monkeypatch, experts, path) for path in ("_one_by_one", "_sorted")]
    given = torch.randn(1, 32), torch.zeros(1, 2, dtype=torch.long), torch.rand(1, 2)
    for name, value in (("is_transposed", True), ("act_fn", nn.GELU()), ("_is_expert_parallel", True)):
        layer = experts_of("qwen3_5_moe")
        setattr(layer, name, value)
        seen: list[Any] = []
        experts.experts(lambda *given, seen=seen: seen.append(given))(layer, *given)
        assert len(seen) == 1
    assert calls == [[], []]


def test_gradients_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_maps, "_SPAN", 6)
    index = torch.tensor([[0, 2], [2, 0], [2, 3], [0, 2], [3, 0]])
    given = doubles(5, 2), doubles(5, 2), doubles(4, 6, 2), doubles(4, 2, 3)

    def run(x: Tensor, weights: Tensor, both: Tensor, down: Tensor) -> Tensor:
        return experts._sorted(x, index, weights, both, down)

    with torch.no_grad():
        one_by_one = experts._one_by_one(given[0], index, *given[1:])
    torch.testing.assert_close(run(*given), one_by_one)
    assert gradcheck(run, given) and gradgradcheck(run, given)


def block_of(name: str) -> Any:
    """A block whose router chooses several experts, as after training."""
    model = tiny(name)
    block = next(module for module in model.modules() if type(module).__name__.endswith("SparseMoeBlock"))
    nn.init.normal_(block.gate.weight)
    return block


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_blocks_with_a_shared_expert_agree_with_the_originals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(linear_maps, "_SPAN", 2**12)
    calls = called(monkeypatch, experts, "_shared")
    block, x = block_of(name), torch.randn(2, 300, 32, requires_grad=True)

    def found() -> list[Tensor]:
        with torch.no_grad():
            quiet = block(x)
        y = block(x)
        return [quiet, y.detach(), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]

    wanted = found()
    assert not calls
    prism.accelerate(quiet=True)
    assert_near(found(), wanted)
    assert len(calls) == 2
    for part in (block.shared_expert, block.shared_expert_gate, block.shared_expert.down_proj):
        handle = part.register_forward_hook(lambda *given: None)
        assert_near(found(), wanted)
        handle.remove()
    assert len(calls) == 2, "a hook's module is called"


def test_frozen_parts_of_a_block_get_no_gradient() -> None:
    block, x = block_of("qwen3_5_moe"), torch.randn(1, 300, 32)
    prism.accelerate(quiet=True)
    block.shared_expert.requires_grad_(False)
    block(x).square().sum().backward()
    assert block.shared_expert_gate.weight.grad is not None
    assert all(weight.grad is None for weight in block.shared_expert.parameters())


def test_gradients_of_a_shared_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_maps, "_SPAN", 6)
    given = doubles(5, 2), doubles(5, 2), doubles(1, 2), doubles(6, 2), doubles(2, 3)
    x, routed, gate, both, down = given
    g, u = (x @ both.t()).chunk(2, -1)
    wanted = routed + (x @ gate.t()).sigmoid() * ((F.silu(g) * u) @ down.t())
    torch.testing.assert_close(experts._Shared.apply(*given), wanted)
    assert gradcheck(experts._Shared.apply, given) and gradgradcheck(experts._Shared.apply, given)
