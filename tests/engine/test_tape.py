"""Tapes: a recorded function gives the same numbers on other inputs, for any shapes and strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from prism.engine.tape.program import PreparedWeights, Program
from prism.engine.tape.record import record
from prism.engine.tape.rewrite import shortened

Function = Callable[[Tensor], list[Tensor]]


def check(function: Function, make: Callable[[], Tensor], short: bool = True) -> Program:
    """The tape of one input gives what the function gives for others; returns the last program."""
    x = make()
    tape = record(lambda: function(x), [x])
    tape = shortened(tape) if short else tape
    for _ in range(2):
        new = make()
        expected = function(new)
        outputs = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in expected]
        program = Program(tape, [new], outputs, PreparedWeights())
        program()
        for found, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, right)
    return program


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ones=st.lists(st.booleans(), min_size=4, max_size=4),
    turned=st.booleans(),
    op=st.sampled_from([torch.add, torch.mul, torch.sub, torch.div]),
)
def test_operations_broadcast_as_in_torch(shape: list[int], ones: list[bool], turned: bool, op: Function) -> None:
    other = torch.rand([1 if one else size for size, one in zip(shape, ones, strict=False)], dtype=torch.float64) + 1

    def make() -> Tensor:
        x = torch.rand(shape, dtype=torch.float64)
        return torch.rand(shape[::-1], dtype=torch.float64).permute(*reversed(range(len(shape)))) if turned else x

    check(lambda x: [op(x, other), op(op(other, x), 2.0), x.sum(-1, keepdim=True).sqrt().rsqrt()], make)  # type: ignore[call-arg]


@pytest.mark.parametrize("rows", [1, 3])
def test_maps_norms_and_windows(rows: int) -> None:
    torch.manual_seed(0)
    first, second, biased = nn.Linear(8, 12, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 8)
    norm = nn.RMSNorm(8, eps=1e-6)

    def layer(x: Tensor) -> list[Tensor]:
        n = norm(x)
        q, k, v = first(n).split(4, -1)
        gates = torch.nn.functional.silu(second(n))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        S = k.unsqueeze(-1) * v.unsqueeze(-2) - q.unsqueeze(-1) * k.unsqueeze(-2)
        o = (q.unsqueeze(-2) @ (S + q.unsqueeze(-1) @ v.unsqueeze(-2))).squeeze(-2)
        window = torch.cat([x, biased(o * gates)], 1)
        return [window[:, 1:], torch.stack([o, gates]), o.flatten(), (o.exp() + 1).log()]

    with torch.no_grad():
        for short in (False, True):
            program = check(layer, lambda: torch.randn(rows, 1, 8), short)
    assert len(program.weights.kept) >= 1, "two maps of one input are one product"


def test_a_constant_is_computed_once() -> None:
    weight = torch.rand(3)
    program = check(lambda x: [x * weight.exp().cumsum(0)], lambda: torch.rand(3))
    assert len(program.calls) == 1


def test_the_same_operation_is_computed_once() -> None:
    program = check(lambda x: [torch.cat([x.exp(), x]) + torch.cat([x.exp(), x])], lambda: torch.rand(3))
    assert len(program.calls) == 4, "exp, two copies, one sum"
