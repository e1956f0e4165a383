"""Memories support torch's transforms: second derivatives, tangents, vmap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from tests.helpers import INPUTS, Problem, assert_close, examples, problems

FORMS = ["parallel", "chunkwise", "scan"]
DELTA = Problem(tokens=37, key_heads=1, erase_heads=1, writes=2, seed=1)  # an odd seed: the erase key is a view of k


def second_derivatives(problem: Problem, form: str) -> dict[str, Tensor]:
    leaves = {name: x.clone() for name, x in problem.inputs().items() if name not in ("d_output", "d_state")}
    wanted = [name for name in (*INPUTS, "state") if name in leaves and (name != "erase_key" or problem.seed % 2 == 0)]
    for name in wanted:
        leaves[name].requires_grad_()
    if problem.seed % 2 and problem.erase in ("strength", "write") and problem.erase_heads == problem.key_heads:
        leaves["erase_key"] = leaves["k"][:, :, :, 0]
    o, end = prism.memory(problem.update(leaves), leaves.get("state"), form)
    given = [leaves[name] for name in wanted]
    first = torch.autograd.grad(o.sin().sum() + end.cos().sum(), given, create_graph=True, allow_unused=True)
    total = sum(g.square().sum() for g in first if g is not None)
    second = torch.autograd.grad(total, given, allow_unused=True) if isinstance(total, Tensor) else [None] * len(given)
    return {
        f"{order} {name}": torch.zeros_like(x) if g is None else g.detach()
        for order, found in (("first", first), ("second", second))
        for name, x, g in zip(wanted, given, found, strict=True)
    }


def check_second_derivatives(problem: Problem, form: str) -> None:
    expected = second_derivatives(problem, "recurrent")
    largest = max(x.norm().item() for x in expected.values())
    for name, got in second_derivatives(problem, form).items():
        assert_close(f"{form} {name}", got, expected[name], 1e-8, 1e-3 * largest)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form: str) -> None:
    check_second_derivatives(DELTA, form)


@given(problem=problems(rate="weak", alike=False, batch=1))
@examples(15)
def test_second_derivatives_of_the_chunk_form(problem: Problem) -> None:
    check_second_derivatives(problem, "chunkwise")


@pytest.mark.parametrize("form", ["recurrent", *FORMS])
@pytest.mark.parametrize("rule", ["prism", "gated_delta", "linear", "gla"])
def test_function_transforms(rule: str, form: str) -> None:
    """Tangents, gradients and per-sample gradients, against the ordinary ones."""
    mixer = prism.Mixer(rule, 32, 2).double()
    x, tangent = torch.randn(2, 3, 9, 32, dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        return mixer(z, form=form)[0].sin().sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close("grad", torch.func.grad(loss)(x), gradient, 1e-10)
    assert_close("jvp", torch.func.jvp(loss, (x,), (tangent,))[1], (gradient * tangent).sum(), 1e-8)
    each = torch.func.vmap(torch.func.grad(lambda z: loss(z.unsqueeze(0))))(x)
    assert_close("per-sample", each, gradient, 1e-10)


@pytest.mark.parametrize("rule", ["rg_lru", "prism"])
def test_layers_are_mapped_and_have_tangents(rule: str) -> None:
    """Also with gates that are nearly 1, where the slope of RG-LRU's root is bounded."""
    mixer = prism.Mixer(rule, 16, 2).double()
    x, tangent = torch.randn(2, 3, 2, 9, 16, dtype=torch.float64)
    mapped = torch.vmap(lambda z: mixer(z)[0])(x)
    assert_close("vmap", mapped, torch.stack([mixer(z)[0] for z in x]), 1e-12)
    for shift in (0.0, -12.0):
        if rule == "rg_lru":
            mixer.rule.rate.data += shift
        leaf = x[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(mixer(leaf)[0].sin().sum(), leaf)
        along = torch.func.jvp(lambda z: mixer(z)[0].sin().sum(), (x[0],), (tangent[0],))[1]
        assert_close("jvp", along, (gradient * tangent[0]).sum(), 1e-8)
        each = torch.vmap(torch.func.grad(lambda z: mixer(z[None])[0].sin().sum()))(x[0])
        assert_close("per-sample", each, gradient, 1e-10)


def test_least_squares_refuses_second_derivatives() -> None:
    x = torch.randn(1, 5, 32, requires_grad=True)
    y, _ = prism.Mixer("mesa", 32, 2)(x)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(y.sin().sum(), x, create_graph=True)
